from __future__ import annotations

import pytest
import torch

from bp_convert.errors import FactorError
from bp_convert.kron.nearest import nearest_kronecker_sum, rearrange, reconstruct
from tests.oracles import kron_sum
from tests.tolerances import assert_near

SIDE, PAIR = 1225, (35, 35)  # above the size at which the Gram matrix is diagonalised
FALLING = torch.arange(1, SIDE + 1, dtype=torch.float64) ** -1.0


def _weight(values: torch.Tensor) -> torch.Tensor:
    """A matrix whose rearrangement has these singular values."""
    left = torch.linalg.qr(torch.randn(SIDE, SIDE, dtype=torch.float64))[0]
    right = torch.linalg.qr(torch.randn(SIDE, SIDE, dtype=torch.float64))[0]
    table = (left * values) @ right
    return table.view(*PAIR, *PAIR).permute(0, 2, 1, 3).reshape(SIDE, SIDE)


def _spectrum(kind: str) -> torch.Tensor:
    if kind == "falling":
        return FALLING
    if kind == "slow":
        return FALLING.sqrt()
    if kind == "level":  # nothing sets the leading ones apart
        return torch.cat([torch.ones(9), torch.full((SIDE - 9,), 0.9)]).double()
    if kind == "few giants":  # which hide what is left to gain in the rest
        return torch.cat([torch.full((4,), 100.0).double(), FALLING[:-4]])
    return torch.linalg.svdvals(rearrange(torch.randn(SIDE, SIDE), PAIR, PAIR)).double()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["falling", "slow", "level", "few giants", "gaussian"])
def test_the_block_method_is_within_half_a_percent_of_the_optimum(kind: str) -> None:
    values = _spectrum(kind)
    weight = _weight(values).float()
    for rank in (1, 8, 33):
        best = float((values[rank:].square().sum() / values.square().sum()).sqrt())
        fit = nearest_kronecker_sum(weight, PAIR, PAIR, rank)
        assert best <= fit.error * (1 + 1e-5)
        assert fit.error <= 1.005 * best
        gap = float((weight - reconstruct(fit.w1, fit.w2)).norm() / weight.norm())
        assert fit.error == pytest.approx(gap, rel=1e-3)


def test_it_is_deterministic_and_leaves_the_random_state_alone() -> None:
    weight = torch.randn(1225, 1225)
    state = torch.get_rng_state()
    one = nearest_kronecker_sum(weight, (35, 35), (35, 35), 4)
    assert torch.equal(torch.get_rng_state(), state)
    with torch.autocast("cpu", torch.bfloat16):  # which narrows products elsewhere
        two = nearest_kronecker_sum(weight, (35, 35), (35, 35), 4)
    assert torch.equal(one.w1, two.w1)
    assert torch.equal(one.w2, two.w2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize(("out", "inp"), [((3, 4), (5, 6)), ((4, 3), (6, 5)), ((12, 1), (1, 30))])
def test_full_rank_is_exact_to_the_last_bit(
    dtype: torch.dtype, out: tuple[int, int], inp: tuple[int, int]
) -> None:
    weight = torch.randn(12, 30).to(dtype)
    weight[:, 7] = 0
    fit = nearest_kronecker_sum(weight, out, inp, 10**6)
    assert fit.w1.shape[0] == min(out[0] * inp[0], out[1] * inp[1])
    assert fit.w1.dtype == dtype
    assert fit.error == 0
    assert torch.equal(kron_sum(fit.w1, fit.w2), weight)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_error_is_of_the_factors_as_they_are_stored(dtype: torch.dtype) -> None:
    exact = kron_sum(torch.randn(2, 6, 6), torch.randn(2, 6, 6)).to(dtype)
    fit = nearest_kronecker_sum(exact, (6, 6), (6, 6), 2)
    gap = exact.double() - kron_sum(fit.w1.double(), fit.w2.double())
    assert fit.error == pytest.approx(float(gap.norm() / exact.double().norm()), rel=1e-3)
    assert fit.error > torch.finfo(dtype).eps / 10


def test_terms_of_equal_norm_on_both_sides() -> None:
    for rank in (2, 36):
        fit = nearest_kronecker_sum(torch.randn(36, 36), (6, 6), (6, 6), rank)
        ratio = fit.w1.flatten(1).norm(dim=1) / fit.w2.flatten(1).norm(dim=1)
        assert bool(((ratio > 0.49) & (ratio < 2.01)).all())


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_the_size_of_the_weights_does_not_matter(scale: float) -> None:
    weight = torch.randn(900, 900)
    fit = nearest_kronecker_sum(weight * scale, (30, 30), (30, 30), 4)
    same = nearest_kronecker_sum(weight, (30, 30), (30, 30), 4)
    assert fit.error == pytest.approx(same.error, rel=1e-4)
    assert_near(fit.w1 / scale**0.5, same.w1)


@pytest.mark.parametrize(("out", "inp"), [((36, 1), (1, 36)), ((6, 6), (6, 6))])
def test_the_weight_is_left_as_it_was(out: tuple[int, int], inp: tuple[int, int]) -> None:
    weight = torch.nn.Parameter(torch.randn(36, 36))
    before = weight.detach().clone()
    fit = nearest_kronecker_sum(weight, out, inp, 36)
    assert torch.equal(weight.detach(), before)
    assert not fit.w1.requires_grad
    fit.w1.zero_()
    fit.w2.zero_()
    assert torch.equal(weight.detach(), before)


def test_a_tiny_error_is_not_lost_in_cancellation() -> None:
    exact = kron_sum(torch.randn(2, 6, 6).double(), torch.randn(2, 6, 6).double())
    weight = exact + 1e-6 * torch.randn(36, 36).double()
    fit = nearest_kronecker_sum(weight, (6, 6), (6, 6), 2)
    gap = float((weight - kron_sum(fit.w1, fit.w2)).norm() / weight.norm())
    assert fit.error == pytest.approx(gap, rel=1e-3)
    assert 1e-9 < fit.error < 1e-5


def test_zeros_are_fitted_exactly() -> None:
    fit = nearest_kronecker_sum(torch.zeros(8, 9), (2, 4), (3, 3), 2)
    assert fit.error == 0
    assert bool(torch.isfinite(fit.w1).all() and torch.isfinite(fit.w2).all())
    assert_near(kron_sum(fit.w1, fit.w2), torch.zeros(8, 9))
    assert float(fit.w1.norm()) > 0.5  # one side lives on, so that the layer can learn


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused_by_name(bad: float) -> None:
    weight = torch.randn(4, 4)
    weight[1, 2] = bad
    with pytest.raises(FactorError, match=r"layer3\.weight(.|\n)*1 of 16 entries"):
        nearest_kronecker_sum(weight, (2, 2), (2, 2), 1, name="layer3.weight")


def test_pairs_and_rank_are_checked() -> None:
    with pytest.raises(FactorError, match="shape"):
        nearest_kronecker_sum(torch.randn(4, 6), (2, 2), (2, 2), 1)
    with pytest.raises(FactorError, match="rank of 0"):
        nearest_kronecker_sum(torch.randn(4, 4), (2, 2), (2, 2), 0)
