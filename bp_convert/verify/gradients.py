"""Whether new parameters receive a gradient where their plain counterparts do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from bp_convert.errors import VerificationError
from bp_convert.graph.tree import tensors_in
from bp_convert.kinds import is_twin
from bp_convert.verify.pair import Pair, failed
from bp_convert.verify.way import Way


def check_gradients(
    pair: Pair, way: Way, expected: Any, got: Any, made: Sequence[str]
) -> tuple[bool, list[str]]:
    """Check that parameters which conversion made receive a gradient.

    Args:
        expected: what the plain layers gave in this way, with its graph.
        got: what the conversion gave.
        made: names of the parameters.

    Returns:
        Whether there was any to be checked, and remarks.

    Raises:
        VerificationError: one receives none though its plain counterpart does, or the backward
            pass fails.
    """
    notes: list[str] = []
    old = _reached(pair.plain, expected)
    if not old:
        notes.append("gradients not checked: the source's outputs give none")
        return False, notes
    try:
        new = _grads(pair.twin, got)
    except RuntimeError as problem:
        if pair.sketches:  # which know of no gradient of a weight
            raise failed(pair, way, problem) from problem
        try:
            _grads(pair.plain, expected)
        except RuntimeError:
            notes.append(f"gradients not checked: the source gives none ({problem})")
            return False, notes
        raise failed(pair, way, problem) from problem
    named = dict(pair.twin.named_parameters())
    frozen = [name for name in made if not named[name].requires_grad]
    if frozen:
        notes.append(f"{len(frozen)} new parameters are frozen, as in the source")
    twins = {name for name, one in pair.twin.named_modules() if is_twin(one)}
    asked = [name for name in made if name not in frozen and _has_gradient(name, twins, old)]
    if any(name not in new for name in asked) and not pair.sketches:
        # What the graph leads to may get none but zeros, as behind a second derivative.
        old = _grads(pair.plain, expected, zeros=False)
        asked = [name for name in asked if _has_gradient(name, twins, old)]
    without = [name for name in asked if name not in new]
    if without:
        raise VerificationError(
            where=without[0],
            found=f"{len(without)} of {len(asked)} new parameters receive no gradient, where "
            "their plain layers do",
            allowed="a gradient wherever the plain layer gets one",
            fix="keep these layers with --exclude",
        )
    silent = len(made) - len(frozen) - len(asked)
    if silent:
        notes.append(f"{silent} new parameters get no gradient on this input, as in the source")
    return bool(asked), notes


def _reached(model: nn.Module, output: Any) -> set[str]:
    """Return the parameters to which the graph of an output leads."""
    names = {id(one): name for name, one in model.named_parameters()}
    todo = [one.grad_fn for one in tensors_in(output) if one.grad_fn is not None]
    known, found = set(todo), set()
    while todo:
        node: Any = todo.pop()
        found.add(names.get(id(getattr(node, "variable", None)), ""))
        parents = {parent for parent, _ in node.next_functions if parent is not None} - known
        known |= parents
        todo.extend(parents)
    return found - {""}


def _grads(model: nn.Module, output: Any, *, zeros: bool = True) -> set[str]:
    """Return the parameters that receive a gradient from an output.

    Args:
        zeros: count those that receive nothing but zeros.

    Raises:
        RuntimeError: the backward pass fails.
    """
    draws = torch.Generator().manual_seed(0)
    parts = []
    for leaf in tensors_in(output):
        if leaf.requires_grad:
            weights = torch.rand(leaf.shape, generator=draws).to(leaf.device)
            real = torch.view_as_real(leaf).sum(-1) if leaf.is_complex() else leaf
            parts.append((real.float() * weights).sum())
    try:
        if parts:
            torch.autograd.backward(torch.stack(parts).sum())
        got = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
        return {name for name, grad in got.items() if zeros or bool(grad.any())}
    finally:
        model.zero_grad(set_to_none=True)


def _has_gradient(name: str, twins: set[str], old: set[str]) -> bool:
    """Return whether the plain counterpart of a new parameter receives a gradient."""
    layer, _, own = name.rpartition(".")
    if layer in twins:
        # A twin inside another stands for a part of what the outer one stands for.
        layer = next((one for one in twins if layer.startswith(f"{one}.")), layer)
        part = "bias" if own.startswith("bias") else "weight"
        prefix = f"{layer}." if layer else ""
        known = any(one.startswith(prefix) and part in one.removeprefix(prefix) for one in old)
        return known or layer in old  # a bare parameter
    return name in old
