"""Factors fitted in a metric: never beaten where there is a closed form, settled elsewhere."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from bp_convert.errors import FactorError
from bp_convert.kron import als as fit_module
from bp_convert.kron.als import fit_in_metric
from bp_convert.kron.column_order import Columns
from bp_convert.kron.conv_layout import every_axes
from bp_convert.kron.metric import Diagonal, Full, Metric, Plain, Product
from bp_convert.kron.nearest import nearest_kronecker_sum, rearrange
from bp_convert.kron.pairs import divisor_pairs
from bp_convert.values.factors import FactorSpec
from tests.oracles import conv_weight, kron, kron_sum, spread_moment
from tests.tolerances import assert_near

K, D = 6, 24
KERNEL = (2, 3)
SPECS = [
    FactorSpec(out=out, inp=inp, rank=rank)
    for out in ((1, 6), (2, 3), (6, 1))
    for inp in ((1, 24), (2, 12), (6, 4))
    for rank in (1, 3)
]
CONV_SPECS = [
    FactorSpec(out=(2, 3), inp=Columns(channels, KERNEL, axes).inp, rank=2, axes=axes)
    for axes in every_axes(KERNEL)
    for channels in divisor_pairs(4)
]


def _error(weight: Tensor, fitted: Tensor, moment: Tensor) -> float:
    gap = weight - fitted
    return float((torch.trace(gap @ moment @ gap.t()) / _energy(weight, moment)).sqrt())


def _energy(weight: Tensor, moment: Tensor) -> Tensor:
    return torch.trace(weight @ moment @ weight.t())


def _whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let alternation run until nothing is gained."""
    monkeypatch.setattr(fit_module, "SETTLED", 0.0)


@pytest.mark.parametrize("rank", [1, 2, 5, 6])
def test_low_rank_is_the_svd_of_the_weight_times_the_metric_s_root(rank: int) -> None:
    weight, moment = torch.randn(K, D, dtype=torch.float64), spread_moment(D)
    spec = FactorSpec(out=(K, 1), inp=(1, D), rank=rank)
    fit = fit_in_metric(weight, spec, Columns.of(spec), Full(moment, ridge=0))
    lower = torch.linalg.cholesky(moment)
    u, s, vt = torch.linalg.svd(weight @ lower, full_matrices=False)
    best = (u[:, :rank] * s[:rank]) @ vt[:rank] @ torch.linalg.inv(lower)
    fitted = kron_sum(fit.w1, fit.w2)
    assert_near(fitted, best, torch.float32)  # eigenvectors of a Gram matrix: half the digits
    assert fit.error == pytest.approx(_error(weight, best, moment), rel=1e-7, abs=1e-7)
    if rank < K:
        near = nearest_kronecker_sum(weight, spec.out, spec.inp, rank)
        assert fit.error < 0.99 * _error(weight, kron_sum(near.w1, near.w2), moment)


@pytest.mark.parametrize("spec", [*SPECS, *CONV_SPECS], ids=lambda s: f"{s} {s.axes}")
@pytest.mark.parametrize("name", ["plain", "full", "product", "diagonal"])
def test_the_reported_error_is_the_metric_s_own(spec: FactorSpec, name: str) -> None:
    kernel = KERNEL if spec.axes else ()
    columns = Columns.of(spec, kernel)
    weights = torch.rand(D, dtype=torch.float64) + 0.01
    channels, places = spread_moment(4), spread_moment(6)
    metric, moment = {
        "plain": (Plain(), torch.eye(D, dtype=torch.float64)),
        "full": (Full(full := spread_moment(D), ridge=0), full),
        "product": (Product(channels, places, ridge=0), kron(channels, places)),
        "diagonal": (Diagonal(weights), torch.diag(weights)),
    }[name]
    if name == "product" and not spec.axes:
        columns = Columns.of(spec.model_copy(update={"axes": (2, 2)}), KERNEL)
        if spec.inp[1] % 6:
            return
    weight = torch.randn(K, D, dtype=torch.float64)
    fit = fit_in_metric(weight, spec, columns, metric)
    fitted = (
        conv_weight(fit.w1, fit.w2, columns.channels, kernel, spec.axes).reshape(K, D)
        if spec.axes
        else kron_sum(fit.w1, fit.w2)
    )
    assert fit.w1.shape == (min(spec.rank, spec.full_rank), spec.out[0], spec.inp[0])
    assert fit.error == pytest.approx(_error(weight, fitted, moment), rel=1e-6, abs=1e-9)
    assert 0 <= fit.error < 1
    # As good as the closed form that it starts from, and as the nearest sum by weight alone.
    start = fit_in_metric(weight, spec, columns, metric, sweeps=0)
    assert fit.error <= start.error * (1 + 1e-9)
    if name == "plain":
        table = weight if columns.order is None else weight[:, columns.order]
        near = nearest_kronecker_sum(table, spec.out, spec.inp, spec.rank)
        assert fit.error == pytest.approx(near.error, rel=1e-7, abs=1e-9)


@pytest.mark.parametrize("axes", list(every_axes(KERNEL)))
def test_in_a_kronecker_metric_the_closed_form_is_exact(axes: tuple[int, ...]) -> None:
    columns = Columns((2, 2), KERNEL, axes)
    one, two = (spread_moment(size) for size in columns.inp)
    back = torch.arange(D) if columns.order is None else columns.order.argsort()
    moment = kron(one, two)[back][:, back]
    weight = torch.randn(K, D, dtype=torch.float64)
    spec = FactorSpec(out=(2, 3), inp=columns.inp, rank=2, axes=axes)  # type: ignore[arg-type]
    metric = Full(moment, ridge=0)
    closed = fit_in_metric(weight, spec, columns, metric, sweeps=0)
    whole = fit_in_metric(weight, spec, columns, metric, sweeps=50)
    assert whole.error == pytest.approx(closed.error, rel=1e-7)
    for _ in range(20):  # nothing beside it is better
        w1 = closed.w1 + 0.01 * torch.randn_like(closed.w1)
        other = conv_weight(w1, closed.w2, (2, 2), KERNEL, axes).reshape(K, D)
        assert _error(weight, other, moment) > closed.error


@pytest.mark.parametrize("spec", [*SPECS, *CONV_SPECS], ids=lambda s: f"{s} {s.axes}")
def test_alternation_ends_where_the_error_is_level(
    spec: FactorSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    _whole(monkeypatch)
    moment = spread_moment(D, 10)
    weight = torch.randn(K, D, dtype=torch.float64)
    columns = Columns.of(spec, KERNEL if spec.axes else ())
    slopes = []
    for sweeps in (0, 3000):
        fit = fit_in_metric(weight, spec, columns, Full(moment, ridge=0), sweeps=sweeps)
        w1, w2 = fit.w1.clone().requires_grad_(), fit.w2.clone().requires_grad_()
        kernel = KERNEL if spec.axes else ()
        gap = weight - conv_weight(w1, w2, columns.channels, kernel, spec.axes).reshape(K, D)
        error = torch.trace(gap @ moment @ gap.t()) / _energy(weight, moment)
        error.backward()  # type: ignore[no-untyped-call]
        assert w1.grad is not None
        assert w2.grad is not None
        slopes.append(float(w1.grad.norm() * fit.w1.norm() + w2.grad.norm() * fit.w2.norm()))
    assert slopes[1] < 1e-5
    if spec.inp[0] > 1 and spec.inp[1] > 1 and fit.error > 1e-6:  # the start is not yet level
        assert slopes[0] > 1e-3


def test_alternation_gains_over_the_start() -> None:
    """The negative twin of never being worse: on a metric far from a product it is better."""
    weight, moment = torch.randn(12, 36).double(), spread_moment(36, 1e4)
    spec = FactorSpec(out=(3, 4), inp=(6, 6), rank=2)
    errors = [
        fit_in_metric(weight, spec, Columns.of(spec), Full(moment, ridge=0), sweeps=sweeps).error
        for sweeps in (0, 1, 2, 30)
    ]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 0.95 * errors[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("spec", [*SPECS, *CONV_SPECS], ids=lambda s: f"{s} {s.axes}")
def test_full_rank_is_exact(spec: FactorSpec, dtype: torch.dtype) -> None:
    spec = spec.model_copy(update={"rank": spec.full_rank})
    weight = torch.randn(K, D, dtype=dtype)
    kernel = KERNEL if spec.axes else ()
    columns = Columns.of(spec, kernel)
    for metric in (Plain(), Full(spread_moment(D)), Diagonal(torch.rand(D) + 0.1)):
        fit = fit_in_metric(weight, spec, columns, metric)
        found = conv_weight(fit.w1, fit.w2, columns.channels, kernel, spec.axes).reshape(K, D)
        assert fit.w1.dtype == dtype
        assert fit.error < (1e-5 if dtype == torch.float32 else 1e-11)
        assert float((found - weight).norm() / weight.norm()) < 1e2 * torch.finfo(dtype).eps ** 0.9


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_a_diagonal_metric_is_a_full_one_of_that_diagonal(
    spec: FactorSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    _whole(monkeypatch)
    weight = torch.randn(K, D, dtype=torch.float64)
    weights = torch.rand(D, dtype=torch.float64) + 0.05
    columns = Columns.of(spec)
    for sweeps in (0, 1, 3):
        one = fit_in_metric(weight, spec, columns, Diagonal(weights), sweeps=sweeps)
        two = fit_in_metric(
            weight, spec, columns, Full(torch.diag(weights), ridge=0), sweeps=sweeps
        )
        assert one.error == pytest.approx(two.error, rel=1e-6, abs=1e-9)
        if spec.full_rank > spec.rank:
            assert_near(kron_sum(one.w1, one.w2), kron_sum(two.w1, two.w2), torch.float32)


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize(
    "moment",
    [
        torch.zeros(D, D),
        torch.ones(D, D),
        torch.outer(torch.arange(float(D)), torch.arange(float(D))),
        torch.diag((torch.arange(D) % 3 > 0).float()),
        torch.diag(torch.logspace(-12, 12, D)),
        1e30 * torch.eye(D),
        1e-30 * torch.eye(D),
    ],
    ids=["zeros", "ones", "one row", "dead columns", "wide range", "huge", "tiny"],
)
def test_hostile_metrics_give_finite_factors(spec: FactorSpec, moment: Tensor) -> None:
    weight = torch.randn(K, D)
    for metric in (Full(moment), Diagonal(moment.diagonal().double() + 1e-12)):
        for one in (weight, torch.zeros(K, D)):
            fit = fit_in_metric(one, spec, Columns.of(spec), metric)
            assert bool(torch.isfinite(fit.w1).all() and torch.isfinite(fit.w2).all())
            assert 0 <= fit.error < 1.001


def test_what_cannot_be_afforded_keeps_the_closed_form(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, moment = torch.randn(12, 36).double(), spread_moment(36, 1e4)
    spec = FactorSpec(out=(3, 4), inp=(6, 6), rank=2)
    for metric in (Full(moment), Diagonal(moment.diagonal())):
        start = fit_in_metric(weight, spec, Columns.of(spec), metric, sweeps=0)
        with monkeypatch.context() as patched:
            patched.setattr(fit_module, "affordable", lambda *_: False)
            assert fit_in_metric(weight, spec, Columns.of(spec), metric).error == start.error
        assert fit_module.affordable(spec, metric)
        assert fit_in_metric(weight, spec, Columns.of(spec), metric).error < start.error


def test_weights_that_are_not_finite_are_refused_by_name() -> None:
    weight = torch.randn(K, D)
    weight[1, 2] = float("nan")
    for spec in (SPECS[0], FactorSpec(out=(K, 1), inp=(1, D))):
        metrics: list[Metric] = [Plain(), Full(spread_moment(D)), Diagonal(torch.ones(D))]
        for metric in metrics:
            with pytest.raises(FactorError, match="layer3"):
                fit_in_metric(weight, spec, Columns.of(spec), metric, name="layer3")


def test_the_weight_and_the_random_state_are_left_as_they_were() -> None:
    weight = torch.nn.Parameter(torch.randn(K, D))
    before, state = weight.detach().clone(), torch.get_rng_state()
    for spec in SPECS:
        fit = fit_in_metric(weight, spec, Columns.of(spec), Full(torch.eye(D)))
        again = fit_in_metric(weight, spec, Columns.of(spec), Full(torch.eye(D)))
        assert torch.equal(fit.w1, again.w1)
        assert not fit.w1.requires_grad
        fit.w1.zero_()
        fit.w2.zero_()
    assert torch.equal(weight.detach(), before)
    assert torch.equal(torch.get_rng_state(), state)


def test_outputs_that_count_more_are_kept_closer() -> None:
    """With one output in each row, the weighted problem has its own closed form: SVD of D W L."""
    torch.manual_seed(0)
    weight = torch.randn(12, 10, dtype=torch.float64)
    moment = spread_moment(10)
    rows = torch.logspace(-1, 1, 12, dtype=torch.float64)
    spec = FactorSpec(out=(12, 1), inp=(1, 10), rank=3)
    metric = Full(moment, ridge=0)
    near = fit_in_metric(weight, spec, Columns((1, 10)), metric, outputs=Diagonal(rows.square()))
    lower = torch.linalg.cholesky(moment)
    scaled = torch.diag(rows) @ weight @ lower
    values = torch.linalg.svdvals(scaled)
    best = float((values[3:].square().sum() / values.square().sum()).sqrt())
    assert near.error == pytest.approx(best, rel=1e-9)
    dense = kron_sum(near.w1, near.w2)
    gap = (torch.diag(rows) @ (weight - dense) @ lower).norm() / scaled.norm()
    assert float(gap) == pytest.approx(best, rel=1e-9)
    plain = fit_in_metric(weight, spec, Columns((1, 10)), metric)
    there = (torch.diag(rows) @ (weight - kron_sum(plain.w1, plain.w2)) @ lower).norm()
    assert float(there / scaled.norm()) > 1.2 * best


def test_outputs_of_both_factors_count_by_the_product_of_two_diagonals() -> None:
    torch.manual_seed(0)
    one, two = (torch.rand(size, dtype=torch.float64) + 0.2 for size in (3, 4))
    rows = torch.outer(one, two).flatten()
    weight = torch.randn(12, 10, dtype=torch.float64)
    spec = FactorSpec(out=(3, 4), inp=(2, 5), rank=2)
    near = fit_in_metric(weight, spec, Columns((2, 5)), Plain(), outputs=Diagonal(rows.square()))
    table = rearrange(torch.diag(rows) @ weight, (3, 4), (2, 5))
    values = torch.linalg.svdvals(table)
    best = float((values[2:].square().sum() / values.square().sum()).sqrt())
    assert near.error == pytest.approx(best, rel=1e-9)


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_factors_alone_are_those_of_the_fit(spec: FactorSpec) -> None:
    weight, metric = torch.randn(K, D), Full(spread_moment(D, 10).float())
    near = fit_in_metric(weight, spec, Columns.of(spec, ()), metric)
    w1, w2 = fit_module.factors_in_metric(weight, spec, Columns.of(spec, ()), metric)
    assert torch.equal(near.w1, w1)
    assert torch.equal(near.w2, w2)
    known = fit_in_metric(
        weight, spec, Columns.of(spec, ()), metric, total=metric.energy(weight.float())
    )
    assert known.error == pytest.approx(near.error, rel=1e-6)
