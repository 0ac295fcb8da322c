"""Moments against covariances computed at once, in float64."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor

from bp_convert.calibration import moments
from bp_convert.calibration.moments import Moment
from bp_convert.errors import DataError
from bp_convert.kron.als import fit_in_metric
from bp_convert.kron.column_order import Columns
from bp_convert.kron.metric import RIDGE, Diagonal, Full, Product
from bp_convert.values.factors import FactorSpec
from tests.tolerances import assert_near

F32 = torch.float32


def _moment(rows: Tensor, *, centred: bool) -> Tensor:
    """The second moment (D, D), entry by entry."""
    rows = rows.double()
    mean = rows.mean(0) if centred else torch.zeros(rows.shape[1], dtype=torch.float64)
    size = rows.shape[1]
    found = torch.zeros(size, size, dtype=torch.float64)
    for i, j in product(range(size), range(size)):
        found[i, j] = ((rows[:, i] - mean[i]) * (rows[:, j] - mean[j])).mean()
    return found


def _ridged(moment: Tensor, rows: Tensor | None = None) -> Tensor:
    """Add the ridge, which grows with the columns for each row in a full moment."""
    ridge = RIDGE + (0 if rows is None else moments.SCARCE * len(moment) / len(rows))
    return moment + ridge * moment.diagonal().mean() * torch.eye(len(moment)).double()


def _rows(count: int, size: int) -> Tensor:
    return torch.randn(count, size) @ torch.randn(size, size) + 3 * torch.randn(size)


def _gathered(moment: Moment, rows: Tensor, other: Tensor | None = None) -> Moment:
    """Add rows in parts of different lengths, one of them empty."""
    for start, stop in ((0, 5), (5, 5), (5, 6), (6, len(rows))):
        moment.add(rows[start:stop], None if other is None else other[start:stop])
    return moment


@pytest.mark.parametrize("centred", [True, False])
def test_a_full_moment_is_the_covariance(centred: bool) -> None:
    rows = _rows(50, 7)
    moment = _gathered(Moment(7, centred=centred), rows)
    metric = moment.metric()
    assert isinstance(metric, Full)
    assert_near(metric.matrix, _ridged(_moment(rows, centred=centred), rows), F32)
    assert_near(moment.mean, rows.double().mean(0), F32)
    with pytest.raises(AssertionError):  # the negative twin
        assert_near(metric.matrix, _ridged(_moment(rows, centred=not centred), rows), F32)


def test_every_row_counts_alike_whatever_the_batches() -> None:
    rows = _rows(64, 5)
    whole, parts = Moment(5), Moment(5)
    whole.add(rows)
    for part in rows.split(7):
        parts.add(part)
    assert_near(whole.metric().apply(torch.eye(5)), parts.metric().apply(torch.eye(5)))


@pytest.mark.parametrize("centred", [True, False])
def test_a_factored_moment_has_the_channels_and_the_places(
    centred: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(moments, "WIDE", 4)
    channels, kernel = 3, (2, 2)
    rows = _rows(40, 12)
    metric = _gathered(Moment(12, kernel, centred=centred), rows).metric()
    assert isinstance(metric, Product)
    whole = _moment(rows, centred=centred).view(channels, 4, channels, 4)
    first = sum(whole[:, s, :, s] for s in range(4)) / 4
    second = sum(whole[c, :, c, :] for c in range(channels))
    second = second / second.diagonal().mean()
    assert_near(metric.channels.matrix, _ridged(first), F32)
    assert_near(metric.places.matrix, _ridged(second), F32)


@pytest.mark.parametrize("centred", [True, False])
def test_a_weight_too_wide_for_more_gets_a_diagonal(
    centred: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(moments, "WIDE", 4)
    rows = _rows(40, 6)
    metric = _gathered(Moment(6, centred=centred), rows).metric()
    assert isinstance(metric, Diagonal)
    expected = _moment(rows, centred=centred).diagonal()
    assert bool((metric.weights >= expected * (1 - 1e-5)).all())
    assert_near(metric.weights - (metric.weights - expected).mean(), expected, F32)
    assert float((metric.weights - expected).abs().max()) < 0.01 * float(expected.mean())


def test_an_embedding_counts_its_rows() -> None:
    moment = Moment(5, lookup=True)
    moment.add(torch.tensor([[0, 1, 1], [4, 1, 0]]))
    moment.add(torch.tensor([0, 0]))
    metric = moment.metric()
    assert isinstance(metric, Diagonal)
    shares = torch.tensor([4, 3, 0, 0, 1]).double() / 8
    assert float(metric.weights.sum()) == pytest.approx(1)
    assert bool((metric.weights > 0).all())
    # Rows that were not met keep a share, and the others are in proportion.
    gaps = metric.weights - metric.weights.min()
    assert_near(gaps / gaps.sum(), shares / shares.sum())


def test_nothing_was_looked_up() -> None:
    metric = Moment(5, lookup=True).metric()
    assert isinstance(metric, Diagonal)
    assert float(metric.weights.min()) > 0


# Two models side by side


@pytest.mark.parametrize("centred", [True, False])
def test_the_moment_across_two_models(centred: bool) -> None:
    rows, other = _rows(50, 5), _rows(50, 5)
    moment = _gathered(Moment(5, centred=centred, cross=True), rows, other)
    x, y = rows.double(), other.double()
    if centred:
        x, y = x - x.mean(0), y - y.mean(0)
    expected = y.t() @ x / len(x)
    across = moment.across()
    assert across is not None
    assert_near(across, expected, F32)
    with pytest.raises(AssertionError):  # which of the two is which
        assert_near(across, expected.t(), F32)
    assert_near(moment.other_mean, other.double().mean(0), F32)
    assert Moment(5).across() is None


@pytest.mark.parametrize("centred", [True, False])
def test_the_error_is_that_of_the_outputs(centred: bool) -> None:
    rows, other = _rows(50, 5), _rows(50, 5)
    moment = _gathered(Moment(5, centred=centred, cross=True), rows, other)
    weight, fitted = torch.randn(3, 5), torch.randn(3, 5)
    x, y = rows.double(), other.double()
    if centred:
        x, y = x - x.mean(0), y - y.mean(0)
    wanted = y @ weight.double().t()
    gap, size = moment.error(weight, fitted)
    assert gap == pytest.approx(float((wanted - x @ fitted.double().t()).square().sum()), rel=1e-4)
    assert size == pytest.approx(float(wanted.square().sum()), rel=1e-4)


def test_without_a_second_model_the_error_is_the_metric_s() -> None:
    rows = _rows(50, 5)
    moment = _gathered(Moment(5), rows)
    weight, fitted = torch.randn(3, 5), torch.randn(3, 5)
    metric = moment.metric()
    assert moment.error(weight, fitted) == (metric.energy(weight - fitted), metric.energy(weight))


# Hostile data


HOSTILE = {
    "no rows": torch.zeros(0, 12),
    "zeros": torch.zeros(9, 12),
    "one example": torch.randn(1, 12),
    "one large example": 1e4 * torch.randn(1, 12),
    "fewer rows than columns": torch.randn(4, 12),
    "constant columns": torch.randn(50, 12) * (torch.arange(12) % 3 > 0) + 1000.1,
    "constant": torch.full((50, 12), 1000.1),
    "a large mean": 1e4 + torch.randn(500, 12),
    "huge": 1e12 * torch.randn(50, 12),
    "tiny": 1e-12 * torch.randn(50, 12),
    "one giant column": torch.randn(50, 12) * torch.logspace(0, 8, 12),
}


@pytest.mark.parametrize("centred", [True, False])
@pytest.mark.parametrize("form", ["full", "product", "diagonal"])
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_data_gives_finite_factors(
    name: str, form: str, centred: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if form != "full":
        monkeypatch.setattr(moments, "WIDE", 4)
    kernel = (2, 2) if form == "product" else ()
    moment = Moment(12, kernel, centred=centred)
    for part in HOSTILE[name].split(20):
        moment.add(part)
    metric = moment.metric()
    assert type(metric).__name__.lower() == form
    weight = torch.randn(6, 12)
    for out, inp in (((6, 1), (1, 12)), ((2, 3), (3, 4)), ((1, 6), (1, 12)), ((1, 6), (3, 4))):
        spec = FactorSpec(out=out, inp=inp, rank=2, axes=(2, 2) if kernel else ())
        columns = Columns.of(spec, kernel)
        fit = fit_in_metric(weight, spec, columns, metric)
        assert bool(torch.isfinite(fit.w1).all() and torch.isfinite(fit.w2).all())
        assert 0 <= fit.error < 1.001


@pytest.mark.parametrize("name", ["zeros", "one example", "one large example", "constant"])
def test_inputs_that_never_vary_leave_all_columns_alike(name: str) -> None:
    """Rounding must not pass for variance, by which anything would seem exact."""
    moment = Moment(12)
    for part in HOSTILE[name].split(20):
        moment.add(part)
    metric = moment.metric()
    assert_near(metric.apply(torch.eye(12)), torch.eye(12) * metric.apply(torch.eye(12))[0, 0], F32)
    assert metric.energy(torch.eye(12)) > 1


@pytest.mark.parametrize("mean", [1e2, 1e3, 1e4])
def test_a_large_mean_does_not_drown_the_variance(mean: float) -> None:
    rows = (torch.randn(500, 6) @ torch.randn(6, 6)) + mean * torch.randn(6)
    other = rows + 0.1 * torch.randn(500, 6)
    moment = Moment(6, cross=True)
    for start in range(0, 500, 100):
        moment.add(rows[start : start + 100], other[start : start + 100])
    metric = moment.metric()
    assert isinstance(metric, Full)
    assert_near(metric.matrix, _ridged(_moment(rows, centred=True), rows), F32)
    across = moment.across()
    assert across is not None
    x, y = rows.double(), other.double()
    assert_near(across, (y - y.mean(0)).t() @ (x - x.mean(0)) / 500, F32)
    drowned = rows.t() @ rows / 500 - torch.outer(rows.mean(0), rows.mean(0))
    with pytest.raises(AssertionError):  # the negative twin: the textbook's formula
        assert_near(drowned, _moment(rows, centred=True), F32)


def test_half_precision_rows_are_added_in_float32() -> None:
    rows = _rows(50, 5).half()
    metric = _gathered(Moment(5), rows).metric()
    assert isinstance(metric, Full)
    assert_near(metric.matrix, _ridged(_moment(rows, centred=True), rows), F32)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("side", [0, 1])
def test_rows_that_are_not_finite_are_refused_by_the_layer_s_name(bad: float, side: int) -> None:
    rows = [torch.randn(9, 4), torch.randn(9, 4)]
    rows[side][3, 1] = rows[side][3, 2] = rows[side][7, 0] = bad
    moment = Moment(4, cross=True, name="blocks.3.fc")
    with pytest.raises(DataError, match=r"blocks\.3\.fc(.|\n)*2 of 9 rows"):
        moment.add(rows[0], rows[1])
    assert moment.count == 0


@pytest.mark.parametrize("form", ["full", "product", "diagonal"])
def test_inputs_that_never_vary_leave_the_choice_to_the_weights(
    form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their variance is rounding, which tells nothing of what comes later."""
    if form != "full":
        monkeypatch.setattr(moments, "WIDE", 4)
    row = 100 * torch.randn(1, 12)
    moment = Moment(12, (2, 2) if form == "product" else (), cross=True)
    for count in (1, 30, 7):
        moment.add(row.expand(count, 12), row.expand(count, 12))
    weight = torch.randn(6, 12)
    scaled = moment.metric().apply(weight)
    assert_near(scaled / scaled.norm(), weight / weight.norm(), F32)
    varied = Moment(12, (2, 2) if form == "product" else ())
    varied.add(row + 1e-3 * torch.randn(30, 12) * torch.arange(12))  # the negative twin
    scaled = varied.metric().apply(weight)
    with pytest.raises(AssertionError):
        assert_near(scaled / scaled.norm(), weight / weight.norm(), F32)


@pytest.mark.parametrize("first", [1e-30, 0.0, 1e20])
def test_the_scale_follows_the_largest_numbers(first: float) -> None:
    """A batch of faint numbers, such as an expert's, before others; and the other way round."""
    rows = torch.randn(40, 5)
    moment = Moment(5, centred=False, cross=True)
    moment.add(first * rows[:20], first * rows[:20])
    moment.add(rows[20:], rows[20:])
    exact = torch.cat([first * rows[:20], rows[20:]]).double()
    want = exact.t() @ exact / 40
    metric, across = moment.metric(), moment.across()
    assert isinstance(metric, Full)
    assert across is not None
    found = (metric.matrix.double() - metric.added * torch.eye(5)) * metric.level
    assert_near(found, want, F32)
    assert_near(across * metric.level, want, F32)
    assert_near(moment.mean, exact.mean(0), F32)


def test_rows_of_other_examples_are_no_pairs() -> None:
    """What the rows are alone is still told."""
    rows, other = _rows(50, 5), _rows(20, 5)
    moment = Moment(5, cross=True)
    moment.add(rows[:20], other)
    assert moment.across() is not None
    assert_near(moment.other_mean, other.double().mean(0), F32)
    moment.part()
    moment.add(rows[20:])
    assert moment.across() is None
    assert_near(moment.mean, rows.double().mean(0), F32)
    assert torch.equal(moment.other_mean, moment.mean)
    metric = moment.metric()
    assert isinstance(metric, Full)
    assert_near(metric.matrix, _ridged(_moment(rows, centred=True), rows), F32)
    weight, fitted = torch.randn(3, 5), torch.randn(3, 5)
    assert moment.error(weight, fitted) == (metric.energy(weight - fitted), metric.energy(weight))


def test_a_target_solved_in_float32_is_that_of_float64() -> None:
    torch.manual_seed(0)
    rows = torch.randn(400, 24) @ torch.randn(24, 24)
    moment = Moment(24, cross=True)
    moment.add(rows, rows + 0.3 * torch.randn(400, 24))
    weight, metric = torch.randn(9, 24), moment.metric()
    exact = moment.target(weight, metric)
    near = moment.target(weight, metric, torch.float32)
    assert float((exact - weight).norm() / weight.norm()) > 0.01
    assert float((near - exact).norm() / exact.norm()) < 1e-4
