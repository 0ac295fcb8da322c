"""Factors of one norm after every fit; terms of zeros that can be trained; sizes that do not
matter."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import product

import pytest
import torch
from torch import Tensor, nn

from bp_convert.calibration import moments
from bp_convert.calibration.moments import Moment
from bp_convert.kinds import KINDS, Factors, Spread
from bp_convert.kron import scale
from bp_convert.kron.als import fit_in_metric, natural
from bp_convert.kron.column_order import Columns
from bp_convert.kron.metric import Diagonal, Full, Metric, Plain, Product
from bp_convert.kron.nearest import nearest_kronecker_sum
from bp_convert.kron.scale import EVEN, balanced, unit
from bp_convert.values.factors import FactorSpec
from tests.contract.cases import CASES, Case, kind, output
from tests.oracles import kron_sum, spread_moment
from tests.tolerances import assert_near

K, D, KERNEL = 6, 24, (2, 3)
SPECS = [
    FactorSpec(out=out, inp=inp, rank=rank, axes=(2, 2))
    for out in ((1, 6), (2, 3), (6, 1))
    for inp in ((1, 24), (2, 12), (4, 6))
    for rank in (1, 3, 10**6)
]
METRICS: dict[str, Callable[[], Metric]] = {
    "plain": Plain,
    "full": lambda: Full(spread_moment(D, 1e4).float()),
    "product": lambda: Product(spread_moment(4).float(), spread_moment(6).float()),
    "diagonal": lambda: Diagonal(torch.logspace(-4, 0, D).double()),
}


def _norms(w1: Tensor, w2: Tensor) -> tuple[Tensor, Tensor]:
    one, two = (w.double().flatten(1).square().sum(1).sqrt() for w in (w1, w2))
    return one, two


def _check_even(w1: Tensor, w2: Tensor, *, whole: bool) -> None:
    """Every term: both factors of one norm, within a factor of two at full rank."""
    one, two = _norms(w1, w2)
    assert bool((one > 0).all())
    ratio = one[two > 0] / two[two > 0]
    bound = 2.001 if whole else 1.00001
    assert bool(((ratio < bound) & (ratio > 1 / bound)).all()), ratio


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("name", METRICS)
@pytest.mark.parametrize("weighed", [False, True], ids=["alike", "weighed"])
def test_after_every_fit_both_factors_have_one_norm(
    spec: FactorSpec, name: str, weighed: bool
) -> None:
    spec = spec.model_copy(update={"rank": min(spec.rank, spec.full_rank)})
    columns = Columns.of(spec, KERNEL)
    counts = Diagonal(torch.logspace(-4, 2, K)) if weighed else None
    whole = spec.rank == spec.full_rank
    for sweeps, dtype in product((0, 5), (torch.float32, torch.float64)):
        weight = torch.randn(K, D, dtype=dtype)
        fit = fit_in_metric(weight, spec, columns, METRICS[name](), outputs=counts, sweeps=sweeps)
        _check_even(fit.w1, fit.w2, whole=whole)
        if whole:  # nothing is rounded, whatever the metric
            assert fit.error == 0
            assert torch.equal(natural(fit.w1, fit.w2, columns), weight)


def test_without_balance_they_have_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative twin: the metric's root, taken off one factor alone, sets them apart."""
    from bp_convert.kron import als as fit_module

    monkeypatch.setattr(fit_module, "balanced", lambda w1, w2: (w1, w2))
    spec = FactorSpec(out=(6, 1), inp=(1, 24), rank=3)
    metric = Full(1e6 * spread_moment(D, 1e4).float())
    fit = fit_in_metric(torch.randn(K, D), spec, Columns.of(spec), metric)
    with pytest.raises(AssertionError):
        _check_even(fit.w1, fit.w2, whole=False)


def test_balance_keeps_every_term() -> None:
    w1, w2 = torch.randn(5, 2, 3).double(), torch.randn(5, 4, 6).double()
    w1 *= torch.logspace(-12, 12, 5).double()[:, None, None]
    one, two = balanced(w1, w2)
    _check_even(one, two, whole=False)
    for r in range(5):
        assert_near(
            kron_sum(one[r : r + 1], two[r : r + 1]), kron_sum(w1[r : r + 1], w2[r : r + 1])
        )


@pytest.mark.parametrize("which", ["w1", "w2", "both"])
def test_terms_of_zeros_move_as_far_as_the_dense_weight(which: str) -> None:
    """A step of s in every entry of w2 moves no entry of the weight by more than s."""
    w1, w2 = torch.randn(7, 2, 3), torch.randn(7, 4, 6)
    for r in (1, 2, 4, 5, 6):
        if which != "w2":
            w1[r] = 0
        if which != "w1":
            w2[r] = 0
    before = kron_sum(w1, w2)
    one, two = balanced(w1, w2)
    assert_near(kron_sum(one, two), before)
    dead = torch.tensor([1, 2, 4, 5, 6])
    assert float(two[dead].abs().max()) == 0
    assert torch.equal(one[dead].abs().sum(0), torch.full((2, 3), 1.0))
    assert len({tuple(row.tolist()) for row in one[dead].flatten(1)}) > 1  # not one term five times
    state = torch.get_rng_state()
    assert torch.equal(balanced(w1, w2)[0], one)
    assert torch.equal(torch.get_rng_state(), state)


# One step of an optimiser


def _step(layer: nn.Module, x: Tensor) -> tuple[float, float]:
    """Take one step of Adam on the weights; return the largest gradient and how far the output
    moved."""
    parameters = [p for n, p in layer.named_parameters() if "bias" not in n]
    torch.manual_seed(3)
    before = output(layer, x).detach()
    wanted = torch.randn_like(before)
    optimiser = torch.optim.Adam(parameters, lr=1e-3)
    (output(layer, x) * wanted).sum().backward()
    found = max(float(p.grad.abs().max()) for p in parameters if p.grad is not None)
    optimiser.step()
    return found, float((output(layer, x).detach() - before).norm())


def _factors(case: Case, dense: nn.Module, share: float, *, low: bool) -> Factors:
    """Return factors of about a share of each matrix, low-rank or of a pair in the middle."""
    one = kind(case)
    found = {}
    for role, choice in one.choices(dense, one.widths(dense)).items():
        specs = list(choice.specs())
        thin = [s for s in specs if s.out[1] == 1 and s.inp[0] == 1]
        spec = thin[0] if low else specs[len(specs) // 2]
        rank = max(1, int(share * spec.full_rank))
        found[role] = spec.model_copy(update={"rank": rank})
    return found


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("low", [True, False], ids=["low rank", "pairs"])
@pytest.mark.parametrize("share", [0.01, 0.5, 1.0])
@pytest.mark.parametrize("by_data", [False, True], ids=["nearest", "metric"])
def test_a_layer_of_zeros_trains_about_as_the_dense_one(
    case: Case, low: bool, share: float, by_data: bool
) -> None:
    dense, one = case.make(), kind(case)
    with torch.no_grad():
        for name, parameter in dense.named_parameters():
            parameter.mul_(0.0 if "weight" in name else 1.0)
    factors = _factors(case, dense, share, low=low)
    widths = one.widths(dense)
    twin = one.build(dense, widths, factors, "cpu")
    one.rest(dense, twin, Spread())
    if by_data:
        choices = one.choices(dense, widths)
        for role, matrices in one.matrices(dense, Spread(), factors).items():
            columns = Columns.of(factors[role], choices[role].kernel)
            size = matrices[0].shape[1]
            metric = Diagonal(torch.rand(size)) if one.lookup else Full(spread_moment(size).float())
            for index, matrix in enumerate(matrices):
                fit = fit_in_metric(matrix, factors[role], columns, metric)
                assert fit.error == 0
                one.place(twin, role, index, fit.w1, fit.w2)
    else:
        assert one.fill(dense, twin, Spread()) == 0
    for p in (*twin.parameters(), *twin.to_dense().parameters()):  # type: ignore[operator]
        assert bool(p.isfinite().all())
    back = [p for n, p in twin.to_dense().named_parameters() if "weight" in n]  # type: ignore[operator]
    assert max(float(p.detach().abs().max()) for p in back) == 0
    x = case.draw(torch.float32)
    gradient, moved = _step(twin, x)
    _, dense_moved = _step(copy.deepcopy(dense), x)
    assert gradient > 0
    assert dense_moved / 50 < moved < 4 * dense_moved


def test_a_partner_of_another_size_throws_the_output_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative twin: what zero weights were given before, a partner of a thousand."""
    case = next(one for one in CASES if one.kind == "Linear")
    dense = case.make()
    nn.init.zeros_(dense.weight)
    signs = scale._signs
    monkeypatch.setattr(scale, "_signs", lambda shape: 1e3 * signs(shape))
    one = kind(case)
    twin = one.build(dense, (24, 36), _factors(case, dense, 0.5, low=True), "cpu")
    one.fill(dense, twin, Spread())
    x = case.draw(torch.float32)
    assert _step(twin, x)[1] > 50 * _step(dense, x)[1]


# Sizes


@pytest.mark.parametrize("largest", [1e-38, 1e-30, 1e-7, 1.0, 3e6, 1e15, 1e38])
def test_a_scale_rounds_nothing(largest: float) -> None:
    tensor = torch.randn(5, 7)
    tensor *= largest / tensor.abs().max()
    near, size = unit(tensor)
    assert torch.equal(near * size, tensor)
    assert 1 / EVEN <= float(near.abs().max()) <= EVEN
    assert (size**0.5).hex().startswith(("0x1.0000000000000p", "0x1.0000000000000p-"))
    for bad in (torch.zeros(3), torch.tensor([1.0, float("nan")]), torch.zeros(0)):
        assert unit(bad)[1] == 1


@pytest.mark.parametrize("size", [1e-20, 1e15])
@pytest.mark.parametrize("inputs", [1e-20, 1.0, 1e15])
@pytest.mark.parametrize("form", ["full", "product", "diagonal"])
@pytest.mark.parametrize("centred", [True, False])
def test_the_size_of_weights_and_of_inputs_does_not_matter(
    size: float, inputs: float, form: str, centred: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tiny and huge: the same errors, the same factors but for their scale, finite figures."""
    if form != "full":
        monkeypatch.setattr(moments, "WIDE", 4)
    kernel = KERNEL if form == "product" else ()
    rows = torch.randn(200, D) * torch.logspace(-1, 0, D) + 0.3
    other = rows + 0.1 * torch.randn(200, D)
    weight = torch.randn(K, D)
    found = []
    for up, wide in ((1.0, 1.0), (size, inputs)):
        moment = Moment(D, kernel, centred=centred, cross=True)
        for part, beside in zip(rows.split(60), other.split(60), strict=True):
            moment.add(part * wide, beside * wide)
        metric = moment.metric()
        assert type(metric).__name__.lower() == form
        for out, inp, rank in (((6, 1), (1, D), 3), ((2, 3), (4, 6), 2)):
            spec = FactorSpec(out=out, inp=inp, rank=rank, axes=(2, 2) if kernel else ())
            columns = Columns.of(spec, kernel)
            fit = fit_in_metric(weight * up, spec, columns, metric)
            _check_even(fit.w1, fit.w2, whole=False)
            fitted = natural(fit.w1, fit.w2, columns)
            gap, whole = moment.error(weight * up, fitted)
            assert whole > 0
            found.append((fit.error, gap / whole, fitted / up, metric.energy(weight * up)))
        assert_near(moment.mean / wide, rows.double().mean(0), torch.float32)
        assert_near(moment.other_mean / wide, other.double().mean(0), torch.float32)
    for one, two in zip(found[:2], found[2:], strict=True):
        assert one[0] == pytest.approx(two[0], rel=1e-3)
        assert one[1] == pytest.approx(two[1], rel=1e-2)
        torch.testing.assert_close(one[2], two[2], rtol=0, atol=2e-3)
        assert two[3] == pytest.approx(one[3] * (size * inputs) ** 2, rel=1e-3)


def test_a_nearest_sum_of_tiny_and_huge_weights() -> None:
    weight = torch.randn(300, 300)
    plain = nearest_kronecker_sum(weight, (20, 15), (15, 20), 4)
    for size in (1e-37, 1e-20, 1e15, 1e30):
        fit = nearest_kronecker_sum(weight * size, (20, 15), (15, 20), 4)
        assert fit.error == pytest.approx(plain.error, rel=1e-3)
        _check_even(fit.w1, fit.w2, whole=False)


def test_all_kinds_are_here() -> None:
    assert {case.kind for case in CASES} == {one.name for one in KINDS if not one.bare}
