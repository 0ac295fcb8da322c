"""Roots of metrics: lower triangular matrices, kept as the Kronecker factors that they come in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

_Step = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Root:
    """``L = P1 kron P2 kron ...``, never built.

    Attributes:
        parts: lower triangular (n, n) each, or (n,) for a diagonal.
    """

    parts: tuple[Tensor, ...]

    @property
    def size(self) -> int:
        """Rows, and columns, of L."""
        return prod(len(part) for part in self.parts)

    def times(self, rows: Tensor) -> Tensor:
        """Return ``rows L`` for rows (n, d)."""
        return self._each(rows, _times)

    def solve(self, rows: Tensor) -> Tensor:
        """Return ``rows L^-1`` for rows (n, d)."""
        return self._each(rows, _solve)

    def times_left(self, batch: Tensor) -> Tensor:
        """Return ``L^T M`` for each matrix M (d, m) of a batch (n, d, m)."""
        n, d, m = batch.shape
        if len(self.parts) == 1 and self.parts[0].dim() == 2:
            part = self.parts[0].to(batch.dtype).t()
            if m >= d:
                return torch.matmul(part, batch)
            # One product: a batch of them on few columns is up to a hundred times slower.
            flat = batch.transpose(0, 1).reshape(d, n * m)
            return (part @ flat).view(d, n, m).transpose(0, 1)
        return self.times(batch.transpose(1, 2).reshape(n * m, d)).view(n, m, d).transpose(1, 2)

    def _each(self, rows: Tensor, step: _Step) -> Tensor:
        """Apply a step of each part along its own axis of the columns."""
        count, width = rows.shape
        before, behind = 1, width
        for part in self.parts:
            size = len(part)
            behind //= size
            part = part.to(rows.dtype)
            if behind == 1:
                rows = step(rows.reshape(-1, size), part).reshape(count, width)
            else:
                apart = rows.reshape(count * before, size, behind).transpose(1, 2)
                done = step(apart.reshape(-1, size), part).reshape(count * before, behind, size)
                rows = done.transpose(1, 2).reshape(count, width)
            before *= size
        return rows


def _times(rows: Tensor, part: Tensor) -> Tensor:
    return rows * part if part.dim() == 1 else rows @ part


def _solve(rows: Tensor, part: Tensor) -> Tensor:
    if part.dim() == 1:
        return rows / part
    found: Tensor = torch.linalg.solve_triangular(part, rows, upper=False, left=False)
    return found
