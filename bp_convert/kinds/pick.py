"""Which rows of a call are looked at: what a weight multiplies, without what is padding."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Pick:
    """Which rows of a call are looked at.

    Attributes:
        limit: rows to take at most; the choice is random and the same for equal seeds.
        seed: of that choice.
        mask: (N, T) of which tokens count; None where all do.
    """

    limit: int
    seed: int = 0
    mask: Tensor | None = None

    def some(self, count: int, limit: int | None = None) -> Tensor | None:
        """Return indices of at most ``limit`` of ``count`` things; None for all of them."""
        limit = self.limit if limit is None else limit
        if count <= limit:
            return None
        generator = torch.Generator().manual_seed(self.seed)
        return torch.randperm(count, generator=generator)[:limit].sort().values


def linear_rows(x: Tensor, pick: Pick) -> Tensor:
    """Return rows (n, D) of inputs (..., D), without those of padding tokens."""
    rows = x.reshape(-1, x.shape[-1])
    if pick.mask is not None and x.shape[:-1] == pick.mask.shape:
        rows = rows[pick.mask.reshape(-1).to(x.device, torch.bool)]
    chosen = pick.some(len(rows))
    return rows if chosen is None else rows[chosen.to(rows.device)]
