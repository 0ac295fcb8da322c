"""The nearest sum to a matrix with repeats, against that of the matrix itself."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from bp_convert.errors import FactorError
from bp_convert.kron import nearest
from bp_convert.kron.nearest import nearest_kronecker_sum, reconstruct
from bp_convert.kron.repeated import RepeatedTable, nearest_to_repeated
from tests.tolerances import assert_near

Pair = tuple[int, int]


def beside(old: int, times: int) -> Tensor:
    """Repeat each channel side by side."""
    return torch.arange(old).repeat_interleave(times)


# Repeats that begin elsewhere in each block, that fill blocks, blocks that repeat, no order at all.
INDICES = {
    "side by side": (beside(8, 9), beside(8, 9)),
    "whole": (beside(12, 6), torch.arange(12).repeat(6)),
    "as they are": (torch.arange(72), beside(18, 4)),
    "drawn": (
        torch.randint(9, (72,), generator=torch.Generator().manual_seed(1)),
        torch.randint(7, (72,), generator=torch.Generator().manual_seed(2)),
    ),
}
PAIRS = [((8, 9), (8, 9)), ((9, 8), (12, 6)), ((72, 1), (1, 72)), ((2, 36), (3, 24))]
each = pytest.mark.parametrize("index", INDICES)


def weight_of(index: str) -> tuple[Tensor, Tensor, Tensor]:
    rows, columns = INDICES[index]
    draws = torch.Generator().manual_seed(0)
    shape = int(rows.max()) + 1, int(columns.max()) + 1
    return torch.randn(shape, generator=draws, dtype=torch.float64), rows, columns


@each
@pytest.mark.parametrize(("out", "inp"), PAIRS)
@pytest.mark.parametrize("rank", [1, 3])
@pytest.mark.parametrize("side", [256, 0])
def test_the_same_terms(
    index: str, out: Pair, inp: Pair, rank: int, side: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nearest, "GRAM_SIDE", side)
    weight, rows, columns = weight_of(index)
    due = nearest_kronecker_sum(weight[rows][:, columns], out, inp, rank)
    found = nearest_to_repeated(weight, rows, columns, out, inp, rank)
    assert found.w1.shape == due.w1.shape
    assert found.error == pytest.approx(due.error, rel=1e-6, abs=1e-9)
    assert_near(reconstruct(found.w1, found.w2), reconstruct(due.w1, due.w2), torch.float32)


@each
def test_products_and_what_is_left(index: str) -> None:
    weight, rows, columns = weight_of(index)
    out, inp = (8, 9), (12, 6)
    table = RepeatedTable.of(weight, rows.view(out), columns.view(inp))
    built = nearest.rearrange(weight[rows][:, columns], out, inp)
    draws = torch.Generator().manual_seed(3)
    left, right = (torch.randn(n, 4, generator=draws, dtype=torch.float64) for n in built.shape)
    assert_near(table.times(right), built @ right)
    assert_near(table.across(left), left.t() @ built)
    assert_near(table.gram(), built @ built.t())
    assert_near(table.t().gram(), built.t() @ built)
    assert table.energy() == pytest.approx(float(built.square().sum()))
    rest = float((built - left @ right.t()).square().sum())
    assert table.rest(left, right.t()) == pytest.approx(rest)
    assert table.t().rest(right, left.t()) == pytest.approx(rest)


def test_a_small_error_is_not_lost() -> None:
    rows = columns = beside(4, 9)
    one, two = torch.rand(2, 2, dtype=torch.float64), torch.rand(2, 2, dtype=torch.float64)
    weight = torch.kron(one, two)
    weight[0, 0] += 1e-9
    found = nearest_to_repeated(weight, rows, columns, (2, 18), (2, 18), 1)
    due = nearest_kronecker_sum(weight[rows][:, columns], (2, 18), (2, 18), 1)
    assert 0 < found.error < 1e-8
    assert found.error == pytest.approx(due.error, rel=0.01)


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_weights_whose_squares_are_no_float(scale: float) -> None:
    weight, rows, columns = weight_of("side by side")
    weight = (weight * scale).float()
    due = nearest_kronecker_sum(weight[rows][:, columns], (8, 9), (9, 8), 2)
    found = nearest_to_repeated(weight, rows, columns, (8, 9), (9, 8), 2)
    assert found.error == pytest.approx(due.error, rel=1e-4)


def test_what_is_not_finite_is_refused() -> None:
    weight, rows, columns = weight_of("whole")
    weight[0, 0] = float("nan")
    with pytest.raises(FactorError, match="not finite"):
        nearest_to_repeated(weight, rows, columns, (8, 9), (8, 9), 1)
