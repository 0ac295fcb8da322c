"""A copy of a model at the widths that a plan says, whatever stands in its layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

import torch
from torch import Tensor, nn

from bp_convert.graph.clone import clone
from bp_convert.torch_private import buffers_of, parameters_of
from bp_convert.values.plan import Plan

M = TypeVar("M", bound=nn.Module)
CASTS = {
    torch.float16: nn.Module.half,
    torch.bfloat16: nn.Module.bfloat16,
    torch.float32: nn.Module.float,
    torch.float64: nn.Module.double,
}


def reshaped(
    model: M,
    plan: Plan,
    modules: Mapping[nn.Module, nn.Module],
    tensors: Mapping[int, Tensor],
    *,
    apart: bool = False,
) -> M:
    """Copy ``model`` with modules and tensors exchanged, and set the attributes that a plan
    changes on the modules that stay; ``apart`` as for ``clone``."""
    copy = clone(model, modules, tensors, apart=apart)
    exchanged = {id(one) for new in modules.values() for one in new.modules()}
    for change in plan.attrs:
        module = copy.get_submodule(change.module)
        if id(module) not in exchanged:
            after: object = change.after
            if isinstance(change.after, tuple) and isinstance(vars(module)[change.attr], list):
                after = list(change.after)
            setattr(module, change.attr, after)
    return copy


def owner_of(model: nn.Module, state_name: str) -> tuple[nn.Module, str]:
    """Return the module that holds a parameter or buffer, and its name there."""
    path, _, name = state_name.rpartition(".")
    return model.get_submodule(path), name


def held(module: nn.Module, name: str) -> Tensor | None:
    """Return a parameter or buffer of this very module, or None."""
    found = parameters_of(module).get(name)
    return buffers_of(module).get(name) if found is None else found


def cast(model: nn.Module, dtype: torch.dtype) -> None:
    """Give a model's floating-point tensors another floating dtype, in place.

    Integers stay, and so do complex numbers, of which ``model.to(dtype)`` would drop the imaginary
    part.

    Args:
        dtype: one of ``CASTS``.
    """
    CASTS[dtype](model)
