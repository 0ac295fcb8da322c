"""Columns of activations told apart and found again."""

from __future__ import annotations

import torch
from torch import Tensor

FINGERPRINT = 12  # random projections that stand for a column
NEIGHBOURS = 8  # candidates tried on either side of the nearest first projection
TOLERANCE = 1e-3  # of the columns' spread; equal columns differ by rounding, others by about 1


def fingerprint(given: Tensor, axis: int) -> Tensor:
    """Project the columns along ``axis`` on a few random directions, the same for each size.

    Shape:
        result (D, FINGERPRINT), float64, on the CPU, with D the length of the axis.
    """
    columns = given.movedim(axis, 0).flatten(1).to(torch.float64).cpu()  # (D, M)
    size = columns.shape[1]
    generator = torch.Generator().manual_seed(size)
    drawn = torch.randn(size, FINGERPRINT, generator=generator, dtype=torch.float64)
    projected: Tensor = columns @ (drawn / max(1.0, size**0.5))
    return projected


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
