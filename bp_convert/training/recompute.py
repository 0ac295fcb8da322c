"""Activations computed again in the backward pass, instead of kept."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from bp_convert.torch_private import BatchNormBase

LEAVES = 4  # layers in a row that are worth cutting into segments


def recompute(model: nn.Module) -> list[nn.Module]:
    """Let blocks of a model keep only their inputs; ``undo`` takes it back.

    Blocks are the children of a Sequential or ModuleList that hold layers of their own; a long
    Sequential of single layers is cut into segments instead.

    Returns:
        The modules that were changed; none where the model has no such row.
    """
    found: list[nn.Module] = []
    inside: set[int] = set()
    for module in model.modules():
        if id(module) in inside or not isinstance(module, nn.Sequential | nn.ModuleList):
            continue
        children = list(module.children())
        blocks = [one for one in children if any(True for _ in one.children())]
        if isinstance(module, nn.Sequential) and not blocks and len(children) >= LEAVES:
            module.forward = _segments(module)  # type: ignore[method-assign]
            found.append(module)
        for block in blocks:
            if isinstance(block, nn.ModuleList | nn.ModuleDict):
                continue
            block.forward = _again(block, block.forward, block)
            found.append(block)
            inside |= {id(one) for one in block.modules()}
    return found


def undo(changed: list[nn.Module]) -> None:
    """Give modules the forward of their class back."""
    for module in changed:
        module.__dict__.pop("forward", None)


def _again(module: nn.Module, forward: Callable[..., Any], inside: nn.Module) -> Callable[..., Any]:
    """Return a forward of which only the inputs are kept, where gradients will be asked for.

    Args:
        inside: what is in train mode then.
    """

    def run(*args: Any, **kwargs: Any) -> Any:
        if not (torch.is_grad_enabled() and inside.training):
            return forward(*args, **kwargs)

        def contexts() -> tuple[Any, Any]:
            return contextlib.nullcontext(), _once(module)

        return checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)

    return run


def _segments(row: nn.Sequential) -> Callable[[Any], Any]:
    layers = list(row.children())
    size = max(2, math.isqrt(len(layers)))
    parts = [nn.Sequential(*layers[i : i + size]) for i in range(0, len(layers), size)]
    forwards = [_again(part, part.forward, row) for part in parts]

    def run(value: Any) -> Any:
        for forward in forwards:
            value = forward(value)
        return value

    run.starts = [next(iter(part)) for part in parts]  # type: ignore[attr-defined]
    return run


def starts(changed: list[nn.Module]) -> list[nn.Module]:
    """Return the modules whose inputs are kept in the forward pass."""
    return [one for module in changed for one in getattr(module.forward, "starts", [module])]


@contextlib.contextmanager
def _once(module: nn.Module) -> Iterator[None]:
    """Let batch norms count a batch that they see a second time only once."""
    norms = [one for one in module.modules() if isinstance(one, BatchNormBase)]
    kept = [one.momentum for one in norms]
    for one in norms:
        one.momentum = 0.0
    try:
        yield
    finally:
        for one, momentum in zip(norms, kept, strict=True):
            one.momentum = momentum
            if one.num_batches_tracked is not None and one.training:
                one.num_batches_tracked.data.sub_(1)
