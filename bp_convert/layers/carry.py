"""What passes between a dense layer and its bilinear twin besides the weight."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import nn

M = TypeVar("M", bound=nn.Module)


def adopt(twin: M, dense: Any) -> M:
    """Give a fitted twin the dense layer's bias, what is trained, and the training flag."""
    source: Any = twin
    for factor in (source.w1, source.w2):
        factor.requires_grad_(dense.weight.requires_grad)
    _bias(dense, source)
    return twin.train(dense.training)


def blank(kind: type[M], *args: Any, device: torch.device, **named: Any) -> M:
    """Make a layer whose weights are not set: none is drawn only to be overwritten."""
    return kind(*args, device="meta", **named).to_empty(device=device)


def release(dense: M, twin: Any) -> M:
    """Give a dense layer its twin's weight and bias, what is trained, and the training flag."""
    target: Any = dense
    with torch.no_grad():
        target.weight.copy_(twin.dense_weight())
    target.weight.requires_grad_(twin.w1.requires_grad)
    _bias(twin, target)
    return dense.train(twin.training)


def _bias(source: Any, target: Any) -> None:
    if target.bias is not None:
        with torch.no_grad():
            target.bias.copy_(source.bias)
        target.bias.requires_grad_(source.bias.requires_grad)
