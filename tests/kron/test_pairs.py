from __future__ import annotations

import pytest

from bp_convert.errors import FactorError
from bp_convert.kron.contract import bilinear_macs
from bp_convert.kron.pairs import covering_pair, divisor_pairs, nearest_pair
from bp_convert.kron.policies import (
    fast_factors,
    lone_prime,
    low_rank_factors,
    paper_factors,
    scaled_pair,
)


@pytest.mark.parametrize(
    ("n", "pair"),
    [(1, (1, 1)), (27, (3, 9)), (32, (4, 8)), (288, (16, 18)), (8256, (86, 96)), (509, (1, 509))],
)
def test_the_paper_s_pairs(n: int, pair: tuple[int, int]) -> None:
    assert nearest_pair(n) == pair


@pytest.mark.parametrize("n", range(1, 400))
def test_no_divisor_lies_between_the_pair(n: int) -> None:
    a, b = nearest_pair(n)
    assert a * b == n
    assert a <= b
    assert not [x for x in range(a + 1, b) if n % x == 0]
    assert set(divisor_pairs(n)) == {(x, n // x) for x in range(1, n + 1) if n % x == 0}


@pytest.mark.parametrize("n", [1, 2, 3, 7, 97, 509, 30522])
def test_a_covering_pair_is_nearly_square_and_wastes_little(n: int) -> None:
    a, b = covering_pair(n)
    assert a * b >= n
    assert a <= b <= a + 2
    assert (a - 1) * b < n


@pytest.mark.parametrize("n", [0, -4])
def test_a_width_below_one_is_refused(n: int) -> None:
    with pytest.raises(FactorError, match="positive"):
        nearest_pair(n)


def test_large_primes_are_named_and_small_ones_are_not() -> None:
    assert [n for n in range(1, 30) if lone_prime(n)] == [11, 13, 17, 19, 23, 29]


def test_a_convolution_s_pair_grows_on_both_sides() -> None:
    assert scaled_pair(288, 32) == (12, 24)  # alpha 3: 3 * (4, 8), not nearest_pair(288)
    assert scaled_pair(64, 32) == nearest_pair(64)


def test_fast_pairs_stay_within_a_tenth_of_the_square_ones_and_cost_no_more() -> None:
    for inputs, outputs in ((512, 512), (768, 3072), (1152, 256), (27, 32), (4096, 1000)):
        fast, paper = fast_factors(inputs, outputs, 1), paper_factors(inputs, outputs, 1)
        assert fast.params <= 1.1 * paper.params
        assert bilinear_macs(fast) <= bilinear_macs(paper)


def test_low_rank_is_a_kronecker_sum() -> None:
    spec = low_rank_factors(20, 30, 4)
    assert spec.params == 4 * (20 + 30)
