"""Sizes of the blocks in which a widened layer's outputs may repeat: those of attention's heads."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from torch import nn

from bp_convert.values.plan import LayerPlan, Plan

TRIES = 12  # of a model


def block_sizes(model: nn.Module, plan: Plan, unknown: Collection[str]) -> Iterator[dict[str, int]]:
    """Yield sizes by layer that are worth a trial.

    A head's size is a number that the module of its projections keeps. Which attribute that is
    differs from class to class, so every one that divides what a layer puts out, before and after,
    is tried for all modules of a class, the largest first, on all their layers and on all but one.

    Args:
        unknown: layers whose input shows that those before them should have repeated in blocks;
            they themselves stay as they are.
    """
    changed = {(change.module, change.attr) for change in plan.attrs}
    found: dict[tuple[type[nn.Module], str], dict[str, int]] = {}
    for layer in plan.layers:
        if layer.name in unknown or layer.outputs[0] == layer.outputs[1]:
            continue
        owner = layer.name.rpartition(".")[0]
        module = model.get_submodule(owner)
        for attr, size in vars(module).items():
            if type(size) is int and (owner, attr) not in changed and _divides(size, layer):
                found.setdefault((type(module), attr), {})[layer.name] = size
    tried: list[dict[str, int]] = []
    for sizes in sorted(found.values(), key=lambda one: -max(one.values())):
        for some in (sizes, *_but_one(sizes)):
            if some not in tried and len(tried) < TRIES:
                tried.append(some)
                yield some


def _but_one(sizes: dict[str, int]) -> Iterator[dict[str, int]]:
    """Yield the layers but those of one attribute: modules hold others than projections."""
    leaves = {name: name.rpartition(".")[2] for name in sizes}
    for left_out in dict.fromkeys(leaves.values()):
        some = {name: size for name, size in sizes.items() if leaves[name] != left_out}
        if some:
            yield some


def _divides(size: int, layer: LayerPlan) -> bool:
    before, after = layer.outputs
    return 1 < size < before and before % size == 0 and after % size == 0
