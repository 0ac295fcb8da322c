"""The errors of all numbers of terms at once are those of the terms themselves."""

from __future__ import annotations

from math import prod

import pytest
import torch
from torch import Tensor

from bp_convert.kron.column_order import Columns
from bp_convert.kron.conv_layout import every_axes
from bp_convert.kron.metric import Diagonal, Full, Metric, Plain, Product
from bp_convert.kron.nearest import nearest_kronecker_sum
from bp_convert.kron.pairs import divisor_pairs
from bp_convert.kron.spectrum import squared_errors, whitened
from bp_convert.values.factors import FactorSpec
from tests.oracles import conv_weight, kron, kron_sum, spread_moment, whole
from tests.tolerances import assert_near


def _shares(values: Tensor) -> list[float]:
    """Return the tails of squared singular values, from none kept to all."""
    squares = values.double().square()
    return [float(squares[rank:].sum() / squares.sum()) for rank in range(len(squares) + 1)]


@pytest.mark.parametrize("shape", [(6, 8), (12, 12), (7, 6), (1, 12), (12, 1)])
def test_they_are_those_of_the_nearest_sums(shape: tuple[int, int]) -> None:
    weight = torch.randn(*shape, dtype=torch.float64)
    for out in divisor_pairs(shape[0]):
        for inp in divisor_pairs(shape[1]):
            spec = FactorSpec(out=out, inp=inp)
            found = squared_errors(weight, spec)
            assert found.shape == (spec.full_rank + 1,)
            assert float(found[0]) == pytest.approx(1, rel=1e-12)
            for rank in range(1, spec.full_rank + 1):
                fit = nearest_kronecker_sum(weight, out, inp, rank)
                gap = (weight - kron_sum(fit.w1, fit.w2)).square().sum() / weight.square().sum()
                assert float(found[rank]) == pytest.approx(float(gap), rel=1e-9, abs=1e-15)


@pytest.mark.parametrize("kernel", [(3,), (2, 3), (2, 1), (2, 1, 3)])
def test_they_hold_for_the_columns_of_a_convolution(kernel: tuple[int, ...]) -> None:
    weight = torch.randn(4, 4, *kernel, dtype=torch.float64)
    for axes in every_axes(kernel):
        for channels in divisor_pairs(4):
            columns = Columns(channels, kernel, axes)
            table = whitened(weight.flatten(1), Plain(), columns)
            for out in divisor_pairs(4):
                spec = FactorSpec(out=out, inp=columns.inp, axes=axes)
                found = squared_errors(table, spec)
                for rank in range(1, spec.full_rank + 1):
                    fit = nearest_kronecker_sum(table, out, columns.inp, rank)
                    dense = conv_weight(fit.w1, fit.w2, channels, kernel, axes)
                    gap = (weight - dense).square().sum() / weight.square().sum()
                    assert float(found[rank]) == pytest.approx(float(gap), rel=1e-9, abs=1e-15)


def test_other_axes_give_other_errors() -> None:
    """The negative twin: the owner of an axis matters."""
    weight = torch.randn(6, 4 * 4, dtype=torch.float64)
    found = [
        squared_errors(
            whitened(weight, Plain(), Columns((2, 2), (2, 2), axes)),
            FactorSpec(out=(2, 3), inp=(4, 4)),
        )
        for axes in ((1, 2), (2, 1))
    ]
    with pytest.raises(AssertionError):
        assert_near(found[0], found[1])


def test_low_rank_is_truncated_svd() -> None:
    weight = torch.randn(12, 20, dtype=torch.float64)
    spec = FactorSpec(out=(12, 1), inp=(1, 20))
    expected = _shares(torch.linalg.svdvals(weight))
    assert squared_errors(weight, spec).tolist() == pytest.approx(expected, rel=1e-9, abs=1e-15)


def test_in_a_metric_low_rank_is_the_svd_of_the_weight_times_its_root() -> None:
    weight = torch.randn(12, 20, dtype=torch.float64)
    moment = spread_moment(20)
    metric = Full(moment, ridge=0)
    lower = torch.linalg.cholesky(moment)
    expected = _shares(torch.linalg.svdvals(weight @ lower))
    spec = FactorSpec(out=(12, 1), inp=(1, 20))
    for table in (metric.root(weight), whitened(weight, metric, Columns.of(spec))):
        found = squared_errors(table, spec)
        assert found.tolist() == pytest.approx(expected, rel=1e-9, abs=1e-15)
    plain = squared_errors(weight, spec)
    assert plain.tolist() != pytest.approx(expected, rel=1e-2)


@pytest.mark.parametrize("axes", list(every_axes((2, 3))))
def test_in_a_product_metric_they_are_the_metric_s_errors(axes: tuple[int, ...]) -> None:
    """Where the metric is a product in the pair's order, one SVD gives every error in it."""
    weight = torch.randn(6, 4 * 6, dtype=torch.float64)
    columns = Columns((2, 2), (2, 3), axes)
    one, two = (spread_moment(size) for size in columns.inp)
    moment = kron(one, two)
    back = torch.arange(24) if columns.order is None else columns.order.argsort()
    metric = Full(moment[back][:, back], ridge=0)
    spec = FactorSpec(out=(3, 2), inp=columns.inp, axes=axes)  # type: ignore[arg-type]
    lower = kron(torch.linalg.cholesky(one), torch.linalg.cholesky(two))
    order = back.argsort()
    rooted = weight[:, order] @ lower
    table = rooted.reshape(3, 2, *columns.inp).permute(0, 2, 1, 3)
    expected = _shares(torch.linalg.svdvals(table.reshape(3 * columns.inp[0], -1)))
    found = squared_errors(whitened(weight, metric, columns), spec)
    assert found.tolist() == pytest.approx(expected, rel=1e-8, abs=1e-13)


METRICS = {
    "plain": lambda: Plain(),
    "full": lambda: Full(spread_moment(24)),
    "product": lambda: Product(spread_moment(4), spread_moment(6)),
    "diagonal": lambda: Diagonal(torch.rand(24, dtype=torch.float64) + 0.1),
}


@pytest.mark.parametrize("name", METRICS)
@pytest.mark.parametrize("channels", [(1, 4), (2, 2), (4, 1)])
def test_whitening_is_a_product_with_both_roots(name: str, channels: tuple[int, int]) -> None:
    metric: Metric = METRICS[name]()
    weight = torch.randn(5, 24, dtype=torch.float64)
    for axes in every_axes((2, 3)):
        columns = Columns(channels, (2, 3), axes)
        roots = metric.roots(columns)
        order = torch.arange(24) if columns.order is None else columns.order
        expected = weight[:, order]
        if roots is not None:
            expected = expected @ kron(*map(whole, roots))
        assert_near(whitened(weight, metric, columns), expected)


def test_large_tables_of_float32_agree_to_rounding() -> None:
    """Beyond the side up to which the spectrum is taken in float64."""
    weight = torch.randn(300, 320)
    spec = FactorSpec(out=(300, 1), inp=(1, 320))
    expected = torch.tensor(_shares(torch.linalg.svdvals(weight.double())))
    found = squared_errors(weight, spec)
    assert_near(found, expected, torch.float32)
    assert bool((found.diff() <= 0).all())
    assert float(found[-1]) == 0


@pytest.mark.parametrize("spec", [FactorSpec(out=(2, 3), inp=(2, 4)), FactorSpec(
    out=(6, 1), inp=(1, 8))], ids=str)  # fmt: skip
def test_nothing_is_no_error(spec: FactorSpec) -> None:
    found = squared_errors(torch.zeros(6, 8), spec)
    assert bool(torch.isfinite(found).all())
    assert float(found[1:].abs().max()) == 0
    assert len(found) == spec.full_rank + 1
    assert prod(spec.out) == 6
