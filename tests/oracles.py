"""Naive dense versions, written from the definitions and from nothing in the package."""

from __future__ import annotations

from itertools import product

import torch
from torch import Tensor

from bp_convert.kron.root import Root


def kron_sum(w1: Tensor, w2: Tensor) -> Tensor:
    """Build ``sum_r kron(w1[r], w2[r]^T)``: (k1*k2, d1*d2)."""
    return sum(kron(a, b.t()) for a, b in zip(w1, w2, strict=True))  # type: ignore[return-value]


def kron(a: Tensor, b: Tensor) -> Tensor:
    """Put ``a[i, j] * b`` at block (i, j); ``torch.kron`` fails on some strides."""
    rows = [torch.cat([value * b for value in row], 1) for row in a]
    return torch.cat(rows, 0)


def table_sum(w1: Tensor, w2: Tensor, rows: int) -> Tensor:
    """Build ``sum_r kron(w1[r], w2[r])``, cut to ``rows``."""
    whole = sum(kron(a, b) for a, b in zip(w1, w2, strict=True))
    return whole[:rows]  # type: ignore[index]


def conv_weight(
    w1: Tensor,
    w2: Tensor,
    channels: tuple[int, int],
    kernel: tuple[int, ...],
    axes: tuple[int, ...],
) -> Tensor:
    """Build a convolution's weight entry by entry from its definition."""
    terms, k1, _ = w1.shape
    k2 = w2.shape[2]
    c1, c2 = channels
    weight = torch.zeros(k1 * k2, c1 * c2, *kernel, dtype=w1.dtype)
    for i1, i2, j1, j2 in product(range(k1), range(k2), range(c1), range(c2)):
        for place in product(*map(range, kernel)):
            p1 = p2 = 0
            for at, size, owner in zip(place, kernel, axes, strict=True):
                if owner == 1:
                    p1 = p1 * size + at
                else:
                    p2 = p2 * size + at
            s1 = w1.shape[2] // c1
            s2 = w2.shape[1] // c2
            value = sum(w1[r, i1, j1 * s1 + p1] * w2[r, j2 * s2 + p2, i2] for r in range(terms))
            weight[(i1 * k2 + i2, j1 * c2 + j2, *place)] = value
    return weight


def lstm(x: Tensor, layers: list[list[dict[str, Tensor]]], hidden: int) -> Tensor:
    """Step through (T, N, I) one gate at a time; ``layers`` holds dense weights by direction."""
    for directions in layers:
        outputs = []
        for reverse, one in enumerate(directions):
            h = torch.zeros(x.shape[1], hidden, dtype=x.dtype)
            c = torch.zeros_like(h)
            steps: list[Tensor] = [h] * len(x)
            order = range(len(x) - 1, -1, -1) if reverse else range(len(x))
            for t in order:
                z = x[t] @ one["ih"].t() + h @ one["hh"].t() + one["bias"]
                i, f, g, o = z.split(hidden, 1)
                c = f.sigmoid() * c + i.sigmoid() * g.tanh()
                h = o.sigmoid() * c.tanh()
                steps[t] = h
            outputs.append(torch.stack(steps))
        x = torch.cat(outputs, -1)
    return x


def spread_moment(size: int, ratio: float = 100.0) -> Tensor:
    """Draw a positive definite matrix whose eigenvalues span ``ratio``, in float64."""
    turn = torch.linalg.qr(torch.randn(size, size, dtype=torch.float64))[0]
    values = torch.logspace(0, -1, size, ratio, dtype=torch.float64)
    moment = turn * values @ turn.t()
    return (moment + moment.t()) / 2


def whole(root: Root) -> Tensor:
    """Write a root out: L (d, d)."""
    found = torch.ones(1, 1, dtype=torch.float64)
    for part in root.parts:
        found = kron(found, torch.diag(part) if part.dim() == 1 else part)
    return found
