"""The contraction Y = sum_r w1[r] X w2[r] in two matrix products, without building the weight."""

from __future__ import annotations

import torch
from torch import Tensor

from bp_convert.values.factors import FactorSpec


def w2_first(k1: int, k2: int, d1: int, d2: int) -> bool:
    """Return whether contracting with w2 before w1 takes no more multiply-adds."""
    return d1 * k2 * (d2 + k1) <= k1 * d2 * (d1 + k2)


def order_costs(spec: FactorSpec) -> tuple[int, int]:
    """Return the multiply-adds of one row with w2 first, and with w1 first."""
    (k1, k2), (d1, d2), rank = spec.out, spec.inp, spec.rank
    return rank * d1 * k2 * (d2 + k1), rank * k1 * d2 * (d1 + k2)


def bilinear_macs(spec: FactorSpec) -> int:
    """Return the multiply-adds of one row in the order that ``bilinear`` takes."""
    return min(order_costs(spec))


def bilinear(x: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    """Apply ``sum_r kron(w1[r], w2[r]^T)`` to the last axis of ``x`` (paper, eq. 4).

    The R terms lie side by side, so that there are two products whatever R is, in the cheaper
    order.

    Shape:
        x: (..., d1*d2); w1: (R, k1, d1); w2: (R, d2, k2); result: (..., k1*k2).
    """
    rank, k1, d1 = w1.shape
    _, d2, k2 = w2.shape
    lead = x.shape[:-1]
    if w2_first(k1, k2, d1, d2):
        right = w2.permute(1, 0, 2).reshape(d2, rank * k2)  # (d2, R*k2)
        left = w1.permute(1, 2, 0).reshape(k1, d1 * rank)  # (k1, d1*R)
        t = torch.matmul(x.reshape(-1, d2), right)  # (N*d1, R*k2)
        if k2 == 1:
            return torch.matmul(t.view(-1, d1 * rank), left.t()).view(*lead, k1)  # (..., k1)
        t = t.view(-1, d1 * rank, k2)  # (N, d1*R, k2)
        y = torch.matmul(left, t)  # (N, k1, k2)
    else:
        left = w1.permute(1, 0, 2).reshape(k1 * rank, d1)  # (k1*R, d1)
        right = w2.reshape(rank * d2, k2)  # (R*d2, k2)
        if d2 == 1:
            t = torch.matmul(x.reshape(-1, d1), left.t())  # (N, k1*R)
        else:
            t = torch.matmul(left, x.reshape(-1, d1, d2))  # (N, k1*R, d2)
        y = torch.matmul(t.view(-1, rank * d2), right)  # (N*k1, k2)
    return y.reshape(*lead, k1 * k2)
