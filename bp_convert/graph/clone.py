"""Copies of a model in which chosen modules and tensors are exchanged for others."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TypeVar

import torch
from torch import Tensor, nn

from bp_convert.errors import PlanError

M = TypeVar("M", bound=nn.Module)


def clone(
    model: M,
    modules: Mapping[nn.Module, nn.Module] | None = None,
    tensors: Mapping[int, Tensor] | None = None,
) -> M:
    """Copy ``model``; wherever it holds a key of ``modules`` the copy holds the value instead.

    ``tensors`` does the same for tensors, by their ``id``. What is exchanged is never copied, so
    weights that fall away cost no memory. All names and references of a shared module or a tied
    tensor follow, also those in lists and dictionaries that torch does not know of.

    Raises:
        PlanError: the model cannot be copied.
    """
    memo: dict[int, object] = dict(tensors or {})
    memo.update({id(old): new for old, new in (modules or {}).items()})
    try:
        return copy.deepcopy(model, memo)
    except Exception as problem:
        raise PlanError(
            where=type(model).__name__,
            found=f"the model cannot be copied: {problem}",
            allowed="a model that copy.deepcopy copies",
            fix="detach tensors that are kept as attributes, and drop locks, generators and "
            "open files from the model",
        ) from problem


def clone_to_meta(model: M, modules: Mapping[nn.Module, nn.Module] | None = None) -> M:
    """Copy the structure of ``model`` with every tensor on the meta device, without its data."""
    return clone(model, modules, {id(tensor): to_meta(tensor) for tensor in all_tensors(model)})


def shadow(model: M) -> M:
    """Copy all of ``model`` but its parameters, which are shared: what a forward writes on its
    module, such as a counter or a buffer, stays with the copy."""
    return clone(model, None, {id(one): one for one in model.parameters()})


def to_meta(tensor: Tensor) -> Tensor:
    """Return a tensor of the same shape, dtype and class that holds no data."""
    empty = torch.empty_like(tensor, device="meta")
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(empty, requires_grad=tensor.requires_grad)
    return empty


def all_tensors(model: nn.Module) -> list[Tensor]:
    """Return every tensor that a module of the model holds, plain attributes included."""
    found: dict[int, Tensor] = {}
    for module in model.modules():
        held = [*module._parameters.values(), *module._buffers.values(), *vars(module).values()]
        found.update({id(one): one for one in held if isinstance(one, Tensor)})
    return list(found.values())
