"""How far a matrix is from its nearest Kronecker sums, for every number of terms at once."""

from __future__ import annotations

import torch
from torch import Tensor

from bp_convert.kron.column_order import Columns
from bp_convert.kron.gram import gram
from bp_convert.kron.metric import Metric, spared
from bp_convert.kron.nearest import rearrange
from bp_convert.kron.scale import unit
from bp_convert.values.factors import FactorSpec, Pair

EXACT = 256  # up to this side the spectrum is taken in float64


def whitened(weight: Tensor, metric: Metric, columns: Columns) -> Tensor:
    """Return ``W (L1 kron L2)`` (K, D), columns in the pair's order: where the metric is that
    product, its plain distances are the metric's."""
    weight, metric = spared(weight, metric, columns)
    table = weight if columns.order is None else weight.index_select(1, columns.order)
    roots = metric.roots(columns)
    if roots is None:
        return table
    one, two = roots
    rows, (d1, d2) = weight.shape[0], columns.inp
    half = two.times(table.reshape(-1, d2)).view(rows, d1, d2)
    return one.times_left(half).reshape(rows, d1 * d2)


def squared_errors(table: Tensor, spec: FactorSpec) -> Tensor:
    """Return the relative squared error of the best R terms, for R = 0, 1, ..., full rank.

    They are the tails of the squared singular values of the rearranged matrix (Van Loan and
    Pitsianis, 1993, theorem 2.1), read off one eigendecomposition of its smaller Gram matrix.

    Shape:
        table: (K, D), columns in the pair's order, whitened; result: (full rank + 1), float64.
    """
    first = spec.out[0] * spec.inp[0] <= spec.out[1] * spec.inp[1]
    return tails_of(gram_of(table, spec.out, spec.inp, first=first))


def gram_of(table: Tensor, out: Pair, inp: Pair, *, first: bool) -> Tensor:
    """Return the Gram matrix of the rearranged matrix, (k1*d1, k1*d1) or, where not ``first``,
    (k2*d2, k2*d2), in float64 up to the side ``EXACT``; times a power of two that keeps it finite.
    """
    rows, _ = unit(rearrange(table, out, inp))  # (k1*d1, k2*d2)
    rows = rows if first else rows.t()
    return gram(rows, precision(len(rows), table.dtype))


def precision(side: int, dtype: torch.dtype) -> torch.dtype:
    """Return what a Gram matrix of so many rows is taken in."""
    return torch.float64 if side <= EXACT else dtype


def tails_of(gram: Tensor) -> Tensor:
    """Return the sums of all but the R largest eigenvalues over the sum of all, (m + 1), of a Gram
    matrix (m, m); zeros for a matrix of zeros."""
    if len(gram) == 1:
        return torch.tensor([1.0, 0.0], dtype=torch.float64)
    values = torch.linalg.eigvalsh(gram).double().clamp(min=0)  # rising
    total = values.sum()
    tails = torch.cat([values.new_zeros(1), values.cumsum(0)]).flip(0)
    return tails / total if total > 0 else torch.zeros_like(tails)
