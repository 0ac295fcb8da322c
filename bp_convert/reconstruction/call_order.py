"""What is tuned one after the other: blocks, and the layers between them, in the order of calls."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import dropwhile, groupby, pairwise
from typing import Any

from torch import nn

from bp_convert.calibration.tap import Batch, run_quietly
from bp_convert.graph.running import in_mode
from bp_convert.kinds import is_twin
from bp_convert.reconstruction.block_finding import layers_beside

GROUPS = 8  # of layers outside of blocks, at most: each runs all that is before it


@dataclass(frozen=True)
class Segment:
    """What is tuned together.

    Attributes:
        modules: dotted names of a block, or of layers that follow each other.
        block: it is one module, whose output counts.
        behind: the module whose inputs count, where it is no block; None for the model's outputs.
    """

    modules: tuple[str, ...]
    block: bool = False
    behind: str | None = None

    @property
    def name(self) -> str:
        """What it is called: by its first module and its last."""
        first, last = self.modules[0], self.modules[-1]
        return first if first == last else f"{first} to {last}"


def segments_of(model: nn.Module, blocks: Sequence[str], batch: Batch) -> list[Segment]:
    """Run a model once, and return what of it is tuned together, in the order of calls.

    A block that is not called just once is taken apart into its layers. Those outside of blocks
    make groups, each up to the next layer that was converted; those before the first stay.

    Raises:
        DataError: the model does not run on the batch.
    """
    once = [name for name, count in called(model, blocks, batch).items() if count == 1]
    beside = layers_beside(model, once)
    calls = called(model, [*once, *beside], batch)
    found: list[Segment] = []
    # What stands before all that was converted has nothing to make up for.
    order = list(dropwhile(lambda name: not _is_converted(model, name), calls))
    for alone, run in groupby(order, lambda name: name in once):
        names = list(run)
        if alone:
            found += [Segment((name,), block=True) for name in names]
        else:
            found += [Segment(tuple(group)) for group in _groups(model, names)]
    ends = [*(one.modules[0] for one in found), None][1:]
    return [
        one if one.block else Segment(one.modules, behind=end)
        for one, end in zip(found, ends, strict=True)
    ]


def _groups(model: nn.Module, names: Sequence[str]) -> Iterator[list[str]]:
    """Part layers in a row before each that was converted, into few groups."""
    starts = [0]
    seen = False
    for at, name in enumerate(names):
        converted = _is_converted(model, name)
        if converted and seen:
            starts.append(at)
        seen = seen or converted
    if len(starts) > GROUPS:
        starts = [starts[round(i * len(starts) / GROUPS)] for i in range(GROUPS)]
    for start, end in pairwise([*starts, len(names)]):
        yield list(names[start:end])


def _is_converted(model: nn.Module, name: str) -> bool:
    return any(map(is_twin, model.get_submodule(name).modules()))


def called(model: nn.Module, names: Sequence[str], batch: Batch) -> dict[str, int]:
    """Return how often modules are called in a pass, in the order of their first calls."""
    found: dict[str, int] = {}

    def count(name: str) -> Any:
        def hook(*_: Any) -> None:
            found[name] = found.get(name, 0) + 1

        return hook

    with ExitStack() as hooks, in_mode(model, training=False):
        for name in names:
            module = model.get_submodule(name)
            hooks.enter_context(module.register_forward_pre_hook(count(name)))
        run_quietly(model, batch)
    return found
