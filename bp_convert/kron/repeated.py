"""The nearest sum of Kronecker products to a matrix whose rows and columns repeat those of a
smaller one, without building it.

A widened weight is ``weight[rows][:, columns]``: each channel of the source stands in several
places. Van Loan's rearrangement of it has a row for each (i1, j1) and a column for each (i2, j2).
In one row, columns are equal where ``rows`` and ``columns`` name the same old channels: where
72 x 64 outputs repeat 512 ones, some 8 of 64 differ. Which ones is the same for all i1 in whose
block the repeats begin at the same place, a phase. A product with the rearranged matrix sums the
other factor over what is equal, and multiplies by the small block that each pair of phases has.
What is decomposed, and how, is that of ``kron.nearest``.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite

import torch
from torch import Tensor

from bp_convert.kron.gram import CHUNK
from bp_convert.kron.nearest import KroneckerFit, check_finite, fit_of, low_rank
from bp_convert.kron.pairs import check_positive
from bp_convert.kron.scale import unit
from bp_convert.values.factors import Pair


def nearest_to_repeated(
    weight: Tensor, rows: Tensor, columns: Tensor, out: Pair, inp: Pair, rank: int
) -> KroneckerFit:
    """Return the R terms nearest to ``weight[rows][:, columns]`` in the Frobenius norm.

    They are those of ``nearest_kronecker_sum`` up to rounding. Memory and time are about those of
    the small matrix, where the repeats lie together.

    Args:
        weight: (K, D), any floating dtype; computed in float32 at least.
        rows: (k1*k2,), for each row the old one.
        columns: (d1*d2,), for each column the old one.
        rank: number of terms, fewer than are exact.

    Raises:
        FactorError: a rank below 1, or entries that are not finite.
    """
    check_positive(rank, "rank")
    held = weight.detach()
    held = held if held.dtype in (torch.float32, torch.float64) else held.to(torch.float32)
    places = rows.view(out), columns.view(inp)
    table = RepeatedTable.of(held, *places)
    energy = table.energy()
    if not isfinite(energy):
        check_finite(weight, "weight")
    near, size = unit(held)
    with torch.autocast(held.device.type, enabled=False):
        left, right = low_rank(table if size == 1 else RepeatedTable.of(near, *places), rank)
        return fit_of(table, (left, right * size), (out, inp), energy, weight.dtype)


@dataclass(frozen=True)
class _Phase:
    """Places of one side that repeat alike.

    Attributes:
        members: (n,), the outer indices.
        old: (n, u), for each the old channels that differ.
        place: (k,), for each inner index which of them it is.
    """

    members: Tensor
    old: Tensor
    place: Tensor

    @property
    def times(self) -> Tensor:
        """How often each old channel stands there, (u,)."""
        return torch.bincount(self.place, minlength=self.old.shape[1])


def _phases(index: Tensor) -> list[_Phase]:
    """Sort the outer places of a side (k1, k2) by where their repeats begin."""
    found: dict[tuple[int, ...], list[tuple[int, Tensor]]] = {}
    for outer, row in enumerate(index):
        old, place = torch.unique(row, return_inverse=True)
        found.setdefault(tuple(place.tolist()), []).append((outer, old))
    return [
        _Phase(
            torch.tensor([outer for outer, _ in ones], device=index.device),
            torch.stack([old for _, old in ones]),
            torch.tensor(place, device=index.device),
        )
        for place, ones in found.items()
    ]


class RepeatedTable:
    """The rearranged matrix (k1*d1, k2*d2) of a matrix with repeats, as products with it."""

    def __init__(
        self, outs: list[_Phase], ins: list[_Phase], blocks: dict[tuple[int, int], Tensor]
    ) -> None:
        self.outs, self.ins, self.blocks = outs, ins, blocks
        self.outer = tuple(sum(len(one.members) for one in side) for side in (outs, ins))
        self.inner = len(outs[0].place), len(ins[0].place)
        self.shape = self.outer[0] * self.outer[1], self.inner[0] * self.inner[1]
        first = next(iter(blocks.values()))
        self.dtype, self.device = first.dtype, first.device

    @classmethod
    def of(cls, weight: Tensor, rows: Tensor, columns: Tensor) -> RepeatedTable:
        """Lay out a small matrix (K, D) by indices (k1, k2) of its rows and (d1, d2) of its
        columns."""
        outs, ins = (_phases(index.to(weight.device)) for index in (rows, columns))
        blocks = {}
        for p, one in enumerate(outs):
            for q, two in enumerate(ins):
                small = weight[one.old.flatten()][:, two.old.flatten()]
                apart = small.view(*one.old.shape, *two.old.shape).transpose(1, 2)
                blocks[p, q] = apart.reshape(len(one.old) * len(two.old), -1)  # (n*n', u*u')
        return cls(outs, ins, blocks)

    def t(self) -> TurnedTable:
        """Return the transposed matrix."""
        return TurnedTable(self)

    def gram(self) -> Tensor:
        """Return table @ table^T in float64."""
        return _gram_of(self)

    def times(self, block: Tensor) -> Tensor:
        """Return table @ block, (k1*d1, s) of (k2*d2, s)."""
        apart = block.reshape(*self.inner, -1)  # (k2, d2, s)
        found = block.new_empty(*self.outer, apart.shape[2])
        for p, one in enumerate(self.outs):
            half = _summed(apart, one.place, one.old.shape[1], 0)
            for q, two in enumerate(self.ins):
                both = _summed(half, two.place, two.old.shape[1], 1)  # (u, u', s)
                made = self.blocks[p, q].to(block.dtype) @ both.flatten(0, 1)
                where = one.members[:, None], two.members[None]
                found[where] = made.view(len(one.members), len(two.members), -1)
        return found.flatten(0, 1)

    def across(self, basis: Tensor) -> Tensor:
        """Return basis^T @ table, (s, k2*d2) of (k1*d1, s)."""
        apart = basis.reshape(*self.outer, -1)  # (k1, d1, s)
        found = basis.new_zeros(*self.inner, apart.shape[2])
        for p, one in enumerate(self.outs):
            half = basis.new_zeros(one.old.shape[1], self.inner[1], apart.shape[2])
            for q, two in enumerate(self.ins):
                given = apart[one.members[:, None], two.members[None]].flatten(0, 1)
                made = self.blocks[p, q].to(basis.dtype).t() @ given  # (u*u', s)
                made = made.view(one.old.shape[1], two.old.shape[1], -1)
                half += made.index_select(1, two.place)
            found += half.index_select(0, one.place)
        return found.flatten(0, 1).t()

    def energy(self) -> float:
        """Return the sum of squares."""
        return sum(
            float((block.double().square() @ self._counts(p, q)).sum())
            for (p, q), block in self.blocks.items()
        )

    def rest(self, left: Tensor, right: Tensor) -> float:
        """Return the sum of squares of what factors (k1*d1, R), (R, k2*d2) leave.

        Where columns are equal it is what their mean leaves, and how far the factor's columns are
        from their mean: no difference of two energies, which would lose a small one.
        """
        rows = left.double().reshape(*self.outer, -1)  # (k1, d1, R)
        apart = right.double().t().reshape(*self.inner, -1)  # (k2, d2, R)
        total = 0.0
        for p, one in enumerate(self.outs):
            half = _summed(apart, one.place, one.old.shape[1], 0)
            for q, two in enumerate(self.ins):
                counts = self._counts(p, q)
                means = _summed(half, two.place, two.old.shape[1], 1).flatten(0, 1)
                means = means / counts[:, None]  # (u*u', R)
                own = rows[one.members[:, None], two.members[None]].flatten(0, 1)
                gap = self.blocks[p, q].double() - own @ means.t()
                total += float((gap.square() @ counts).sum())
                spread = means.view(one.old.shape[1], two.old.shape[1], -1)
                spread = spread.index_select(0, one.place).index_select(1, two.place)
                off = (apart - spread).flatten(0, 1)
                total += float(((own.t() @ own) * (off.t() @ off)).sum())
        return total

    def _counts(self, p: int, q: int) -> Tensor:
        """Return how many columns each column of a block stands for, (u*u',)."""
        one, two = self.outs[p].times, self.ins[q].times
        return (one[:, None] * two[None]).flatten().double()


class TurnedTable:
    """The transposed matrix of one with repeats."""

    def __init__(self, table: RepeatedTable) -> None:
        self.table = table
        self.shape = table.shape[1], table.shape[0]
        self.dtype, self.device = table.dtype, table.device

    def t(self) -> RepeatedTable:
        return self.table

    def times(self, block: Tensor) -> Tensor:
        return self.table.across(block).t()

    def across(self, basis: Tensor) -> Tensor:
        return self.table.times(basis).t()

    def gram(self) -> Tensor:
        return _gram_of(self)

    def energy(self) -> float:
        return self.table.energy()

    def rest(self, left: Tensor, right: Tensor) -> float:
        return self.table.rest(right.t(), left.t())


def _gram_of(table: RepeatedTable | TurnedTable) -> Tensor:
    """Return table @ table^T in float64, some columns at a time."""
    rows, columns = table.shape
    found = torch.empty(rows, rows, dtype=torch.float64, device=table.device)
    step = max(1, 8 * CHUNK // columns)
    for start in range(0, rows, step):
        size = min(step, rows - start)
        unit_rows = found.new_zeros(rows, size)
        unit_rows[start : start + size] = torch.eye(size, dtype=found.dtype, device=found.device)
        found[:, start : start + size] = table.times(table.across(unit_rows).t())
    return found


def _summed(given: Tensor, place: Tensor, size: int, axis: int) -> Tensor:
    """Sum what stands at one place along an axis."""
    shape = list(given.shape)
    shape[axis] = size
    return given.new_zeros(shape).index_add_(axis, place, given)
