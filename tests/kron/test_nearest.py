from __future__ import annotations

import pytest
import torch

from bp_convert.errors import FactorError
from bp_convert.kron.nearest import nearest_kronecker_sum, rearrange
from tests.oracles import kron_sum
from tests.tolerances import assert_near


def _decaying(side: int) -> torch.Tensor:
    """A matrix whose rearrangement (pairs of sqrt(side)) has singular values that fall off."""
    root = int(side**0.5)
    left = torch.linalg.qr(torch.randn(side, side))[0]
    right = torch.linalg.qr(torch.randn(side, side))[0]
    table = left @ torch.diag(torch.arange(1, side + 1) ** -1.0) @ right
    return table.view(root, root, root, root).permute(0, 2, 1, 3).reshape(side, side)


@pytest.mark.parametrize("rank", [1, 8, 33])
@pytest.mark.parametrize("kind", ["flat", "decaying"])
def test_the_block_method_is_within_one_percent_of_the_optimum(kind: str, rank: int) -> None:
    side, pair = 1225, (35, 35)  # above the size at which the Gram matrix is diagonalised
    weight = torch.randn(side, side) if kind == "flat" else _decaying(side)
    values = torch.linalg.svdvals(rearrange(weight, pair, pair))
    best = float((values[rank:].square().sum() / values.square().sum()).sqrt())
    fit = nearest_kronecker_sum(weight, pair, pair, rank)
    assert best <= fit.error * (1 + 1e-5)
    assert fit.error <= 1.01 * best
    gap = float((weight - kron_sum(fit.w1, fit.w2)).norm() / weight.norm())
    assert fit.error == pytest.approx(gap, rel=1e-3)


def test_it_is_deterministic_and_leaves_the_random_state_alone() -> None:
    weight = torch.randn(1225, 1225)
    state = torch.get_rng_state()
    one = nearest_kronecker_sum(weight, (35, 35), (35, 35), 4)
    assert torch.equal(torch.get_rng_state(), state)
    two = nearest_kronecker_sum(weight, (35, 35), (35, 35), 4)
    assert torch.equal(one.w1, two.w1)
    assert torch.equal(one.w2, two.w2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_full_rank_is_exact_in_every_dtype(dtype: torch.dtype) -> None:
    weight = torch.randn(12, 30).to(dtype)
    fit = nearest_kronecker_sum(weight, (3, 4), (5, 6), 10**6)
    assert fit.w1.shape == (15, 3, 5)
    assert fit.w1.dtype == dtype
    assert_near(kron_sum(fit.w1.double(), fit.w2.double()), weight.double(), dtype)


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


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused_by_name(bad: float) -> None:
    weight = torch.randn(4, 4)
    weight[1, 2] = bad
    with pytest.raises(FactorError, match=r"layer3\.weight(.|\n)*1 of 16 entries"):
        nearest_kronecker_sum(weight, (2, 2), (2, 2), 1, name="layer3.weight")


def test_pairs_and_rank_are_checked() -> None:
    with pytest.raises(FactorError, match="shape"):
        nearest_kronecker_sum(torch.randn(4, 6), (2, 2), (2, 2), 1)
    with pytest.raises(FactorError, match="rank 0"):
        nearest_kronecker_sum(torch.randn(4, 4), (2, 2), (2, 2), 0)
