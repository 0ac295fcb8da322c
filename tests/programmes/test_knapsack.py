"""One limit spent exactly: against every choice there is."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from bp_convert.programmes.knapsack import BINS, knapsack


def least(objectives: list[np.ndarray], takes: list[np.ndarray], bound: float) -> float:
    """Return the least objective within the bound, by trying all choices."""
    found = float("inf")
    for choice in product(*map(range, map(len, objectives))):
        taken = sum(one[at] for one, at in zip(takes, choice, strict=True))
        if taken <= bound:
            value = sum(one[at] for one, at in zip(objectives, choice, strict=True))
            found = min(found, float(value))
    return found


@pytest.mark.parametrize("seed", range(20))
def test_whole_parameters_are_spent_as_well_as_can_be(seed: int) -> None:
    rng = np.random.default_rng(seed)
    sizes = rng.integers(2, 6, size=4)
    takes = [rng.integers(1, 400, size=n).astype(float) for n in sizes]
    objectives = [rng.random(n) for n in sizes]
    bound = float(sum(one.min() for one in takes) + rng.integers(0, 500))
    choice = knapsack(objectives, takes, bound)
    assert choice is not None
    assert sum(one[at] for one, at in zip(takes, choice, strict=True)) <= bound
    reached = sum(one[at] for one, at in zip(objectives, choice, strict=True))
    assert reached == pytest.approx(least(objectives, takes, bound), abs=1e-12)


def test_a_large_limit_is_kept_though_it_is_rounded() -> None:
    takes = [np.array([BINS * 7.3, BINS * 3.1]), np.array([BINS * 8.4, BINS * 0.2])]
    objectives = [np.array([0.0, 1.0]), np.array([0.0, 3.0])]
    assert knapsack(objectives, takes, BINS * 15.8) == [0, 0]
    assert knapsack(objectives, takes, BINS * 15.0) == [1, 0]
    assert knapsack(objectives, takes, BINS * 7.8) == [0, 1]
    assert knapsack(objectives, takes, BINS * 3.0) is None


def test_nothing_to_spend_is_no_choice() -> None:
    assert knapsack([np.array([1.0])], [np.array([2.0])], 0.0) is None


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("scale", [1e-3, 1.0, 50.0])
def test_a_limit_of_fractions_is_spent_nearly_as_well_as_can_be(seed: int, scale: float) -> None:
    """Such as an error's: rounding up to bins costs a bin a unit at most."""
    rng = np.random.default_rng(seed)
    takes = [scale * rng.random(5) for _ in range(4)]
    objectives = [rng.random(5) for _ in range(4)]
    bound = scale * float(rng.uniform(1.0, 3.0))
    best = least(objectives, takes, bound)
    choice = knapsack(objectives, takes, bound)
    if choice is None:
        assert not np.isfinite(least(objectives, takes, bound * (1 - 5 / BINS)))
        return
    assert sum(one[at] for one, at in zip(takes, choice, strict=True)) <= bound
    reached = sum(one[at] for one, at in zip(objectives, choice, strict=True))
    assert best <= reached <= least(objectives, takes, bound * (1 - 5 / BINS)) + 1e-12
