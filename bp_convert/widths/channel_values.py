"""Values by which channels are told apart, and by which columns of activations are found again."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from bp_convert.graph.running import Args, Kwargs
from bp_convert.graph.tree import map_tensors
from bp_convert.kinds import relative_of

FINGERPRINT = 12  # random projections that stand for a column
NEIGHBOURS = 8  # candidates tried on either side of the nearest first projection
TOLERANCE = 1e-3  # of the columns' spread; equal columns differ by rounding, others by about 1


def fingerprint(given: Tensor, axis: int) -> Tensor:
    """Project the columns along ``axis`` on a few random directions, the same for each size.

    Shape:
        result (D, FINGERPRINT), float64, on the CPU, with D the length of the axis.
    """
    axis %= given.dim()
    outer, inner = prod(given.shape[:axis]), prod(given.shape[axis + 1 :])
    size = outer * inner
    rows = given.detach().cpu()
    rows = rows if rows.dtype == torch.float64 else rows.to(torch.float32)
    drawn = _directions(size) / max(1.0, size**0.5)  # (M, FINGERPRINT)
    drawn = drawn.to(rows.dtype).view(outer, inner, FINGERPRINT)
    # One product of what lies together, and no other copy: (outer, D, inner) as it stands.
    if inner == 1:
        projected: Tensor = rows.reshape(outer, given.shape[axis]).t() @ drawn[:, 0]
        return projected.to(torch.float64)
    apart = rows.reshape(outer, given.shape[axis], inner)
    return torch.bmm(apart, drawn).sum(0, dtype=torch.float64)


@lru_cache(maxsize=16)
def _directions(size: int) -> Tensor:
    """Draw directions (M, FINGERPRINT), the same each time."""
    generator = torch.Generator().manual_seed(size)
    return torch.randn(size, FINGERPRINT, generator=generator)


def match(old: Tensor, new: Tensor) -> Tensor | None:
    """Return for each new column the equal old one, or None where one has no equal.

    Columns are compared by their fingerprints: sorted by the first projection, each new column is
    tried against the old ones next to it.
    """
    if old.shape[0] == new.shape[0] and torch.allclose(old, new, rtol=1e-4, atol=1e-8):
        return torch.arange(len(old))
    if not bool(torch.isfinite(old).all() and torch.isfinite(new).all()):
        return None
    order = old[:, 0].argsort()
    place = torch.searchsorted(old[order, 0].contiguous(), new[:, 0].contiguous())
    scale = (old - old.mean(0)).square().sum(1).mean().sqrt().clamp(min=1e-30)
    best = torch.full((len(new),), float("inf"), dtype=torch.float64)
    index = torch.zeros(len(new), dtype=torch.long)
    for shift in range(-NEIGHBOURS, NEIGHBOURS):
        candidate = order[(place + shift).clamp(0, len(old) - 1)]
        gap = (old[candidate] - new).square().sum(1).sqrt()
        better = gap < best
        best = torch.where(better, gap, best)
        index = torch.where(better, candidate, index)
    return index if bool((best <= TOLERANCE * scale).all()) else None


def shaken_like(tensor: Tensor, name: str) -> Tensor:
    """Draw values that tell channels apart; positive ones keep rectifiers from hiding any."""
    if not tensor.is_floating_point():
        return tensor.detach().clone()
    if tensor.dim() > 1:
        fan = max(1, tensor[0].numel())
        drawn: Tensor = (torch.rand(tensor.shape, dtype=tensor.dtype) + 0.1) / fan**0.5
        return drawn
    if name == "running_mean":
        return torch.zeros_like(tensor, device="cpu")
    return torch.rand(tensor.shape, dtype=tensor.dtype) + 0.5


def map_floats(output: Any, act: Callable[[Tensor], Tensor]) -> Any:
    """Apply ``act`` to every floating-point tensor of an output."""
    return map_tensors(lambda t: act(t) if t.is_floating_point() else t, output)


def empty_output(module: nn.Module, args: Args, kwargs: Kwargs) -> Tensor | None:
    """Return an empty tensor of the shape that a layer gives out, where that is easily told."""
    if len(args) != 1 or kwargs or not isinstance(args[0], Tensor):
        return None
    x = args[0]
    kind = relative_of(module)
    return kind.empty_output(module, x) if kind and isinstance(module, kind.dense) else None
