"""A model's state by name: collected, ties found, values filled in."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor, nn

from bp_convert.errors import CheckpointError
from bp_convert.files.unpickle import listed
from bp_convert.graph.clone import all_weights


def further_state(model: nn.Module) -> dict[str, object]:
    """Return what state_dict() gives besides parameters and buffers: extra state, packed weights.

    Raises:
        CheckpointError: the model's state_dict() fails.
    """
    weights = all_weights(model)
    try:
        entries = model.state_dict(keep_vars=True)
    except Exception as problem:
        raise CheckpointError(
            where=type(model).__name__,
            found=f"its state_dict() fails with {type(problem).__name__}: {problem}",
            allowed="a model whose state can be had",
            fix="mend its state_dict() or get_extra_state()",
        ) from problem
    return {name: value for name, value in entries.items() if name not in weights}


def whole_state(model: nn.Module) -> dict[str, object]:
    """Return all that a file must hold: every weight, and what state_dict() gives besides."""
    return {**all_weights(model), **further_state(model)}


def split_ties(weights: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Keep each tensor under one name; return these, and a map from other names to it."""
    kept: dict[str, Tensor] = {}
    first: dict[tuple[object, ...], str] = {}
    ties: dict[str, str] = {}
    for name, tensor in weights.items():
        place = (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
        # Tensors without elements share no storage, though they share the address 0.
        key = place if tensor.numel() else (id(tensor),)
        if key in first:
            ties[name] = first[key]
        else:
            first[key] = name
            kept[name] = tensor
    return kept, ties


def join_ties(kept: Mapping[str, Tensor], ties: Mapping[str, str], where: str) -> dict[str, Tensor]:
    """Undo ``split_ties``: give each tensor back under all of its names.

    Raises:
        CheckpointError: a tie names a tensor that is not there.
    """
    lost = [name for name, target in ties.items() if target not in kept]
    if lost:
        raise CheckpointError(
            where=where,
            found=f"ties of {listed(lost)} to weights that are not in the file",
            allowed="the weights and the plan of one conversion",
            fix="copy both files again, from one conversion",
        )
    return {**kept, **{name: kept[target] for name, target in ties.items()}}


def fill(model: nn.Module, state: Mapping[str, object]) -> None:
    """Give ``model`` the values, and the dtypes, in ``state``; every entry must be there and fit.

    Tied tensors of the model stay tied. No storage is shared with ``state``.

    Raises:
        CheckpointError: names or shapes differ, and the model is unchanged; or a module does not
            take its extra state.
    """
    own, further = all_weights(model), further_state(model)
    lacking = sorted({*own, *further} - state.keys())
    spare = sorted(state.keys() - {*own, *further})
    wrong = [
        f"{name}: {_shape(state[name])} saved, {tuple(tensor.shape)} in the model"
        for name, tensor in own.items()
        if name in state and _shape(state[name]) != tuple(tensor.shape)
    ]
    complaints = [
        *([f"no weights for {listed(lacking)}"] if lacking else []),
        *([f"weights of no place in it: {listed(spare)}"] if spare else []),
        *([f"other shapes: {listed(wrong)}"] if wrong else []),
    ]
    if complaints:
        raise _unfitting(model, "; ".join(complaints))
    with torch.no_grad():
        filled: set[int] = set()
        for name, tensor in own.items():
            if id(tensor) not in filled:
                filled.add(id(tensor))
                saved = cast(Tensor, state[name])
                tensor.data = saved.detach().to(tensor.device, copy=True)
    if further:
        _give(model, state, [*further])


def _give(model: nn.Module, state: Mapping[str, object], further: list[str]) -> None:
    """Hand modules what they keep besides weights, as load_state_dict() does."""
    # A module that packs its weights takes them together with its other entries, and asks for the
    # versions that state_dict() notes.
    entries = model.state_dict()
    entries.update({name: state[name] for name in entries if name in state})
    entries.update({name: copy.deepcopy(state[name]) for name in further})
    try:
        left = model.load_state_dict(entries, strict=False).unexpected_keys
    except Exception as problem:
        raise _unfitting(model, f"state that it does not take: {problem}") from problem
    if left:
        raise _unfitting(model, f"state of no place in it: {listed(sorted(left))}")


def _shape(value: object) -> tuple[int, ...] | None:
    return tuple(value.shape) if isinstance(value, Tensor) else None


def _unfitting(model: nn.Module, found: str) -> CheckpointError:
    return CheckpointError(
        where=type(model).__name__,
        found=found,
        allowed="exactly the weights that were saved",
        fix="give the source model, with the options that it had when it was converted",
    )
