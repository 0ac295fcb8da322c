"""How far a matrix is from its nearest Kronecker sums, for every number of terms at once."""

from __future__ import annotations

import torch
from torch import Tensor

from bp_convert.kron.column_order import Columns
from bp_convert.kron.metric import Metric, spared
from bp_convert.kron.nearest import gram, rearrange
from bp_convert.kron.scale import unit
from bp_convert.values.factors import FactorSpec

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
    rows = rearrange(table, spec.out, spec.inp)  # (k1*d1, k2*d2)
    if rows.shape[0] > rows.shape[1]:
        rows = rows.t()
    if rows.shape[0] == 1:
        return torch.tensor([1.0, 0.0], dtype=torch.float64)
    rows, _ = unit(rows)
    if rows.shape[0] <= EXACT:
        values = torch.linalg.eigvalsh(gram(rows))
    else:
        rows = rows.contiguous()
        values = torch.linalg.eigvalsh(rows @ rows.t()).double()
    values = values.clamp(min=0)  # rising
    total = values.sum()
    tails = torch.cat([values.new_zeros(1), values.cumsum(0)]).flip(0)
    return tails / total if total > 0 else torch.zeros_like(tails)
