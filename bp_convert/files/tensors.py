"""All tensors of a model by name: ties found, storage made compact, values filled in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

import torch
from torch import Tensor, nn

from bp_convert.errors import CheckpointError
from bp_convert.files.unpickle import listed
from bp_convert.graph.clone import all_tensors, clone

M = TypeVar("M", bound=nn.Module)


def all_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters and buffers, those too that state_dict() leaves out, under every name."""
    return {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }


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


def compacted(model: M) -> M:
    """Return the model, or a copy if a tensor of it is a slice of something larger.

    torch.save writes the whole storage of a slice.
    """
    slices = {
        id(one): _own_storage(one)
        for one in all_tensors(model)
        if one.layout is torch.strided
        and one.device.type != "meta"
        and one.untyped_storage().nbytes() > one.numel() * one.element_size()
    }
    return clone(model, tensors=slices) if slices else model


def _own_storage(tensor: Tensor) -> Tensor:
    own = tensor.detach().clone(memory_format=torch.contiguous_format)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(own, requires_grad=tensor.requires_grad)
    return own


def fill(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Give ``model`` the values, and the dtypes, in ``state``; every tensor must be there and fit.

    Tied tensors of the model stay tied. No storage is shared with ``state``.

    Raises:
        CheckpointError: names or shapes differ; then the model is unchanged.
    """
    own = all_weights(model)
    lacking = sorted(own.keys() - state.keys())
    spare = sorted(state.keys() - own.keys())
    wrong = [
        f"{name}: {tuple(state[name].shape)} saved, {tuple(tensor.shape)} in the model"
        for name, tensor in own.items()
        if name in state and state[name].shape != tensor.shape
    ]
    complaints = [
        *([f"no weights for {listed(lacking)}"] if lacking else []),
        *([f"weights of no place in it: {listed(spare)}"] if spare else []),
        *([f"other shapes: {listed(wrong)}"] if wrong else []),
    ]
    if complaints:
        raise CheckpointError(
            where=type(model).__name__,
            found="; ".join(complaints),
            allowed="exactly the weights that were saved",
            fix="give the source model, with the options that it had when it was converted",
        )
    with torch.no_grad():
        filled: set[int] = set()
        for name, tensor in own.items():
            if id(tensor) not in filled:
                filled.add(id(tensor))
                tensor.data = state[name].detach().to(tensor.device, copy=True)
