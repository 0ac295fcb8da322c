"""Metrics against their dense matrices."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from bp_convert.kron.column_order import Columns
from bp_convert.kron.conv_layout import every_axes
from bp_convert.kron.metric import (
    Diagonal,
    Full,
    Metric,
    Plain,
    Product,
    cholesky,
    nearest_outer,
    nearest_product,
)
from bp_convert.kron.nearest import rearrange
from tests.oracles import kron, spread_moment, whole
from tests.tolerances import assert_near

KERNEL = (2, 3)
CHANNELS = 4
WIDE = CHANNELS * 6


@dataclass
class Case:
    metric: Metric
    dense: Tensor


def _case(name: str) -> Case:
    if name == "plain":
        return Case(Plain(), torch.eye(WIDE, dtype=torch.float64))
    if name == "full":
        moment = spread_moment(WIDE)
        return Case(Full(moment, ridge=0), moment)
    if name == "product":
        channels, places = spread_moment(CHANNELS), spread_moment(6)
        return Case(Product(channels, places, ridge=0), kron(channels, places))
    weights = torch.rand(WIDE, dtype=torch.float64) + 0.01
    return Case(Diagonal(weights), torch.diag(weights))


EVERY = pytest.mark.parametrize("name", ["plain", "full", "product", "diagonal"])


@EVERY
def test_it_is_its_dense_matrix(name: str) -> None:
    case = _case(name)
    matrix = torch.randn(5, WIDE, dtype=torch.float64)
    assert_near(case.metric.apply(matrix), matrix @ case.dense)
    rooted = case.metric.root(matrix)
    assert_near(rooted @ rooted.t(), matrix @ case.dense @ matrix.t())
    assert_near(case.metric.unroot(rooted), matrix)
    assert_near(case.metric.root(case.metric.unroot(matrix)), matrix)
    expected = float(torch.trace(matrix @ case.dense @ matrix.t()))
    assert case.metric.energy(matrix) == pytest.approx(expected, rel=1e-11)
    assert case.metric.energy(torch.zeros_like(matrix)) == 0


@EVERY
def test_rows_and_dtypes_of_any_kind(name: str) -> None:
    case = _case(name)
    for rows in (1, 7):
        matrix = torch.randn(rows, WIDE)
        for step in (case.metric.apply, case.metric.root, case.metric.unroot):
            assert step(matrix).shape == matrix.shape
            assert step(matrix).dtype == torch.float32
    matrix = torch.randn(WIDE, 5, dtype=torch.float64).t()
    assert_near(case.metric.apply(matrix), matrix @ case.dense)


def _ordered(dense: Tensor, columns: Columns) -> Tensor:
    order = torch.arange(WIDE) if columns.order is None else columns.order
    return dense[order][:, order]


@pytest.mark.parametrize("axes", list(every_axes(KERNEL)))
@pytest.mark.parametrize("channels", [(1, 4), (2, 2), (4, 1)])
def test_the_roots_of_a_kronecker_product_are_exact(
    channels: tuple[int, int], axes: tuple[int, ...]
) -> None:
    columns = Columns(channels, KERNEL, axes)
    moment = kron(*(spread_moment(size) for size in columns.inp))
    back = torch.arange(WIDE) if columns.order is None else columns.order.argsort()
    natural = moment[back][:, back]
    one, two = map(whole, Full(natural, ridge=0).roots(columns))
    assert_near(kron(one @ one.t(), two @ two.t()), moment)
    assert float(one.triu(1).abs().sum() + two.triu(1).abs().sum()) == 0
    # Of channels and places, each of which is a product in turn.
    apart = [spread_moment(size) for size in (*channels, *columns.places)]
    inner = columns.kernel_order.argsort()
    places = kron(apart[2], apart[3])[inner][:, inner]
    metric = Product(kron(apart[0], apart[1]), places, ridge=0)
    one, two = map(whole, metric.roots(columns))
    dense = _ordered(kron(kron(apart[0], apart[1]), places), columns)
    assert_near(kron(one @ one.t(), two @ two.t()), dense)


@pytest.mark.parametrize("channels", [(1, 4), (2, 2), (4, 1)])
def test_the_roots_of_an_outer_product_are_exact(channels: tuple[int, int]) -> None:
    columns = Columns(channels, KERNEL, (2, 2))
    a, b = (torch.rand(size, dtype=torch.float64) + 0.1 for size in columns.inp)
    one, two = map(whole, Diagonal(torch.outer(a, b).flatten()).roots(columns))
    assert_near(kron(one @ one.t(), two @ two.t()), torch.diag(torch.outer(a, b).flatten()))


@pytest.mark.parametrize("sides", [(2, 6), (3, 4), (6, 2), (1, 12), (12, 1)])
def test_the_nearest_product_is_nearly_the_best_and_positive(sides: tuple[int, int]) -> None:
    d1, d2 = sides
    moment = spread_moment(d1 * d2)
    one, two = nearest_product(moment.view(*sides, *sides))
    values = torch.linalg.svdvals(rearrange(moment, sides, sides))
    best = float(values[1:].square().sum().sqrt())
    gap = float((moment - kron(one, two)).norm())
    assert best <= gap * (1 + 1e-12) + 1e-12
    assert gap <= 1.02 * best + 1e-12 * float(moment.norm())
    assert float(torch.linalg.eigvalsh(one).min()) > 0
    assert float(torch.linalg.eigvalsh(two).min()) > 0
    if min(sides) > 1:  # the negative twin: the mean alone, where the alternation starts, is not
        start = kron(torch.eye(d1).double(), torch.eye(d2).double())
        start *= (moment * start).sum() / start.square().sum()
        assert float((moment - start).norm()) > 1.02 * best


def test_the_nearest_outer_product_is_nearly_the_best_and_positive() -> None:
    table = torch.rand(5, 7, dtype=torch.float64) + 0.01
    one, two = nearest_outer(table)
    best = float(torch.linalg.svdvals(table)[1:].square().sum().sqrt())
    gap = float((table - torch.outer(one, two)).norm())
    assert best <= gap * (1 + 1e-12) <= 1.02 * best
    assert bool((one > 0).all() and (two > 0).all())


def test_the_ridge_is_a_share_of_the_mean_eigenvalue() -> None:
    moment = spread_moment(6)
    mean = float(torch.linalg.eigvalsh(moment).mean())
    before = moment.clone()
    found = Full(moment, ridge=0.01).matrix
    assert_near(found, before + 0.01 * mean * torch.eye(6).double())
    assert torch.equal(moment, before)


HOSTILE = {
    "zeros": torch.zeros(8, 8),
    "of one row": torch.outer(torch.arange(8.0), torch.arange(8.0)),
    "a column that never varies": torch.diag(torch.tensor([1.0, 0, 2, 3, 0, 1, 1, 1])),
    "one giant": torch.diag(torch.tensor([1e12, 1, 1, 1, 1, 1, 1, 1e-12])),
    "tiny": 1e-30 * torch.eye(8),
    "rounded below zero": torch.eye(8) - (1 + 1e-6) * torch.ones(8, 8) / 8,
}


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("form", ["full", "product"])
def test_singular_moments_still_give_a_metric(name: str, form: str) -> None:
    moment = HOSTILE[name]
    if form == "full":
        metric: Metric = Full(moment)
        columns = Columns((2, 4))
        wide = 8
    else:
        metric = Product(moment, HOSTILE["of one row"][:4, :4])
        columns = Columns((2, 4), (2, 2), (1, 2))
        wide = 32
    matrix = torch.randn(5, wide)
    for step in (metric.apply, metric.root, metric.unroot):
        assert bool(torch.isfinite(step(matrix)).all())
    roots = metric.roots(columns)
    assert roots is not None
    for root in map(whole, roots):
        assert bool(torch.isfinite(root).all())
        assert float(root.diagonal().min()) > 0
    assert metric.energy(matrix) > 0


def test_the_root_of_a_matrix_that_is_not_positive_is_one_of_a_matrix_near_it() -> None:
    moment = spread_moment(5)
    assert_near(cholesky(moment), torch.linalg.cholesky(moment))
    tilted = moment - 1.000001 * torch.linalg.eigvalsh(moment)[0] * torch.eye(5).double()
    with pytest.raises(RuntimeError):
        torch.linalg.cholesky(tilted)
    lower = cholesky(tilted)
    assert float((lower @ lower.t() - tilted).norm() / tilted.norm()) < 1e-4
    hopeless = cholesky(-torch.eye(3))
    assert bool(torch.isfinite(hopeless).all())
    assert float(hopeless.diagonal().min()) > 0
