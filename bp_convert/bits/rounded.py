"""Factors rounded onto a grid: one of them, then the other refitted to it and rounded, in turn.

Where the metric is the identity, and for low rank in any, a Kronecker sum is a product ``P^T Q`` of
two tables of R rows; elsewhere each half has the normal equations of ``kron.als``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from bp_convert.bits.compensated import rounded_in
from bp_convert.bits.grid import Grid
from bp_convert.kron.als import affordable, half_forms, half_problem, low_rank, natural
from bp_convert.kron.column_order import Columns
from bp_convert.kron.metric import Full, Metric, Plain, nearest_outer, spared
from bp_convert.kron.nearest import KroneckerFit, rearrange
from bp_convert.values.factors import FactorSpec

SWEEPS = 2
WORK, SIDE = 2e9, 1500  # multiply-adds and unknowns of normal equations, above which there are none
Scales = Callable[[Tensor], Tensor]  # of each number of a factor
Both = tuple[Scales | None, Scales | None]  # none of one that is not rounded


def rounded_factors(
    target: Tensor,
    w1: Tensor,
    w2: Tensor,
    columns: Columns,
    metric: Metric,
    grid: Grid,
    scales: Both,
    *,
    spec: FactorSpec,
    rows: Tensor | None = None,
) -> KroneckerFit:
    """Return factors on a grid near a weight; never worse than both rounded to the nearest.

    Args:
        target: (K, D), columns as (channel, kernel place).
        w1, w2: (R, k1, d1) and (R, d2, k2), where it starts from.
        scales: gives the scales of w1, and of w2; None where one is not rounded.
        rows: (K,) how much each output counts.

    Returns:
        The factors, and the error relative to ``target``, rooted.
    """
    target, metric = spared(target.float(), metric, columns)
    w1, w2 = w1.float(), w2.float()
    each = None if rows is None else rows.float()[:, None]
    total = metric.energy(target if each is None else each * target)

    def error(one: Tensor, two: Tensor) -> float:
        gap = target - natural(one, two, columns)
        return metric.energy(gap if each is None else each * gap)

    best = _nearest(w1, scales[0], grid), _nearest(w2, scales[1], grid)
    least = error(*best)
    for found in _refitted(target, w1, w2, columns, metric, grid, scales, spec, rows):
        now = error(*found)
        if now < least:
            best, least = found, now
    return KroneckerFit(*best, (least / total) ** 0.5 if total else 0.0)


def _refitted(
    target: Tensor,
    w1: Tensor,
    w2: Tensor,
    columns: Columns,
    metric: Metric,
    grid: Grid,
    scales: Both,
    spec: FactorSpec,
    rows: Tensor | None,
) -> list[tuple[Tensor, Tensor]]:
    """Return pairs of rounded factors, each refitted to the other."""
    weigh = (torch.ones(w1.shape[1], 1), torch.ones(w2.shape[2]))
    if rows is not None:
        one, two = nearest_outer(rows.float().view(spec.out))
        weigh = one[:, None], two
        target = target * torch.outer(one, two).view(-1, 1)
    halves: _Halves
    if isinstance(metric, Plain) or low_rank(spec):
        halves = _Tables(target, columns, metric, spec)
    elif isinstance(metric, Full) and affordable(spec, metric, WORK, SIDE):
        halves = _SumHalves(target, columns, metric, spec)
    else:
        return []

    def rounded(factor: Tensor, side: int, other: Tensor) -> tuple[Tensor, Tensor]:
        """Return a weighed factor rounded, and the same as it is without weights."""
        of = scales[side]
        if of is None:
            return factor, factor / weigh[side]
        plain = of(factor / weigh[side])
        steps = plain * weigh[side]
        form, across = halves.metric(side, other)
        matrix, own = (halves.matrix(side, x, across=across) for x in (factor, steps))
        near = halves.factor(side, rounded_in(matrix, own, grid, form), across=across)
        return near, grid.numbers(grid.codes(near, steps), plain)

    w1, w2 = w1 * weigh[0], w2 * weigh[1]
    found = []
    try:
        two, right = rounded(w2, 1, w1)
        for _ in range(SWEEPS):
            one, left = rounded(halves.solved(0, two), 0, two)
            found.append((left, right))
            two, right = rounded(halves.solved(1, one), 1, one)
            found.append((left, right))
    except RuntimeError:  # nothing is left of a factor, so that its equations are singular
        pass
    return found


def _nearest(factor: Tensor, scales: Scales | None, grid: Grid) -> Tensor:
    if scales is None:
        return factor
    return grid.nearest(factor, scales(factor))


@dataclass
class _Halves(ABC):
    """The problem of one factor (side 0 or 1) with the other given."""

    target: Tensor
    columns: Columns
    of: Metric
    spec: FactorSpec

    def __post_init__(self) -> None:
        if self.columns.order is not None:
            self.ordered = self.target.index_select(1, self.columns.order)
        else:
            self.ordered = self.target

    @abstractmethod
    def solved(self, side: int, other: Tensor) -> Tensor:
        """Return the best factor, given the other."""

    @abstractmethod
    def metric(self, side: int, other: Tensor) -> tuple[Tensor | None, bool]:
        """Return the form in which a factor's error counts, given the other; and whether it runs
        across the terms of a table."""

    @abstractmethod
    def matrix(self, side: int, factor: Tensor, *, across: bool) -> Tensor:
        """Return a factor as a matrix whose columns that form is on."""

    @abstractmethod
    def factor(self, side: int, matrix: Tensor, *, across: bool) -> Tensor:
        """Undo ``matrix``."""


class _Tables(_Halves):
    """``P^T Q`` with P (R, k1*d1) and Q (R, k2*d2); a metric is on the columns of Q alone."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.table = rearrange(self.ordered, self.spec.out, self.spec.inp)

    def matrix(self, side: int, factor: Tensor, *, across: bool) -> Tensor:
        flat = (factor.transpose(1, 2) if side else factor).reshape(len(factor), -1)
        return flat.t() if across else flat

    def factor(self, side: int, matrix: Tensor, *, across: bool) -> Tensor:
        (k1, k2), (d1, d2) = self.spec.out, self.spec.inp
        flat = matrix.t() if across else matrix
        if side:
            return flat.reshape(-1, k2, d2).transpose(1, 2)
        return flat.reshape(-1, k1, d1)

    def solved(self, side: int, other: Tensor) -> Tensor:
        flat = self.matrix(1 - side, other, across=False)
        if side:  # the metric falls out
            form, right = flat @ flat.t(), flat @ self.table  # (R, k2*d2)
        else:
            applied = self.of.apply(flat)
            form, right = applied @ flat.t(), applied @ self.table.t()
        found = torch.linalg.solve(_ridged(form.double()), right.double())
        return self.factor(side, found.float(), across=False)

    def metric(self, side: int, other: Tensor) -> tuple[Tensor | None, bool]:
        flat = self.matrix(1 - side, other, across=False)
        if not side:
            return self.of.apply(flat) @ flat.t(), True
        if isinstance(self.of, Plain):
            return flat @ flat.t(), True
        return (self.of.matrix if isinstance(self.of, Full) else None), False


class _SumHalves(_Halves):
    """The normal equations of a Kronecker sum in a whole metric."""

    def __post_init__(self) -> None:
        super().__post_init__()
        (k1, k2), (d1, d2) = self.spec.out, self.spec.inp
        applied = self.of.apply(self.target)
        if self.columns.order is not None:
            applied = applied.index_select(1, self.columns.order)
        self.right = applied.view(k1, k2, d1, d2).double()
        self.forms = half_forms(self.of, self.columns, torch.float64)

    def _problem(self, side: int, other: Tensor) -> tuple[Tensor, Tensor]:
        if side:
            return half_problem(other.double(), self.right, self.forms[0])
        turned = other.double().transpose(1, 2)  # with the roles turned, (R, k2, d2)
        return half_problem(turned, self.right.permute(1, 0, 3, 2), self.forms[1])

    def solved(self, side: int, other: Tensor) -> Tensor:
        normal, right = self._problem(side, other)
        found = torch.linalg.solve(_ridged(normal), right)  # (R*d, k)
        return self.factor(side, found.t().float(), across=False)

    def metric(self, side: int, other: Tensor) -> tuple[Tensor | None, bool]:
        return self._problem(side, other)[0], False

    def matrix(self, side: int, factor: Tensor, *, across: bool) -> Tensor:
        turned = factor if side else factor.transpose(1, 2)  # (R, d, k)
        return turned.reshape(-1, turned.shape[2]).t()

    def factor(self, side: int, matrix: Tensor, *, across: bool) -> Tensor:
        turned = matrix.t().reshape(self.spec.rank, -1, matrix.shape[0])
        return turned if side else turned.transpose(1, 2)


def _ridged(form: Tensor) -> Tensor:
    """Return normal equations that can be solved where terms repeat each other."""
    mean = form.diagonal().mean().clamp(min=torch.finfo(form.dtype).tiny)
    return form + 1e-9 * mean * torch.eye(len(form), dtype=form.dtype)
