"""Rounding that keeps what a weight computes: each column's error is made up for by the columns
that are still to be rounded.

After Frantar, Ashkboos, Hoefler and Alistarh, GPTQ (ICLR 2023), section 3, which is Hassibi and
Stork's Optimal Brain Surgeon with the order given: here the order is by what the metric weighs,
and every number has a scale of its own, so that groups may lie along any axis.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bp_convert.bits.grid import Grid

DAMPED = 0.01  # of the mean diagonal, as in GPTQ
BLOCK = 128  # columns after which the rest is made up for
WIDEST = 4096  # columns beyond which numbers are rounded to the nearest


def rounded_in(matrix: Tensor, scales: Tensor, grid: Grid, metric: Tensor | None) -> Tensor:
    """Return numbers on a grid for ``matrix`` (K, D) of small ``tr(E C E^T)``, at most that of
    rounding to the nearest.

    Args:
        scales: (K, D).
        metric: C (D, D); None rounds to the nearest.
    """
    near = grid.nearest(matrix, scales)
    if metric is None or matrix.shape[1] > WIDEST:
        return near
    form = metric.double()
    found = _made_up(matrix, scales, grid, form)
    if found is None or not _energy(found - matrix, form) < _energy(near - matrix, form):
        return near
    return found


def _energy(gap: Tensor, form: Tensor) -> float:
    wide = gap.double()
    return float(((wide @ form) * wide).sum())


def _made_up(matrix: Tensor, scales: Tensor, grid: Grid, form: Tensor) -> Tensor | None:
    order = form.diagonal().argsort(descending=True)
    form = form.index_select(0, order).index_select(1, order)
    form.diagonal().add_(DAMPED * float(form.diagonal().mean()))
    lower, info = torch.linalg.cholesky_ex(form)
    if int(info):
        return None
    upper, info = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
    if int(info):
        return None
    upper = upper.float()
    left = matrix.float().index_select(1, order).t().contiguous()  # (D, K): a column is a row
    steps = scales.index_select(1, order).t().contiguous()
    found = torch.empty_like(left)
    for start in range(0, len(left), BLOCK):
        end = min(start + BLOCK, len(left))
        errors = torch.empty_like(left[start:end])
        for at in range(start, end):
            found[at] = grid.nearest(left[at], steps[at])
            errors[at - start] = (left[at] - found[at]) / upper[at, at]
            left[at + 1 : end].addr_(upper[at, at + 1 : end], errors[at - start], alpha=-1)
        left[end:].addmm_(upper[start:end, end:].t(), errors, alpha=-1)
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order))
    return found.t().index_select(1, back)
