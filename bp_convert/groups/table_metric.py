"""What an error of a table costs that is looked up and multiplied by, and the low-rank table that
costs least.

An error G (V, E) of the table changes the rows that are looked up by ``sum_v d_v |g_v|^2``, d the
shares of the tokens, and a head's outputs by ``tr(G C G^T)``, C (E, E) the second moment of what
the head gets. Both count relative to what there is; their sum is one quadratic form, and with one
factor held the other has a closed form: two matrices diagonalise all of its normal equations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from bp_convert.calibration.moments import Moment
from bp_convert.groups.members import Tied
from bp_convert.kron.metric import Diagonal, Full, Metric, Roots
from bp_convert.values.factors import FactorSpec

SHARES = (0.01, 0.03, 0.08, 0.2, 0.45)  # of the parameters, at which errors are measured
SWEEPS = 2  # for those
DOUBLE = 2**25  # numbers of a table up to which all of it is computed with in float64
LEAST = 1e-9  # of the mean diagonal: terms that repeat each other do not run away


class TableMetric(Metric):
    """The form on tables turned, (E, V), as an embedding's matrices are.

    Args:
        table: (V, E) of the trained weights, to whose outputs errors are relative.
        tokens: a metric of the tokens that are looked up, of each embedding.
        inputs: a metric of the inputs of each head.
    """

    def __init__(self, table: Tensor, tokens: Sequence[Diagonal], inputs: Sequence[Full]) -> None:
        rows, columns = table.shape
        self.tokens = torch.zeros(rows, dtype=torch.float64)
        self.inputs = torch.zeros(columns, columns, dtype=torch.float64)
        turned, many = table.t(), len(tokens) + len(inputs)
        for one in tokens:
            energy = max(one.energy(turned) / one.level, 1e-300)
            self.tokens += one.weights.double() / (many * energy)
        for two in inputs:
            energy = max(two.energy(table) / two.level, 1e-300)
            self.inputs += two.matrix.double() / (many * energy)

    def apply(self, matrix: Tensor) -> Tensor:
        return matrix * self.tokens.to(matrix.dtype) + self.inputs.to(matrix.dtype) @ matrix

    def scales(self) -> Tensor:
        """Return how much each row of the table counts, as far as that does not hang on where."""
        return (self.tokens + self.inputs.diagonal().mean()).sqrt()

    def root(self, matrix: Tensor) -> Tensor:
        return matrix * self.scales().to(matrix.dtype)

    def unroot(self, matrix: Tensor) -> Tensor:
        return matrix / self.scales().to(matrix.dtype)

    def roots(self, columns: object) -> Roots | None:
        raise NotImplementedError("tables that are tied are fitted by terms of low rank")


def table_metric(group: Tied, moments: Mapping[str, Moment]) -> TableMetric | None:
    """Return the form of a group of layers from what each of them sees, by its name; None where
    none was seen, or a head is too wide for its inputs' whole moment."""
    metrics = {name: one.metric() for name, one in moments.items() if one.count}
    tokens = [metrics[one.name] for one in group.tables if one.name in metrics]
    inputs = [metrics[one.name] for one in group.heads if one.name in metrics]
    looked = [one for one in tokens if isinstance(one, Diagonal)]
    full = [one for one in inputs if isinstance(one, Full)]
    if not metrics or len(looked) + len(full) < len(metrics):
        return None
    return TableMetric(table_of(group), looked, full)


def table_of(group: Tied) -> Tensor:
    """Return the table (V, E) that a group of layers holds."""
    site = group.leader
    matrix = site.kind.computed(site.module)["weight"][0]
    return matrix.t() if site.kind.lookup else matrix


def low_rank_spec(rows: int, columns: int) -> FactorSpec:
    """Return the spec of one term of low rank of an embedding, as the search has it."""
    return FactorSpec(out=(columns, 1), inp=(1, rows))


def fit_table(
    table: Tensor, metric: TableMetric, rank: int, *, sweeps: int
) -> tuple[Tensor, Tensor, float]:
    """Return A (V, R), B (R, E) and the squared error of ``A B``: the least that alternation from
    the best start of a product form finds."""
    fit = _Fit(table.double() if table.numel() <= DOUBLE else table.float(), metric)
    left, right = fit.start(rank)
    best, error = (left, right), fit.error(left, right)
    for _ in range(sweeps):
        left = fit.left(right)
        right = fit.right(left)
        now = fit.error(left, right)
        if not now < error:
            break
        best, error = (left, right), now
    return best[0].to(table.dtype), best[1].to(table.dtype), error


def table_errors(table: Tensor, metric: TableMetric) -> np.ndarray:
    """Return the squared error with R = 0, 1, ... terms: reached by fits at a few numbers, and
    between them on a line of its logarithm."""
    spec = low_rank_spec(*table.shape)
    known = {0: 1.0}
    for share in SHARES:
        rank = int(share * table.numel() // spec.params)
        if 1 <= rank < spec.full_rank and rank not in known:
            known[rank] = max(fit_table(table, metric, rank, sweeps=SWEEPS)[2], 1e-12)
    last = max(known)
    known[spec.full_rank] = min(1e-6, known[last])
    terms = np.arange(spec.full_rank + 1)
    errors = np.exp(np.interp(terms, sorted(known), [np.log(known[one]) for one in sorted(known)]))
    errors = np.minimum.accumulate(np.minimum(errors, 1.0))
    errors[-1] = 0.0
    found: np.ndarray = errors.astype(np.float32)
    return found


class _Fit:
    """One table, with what both steps ask for again. Small matrices are float64 in any case."""

    def __init__(self, table: Tensor, metric: TableMetric) -> None:
        self.table = table
        self.tokens, self.inputs = metric.tokens.to(table), metric.inputs.to(table)
        self.scales = metric.scales().to(table)
        self.values, self.vectors = torch.linalg.eigh(self.inputs.double())
        self.whole = self.tokens[:, None] * table + table @ self.inputs  # D T + T C

    def error(self, left: Tensor, right: Tensor) -> float:
        gap = self.table - left @ right
        lost = (gap.square().sum(1) * self.tokens).sum() + ((gap @ self.inputs) * gap).sum()
        return float(lost)

    def start(self, rank: int) -> tuple[Tensor, Tensor]:
        """Return the best terms where every row had one form, scaled: D kron I + I kron C taken
        for a product."""
        scaled = self.scales[:, None] * self.table
        values = self.values.clamp(min=0) + float(self.tokens.mean())
        root = self.vectors * values.sqrt()
        near = scaled @ root.to(scaled)  # (V, E)
        basis = torch.linalg.eigh((near.t() @ near).double())[1][:, -rank:]  # (E, R)
        right = (basis.t() @ (self.vectors / values.sqrt()).t()).to(scaled)
        return self.left(right), right

    def left(self, right: Tensor) -> Tensor:
        """Return A (V, R) for B: row v solves with ``d_v B B^T + B C B^T``."""
        wide = right.double()
        turn, values = _both_diagonal(wide @ self.inputs.double() @ wide.t(), wide @ wide.t())
        given = self.whole @ (right.t() @ turn.to(right))  # (V, R)
        found: Tensor = given / (self.tokens[:, None] + values.to(right)) @ turn.t().to(right)
        return found

    def right(self, left: Tensor) -> Tensor:
        """Return B (R, E) for A: along each eigenvector of C it solves with ``A^T D A + c A^T
        A``."""
        looked, plain = left.t() @ (self.tokens[:, None] * left), left.t() @ left
        turn, values = _both_diagonal(looked.double(), plain.double())
        given = turn.t() @ (left.t() @ self.whole).double() @ self.vectors  # (R, E)
        solved = turn @ (given / (values[:, None] + self.values.clamp(min=0)))
        found: Tensor = (solved @ self.vectors.t()).to(left)
        return found


def _both_diagonal(one: Tensor, two: Tensor) -> tuple[Tensor, Tensor]:
    """Return P and the values m with ``P^T two P = I`` and ``P^T one P = diag(m)``."""
    size = float(two.diagonal().mean())
    two = two + LEAST * (size if size > 0 else 1.0) * torch.eye(len(two)).to(two)
    lower = torch.linalg.cholesky(two)
    half = torch.linalg.solve_triangular(lower, (one + one.t()) / 2, upper=False)
    values, vectors = torch.linalg.eigh(torch.linalg.solve_triangular(lower, half.t(), upper=False))
    turn = torch.linalg.solve_triangular(lower.t(), vectors, upper=True)
    floor = LEAST * max(float(values.abs().max()), 1e-300)
    return turn, values.clamp(min=floor)
