"""Factors rounded in turn: on their grid, and never worse than each to the nearest."""

from __future__ import annotations

import pytest
import torch

from bp_convert.bits.grid import FORMS, Grid, found_again
from bp_convert.bits.rounded import rounded_factors
from bp_convert.kron.als import fit_in_metric, natural
from bp_convert.kron.column_order import Columns
from bp_convert.kron.metric import Diagonal, Full, Metric, Plain, Product
from bp_convert.values.factors import FactorSpec

LOW = (FactorSpec(out=(64, 1), inp=(1, 288), rank=12), ())
JOINT = (FactorSpec(out=(16, 4), inp=(8, 36), rank=5, axes=(2, 2)), (3, 3))
APART = (FactorSpec(out=(16, 4), inp=(24, 12), rank=5, axes=(1, 2)), (3, 3))


def metric_of(name: str) -> Metric:
    rows = torch.randn(900, 288) * torch.linspace(0.1, 2, 288)
    moment = rows.t() @ rows / 900
    if name == "full":
        return Full(moment)
    if name == "product":
        return Product(moment[::9, ::9].contiguous(), moment[:9, :9].contiguous())
    return Diagonal(torch.rand(288) + 0.1) if name == "diagonal" else Plain()


@pytest.mark.parametrize("store", ["int8", "int4", "int3"])
@pytest.mark.parametrize("made", [LOW, JOINT, APART], ids=["low rank", "joint", "separable"])
@pytest.mark.parametrize("name", ["plain", "full", "product", "diagonal"])
@pytest.mark.parametrize("weighed", [False, True])
def test_rounding_in_turn_is_no_worse_than_to_the_nearest(
    store: str, made: tuple[FactorSpec, tuple[int, ...]], name: str, weighed: bool
) -> None:
    spec, kernel = made
    torch.manual_seed(3)
    weight = torch.randn(64, 40) @ torch.randn(40, 288) * 0.01
    metric, columns = metric_of(name), Columns.of(spec, kernel)
    rows = torch.rand(64) + 0.2 if weighed and spec.out[1] == 1 else None
    each = torch.ones(64, 1) if rows is None else rows[:, None]
    counts = None if rows is None else Diagonal(rows.square())
    fit = fit_in_metric(weight, spec, columns, metric, outputs=counts, sweeps=3)
    grid = FORMS[store]
    assert isinstance(grid, Grid)
    found = rounded_factors(
        weight, fit.w1, fit.w2, columns, metric, grid, (grid.scales,) * 2, spec=spec, rows=rows
    )
    assert found_again(found.w1.contiguous(), grid) is not None
    assert found_again(found.w2.contiguous(), grid) is not None
    total = metric.energy(each * weight)

    def error(one: torch.Tensor, two: torch.Tensor) -> float:
        return (metric.energy(each * (weight - natural(one, two, columns))) / total) ** 0.5

    nearest = error(grid.rounded(fit.w1), grid.rounded(fit.w2))
    assert found.error == pytest.approx(error(found.w1, found.w2), rel=1e-4)
    assert found.error <= nearest * (1 + 1e-6)
    if name in ("plain", "full") and store != "int8":
        assert found.error < nearest


def test_a_factor_that_is_not_rounded_makes_up_for_the_other() -> None:
    spec, kernel = LOW
    torch.manual_seed(0)
    weight = torch.randn(64, 288)
    columns, metric, grid = Columns.of(spec, kernel), Plain(), FORMS["int3"]
    assert isinstance(grid, Grid)
    fit = fit_in_metric(weight, spec, columns, metric)
    one = rounded_factors(
        weight, fit.w1, fit.w2, columns, metric, grid, (None, grid.scales), spec=spec
    )
    two = rounded_factors(
        weight, fit.w1, fit.w2, columns, metric, grid, (grid.scales,) * 2, spec=spec
    )
    assert found_again(one.w2.contiguous(), grid) is not None
    assert found_again(one.w1.contiguous(), grid) is None
    assert fit.error < one.error < two.error
