"""Exact identities of Kronecker sums, over every small shape, in float64."""

from __future__ import annotations

import pytest
import torch

from bp_convert.kron.contract import bilinear
from bp_convert.kron.nearest import nearest_kronecker_sum, rearrange, reconstruct
from bp_convert.kron.pairs import divisor_pairs
from tests.oracles import kron_sum
from tests.tolerances import assert_near

SIDES = range(1, 13)


@pytest.mark.parametrize("k", SIDES)
def test_error_squared_is_the_tail_of_squared_singular_values(k: int) -> None:
    for d in SIDES:
        weight = torch.randn(k, d, dtype=torch.float64)
        for out in divisor_pairs(k):
            for inp in divisor_pairs(d):
                values = torch.linalg.svdvals(rearrange(weight, out, inp))
                shares = values.square() / values.square().sum()
                for rank in range(1, len(values) + 1):
                    fit = nearest_kronecker_sum(weight, out, inp, rank)
                    tail = float(shares[rank:].sum())
                    assert fit.error**2 == pytest.approx(tail, rel=1e-9, abs=0)
                    gap = torch.linalg.norm(weight - kron_sum(fit.w1, fit.w2)) / weight.norm()
                    assert float(gap) ** 2 == pytest.approx(tail, rel=1e-9, abs=0)


def test_no_other_term_is_nearer() -> None:
    """The negative twin: away from the fitted factors the error grows, in every direction."""
    weight = torch.randn(12, 12, dtype=torch.float64)
    fit = nearest_kronecker_sum(weight, (3, 4), (4, 3), 2)
    for _ in range(50):
        w1 = fit.w1 + 0.01 * torch.randn_like(fit.w1)
        w2 = fit.w2 + 0.01 * torch.randn_like(fit.w2)
        assert (weight - kron_sum(w1, w2)).norm() / weight.norm() > fit.error


@pytest.mark.parametrize("k", SIDES)
def test_the_contraction_is_the_product_with_the_kronecker_sum(k: int) -> None:
    for d in SIDES:
        x = torch.randn(3, d, dtype=torch.float64)
        for k1, k2 in divisor_pairs(k):
            for d1, d2 in divisor_pairs(d):
                for rank in (1, 2, 3):
                    w1 = torch.randn(rank, k1, d1, dtype=torch.float64)
                    w2 = torch.randn(rank, d2, k2, dtype=torch.float64)
                    dense = kron_sum(w1, w2)
                    assert_near(bilinear(x, w1, w2), x @ dense.t())
                    assert_near(reconstruct(w1, w2), dense)


def test_the_paper_s_equation_w1_x_w2() -> None:
    w1, w2 = torch.randn(3, 4).double(), torch.randn(5, 2).double()
    x = torch.randn(4, 5).double()
    assert_near(bilinear(x.flatten(), w1[None], w2[None]), (w1 @ x @ w2).flatten())


def test_terms_add_up_and_each_factor_is_linear() -> None:
    w1, w2 = torch.randn(3, 2, 3).double(), torch.randn(3, 4, 5).double()
    x = torch.randn(7, 12).double()
    apart = sum(bilinear(x, w1[r : r + 1], w2[r : r + 1]) for r in range(3))
    assert_near(bilinear(x, w1, w2), apart)  # type: ignore[arg-type]
    assert_near(bilinear(x, 2 * w1, 3 * w2), 6 * bilinear(x, w1, w2))


def test_an_exact_sum_is_found_again() -> None:
    dense = kron_sum(torch.randn(3, 6, 4).double(), torch.randn(3, 5, 7).double())
    fit = nearest_kronecker_sum(dense, (6, 7), (4, 5), 3)
    assert fit.error < 1e-7
    assert_near(kron_sum(fit.w1, fit.w2), dense)


def test_more_terms_are_never_worse() -> None:
    weight = torch.randn(36, 36)
    errors = [nearest_kronecker_sum(weight, (6, 6), (6, 6), r).error for r in range(1, 37)]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] == 0
    assert errors[0] > 0.5
