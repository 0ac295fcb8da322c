"""What passes between a dense layer and its bilinear twin besides the weight."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import nn

M = TypeVar("M", bound=nn.Module)


def fields_of(layer: nn.Module, names: Sequence[str]) -> dict[str, Any]:
    """Read constructor fields back from a layer; of a bias, whether there is one."""
    fields = {name: getattr(layer, name) for name in names}
    if "bias" in fields and not isinstance(fields["bias"], bool):
        fields["bias"] = fields["bias"] is not None
    return fields


def unusual(layer: nn.Module, names: Sequence[str]) -> list[str]:
    """Return ``name=value`` of the fields that differ from the constructor's defaults."""
    defaults = inspect.signature(type(layer)).parameters
    return [
        f"{name}={value!r}"
        for name, value in fields_of(layer, names).items()
        if value != defaults[name].default
    ]


def adopt(twin: M, dense: nn.Module) -> M:
    """Give a twin the dense layer's training flag, and train of it what is trained there."""
    held = list(dense.named_parameters())
    weight = next((p for name, p in held if name.startswith("weight")), None)
    bias = next((p for name, p in held if name.startswith("bias")), None)
    for name, parameter in twin.named_parameters():
        source = bias if name.startswith("bias") else weight
        if source is not None:
            parameter.requires_grad_(source.requires_grad)
    return twin.train(dense.training)


def blank(kind: type[M], fields: dict[str, Any], like: torch.Tensor) -> M:
    """Make a layer of a tensor's device and dtype whose weights are not set: none is drawn only
    to be overwritten."""
    with torch.device("meta"):
        made = kind(**fields)
    return made.to(like.dtype).to_empty(device=like.device)


@torch.no_grad()
def release(dense: M, twin: Any) -> M:
    """Give a dense layer its twin's weight and bias, what is trained, and the training flag."""
    target: Any = dense
    target.weight.copy_(twin.weight)
    target.weight.requires_grad_(twin.w1.requires_grad)
    if getattr(target, "bias", None) is not None:
        target.bias.copy_(twin.bias)
        target.bias.requires_grad_(twin.bias.requires_grad)
    return dense.train(twin.training)
