"""The integer programme against every choice there is, and what HiGHS may not do to us."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
from scipy.optimize import linprog

from bp_convert.errors import PlanError
from bp_convert.programmes import exact
from bp_convert.programmes.exact import Problem, relaxed, shares_of, solve
from bp_convert.search.allocate import OutOfReachError, allocate, quantity
from bp_convert.search.units import Unit
from tests.search.units import drawn

Arrays = Sequence[np.ndarray]


def _best(objectives: Arrays, limited: Arrays, bounds: np.ndarray) -> float | None:
    found = []
    for choice in product(*(range(len(one)) for one in objectives)):
        sums = np.sum([one[at] for one, at in zip(limited, choice, strict=True)], axis=0)
        if (sums <= bounds * (1 + 1e-12)).all():
            found.append(sum(one[at] for one, at in zip(objectives, choice, strict=True)))
    return None if not found else float(min(found))


def _drawn(seed: int, units: int, options: int, limits: int) -> tuple[Arrays, Arrays, np.ndarray]:
    """Whole numbers of very different sizes, and bounds that few choices keep."""
    rng = np.random.default_rng(seed)
    sizes = 10.0 ** rng.uniform(0, 9, limits)
    limited = [np.round(sizes * rng.random((options, limits))) for _ in range(units)]
    objectives = [rng.random(options) for _ in range(units)]
    bounds = np.round(sizes * units * rng.uniform(0.1, 0.5, limits))
    return objectives, limited, bounds


@pytest.mark.slow
@pytest.mark.parametrize("limits", [1, 2, 3, 4])
def test_every_small_problem_is_solved_or_has_no_choice(limits: int) -> None:
    solved = without = 0
    for seed in range(60):
        objectives, limited, bounds = _drawn(seed, 4, 5, limits)
        best = _best(objectives, limited, bounds)
        choice = solve(Problem(objectives, limited, bounds), gap=0.0)
        assert (choice is None) == (best is None)
        if choice is None or best is None:
            without += 1
            continue
        solved += 1
        sums = np.sum([one[at] for one, at in zip(limited, choice, strict=True)], axis=0)
        assert (sums <= bounds).all()
        reached = sum(one[at] for one, at in zip(objectives, choice, strict=True))
        assert reached == pytest.approx(best, rel=1e-6)
    assert solved > 1
    assert without > 1 or limits == 1


@pytest.mark.parametrize("limits", [0, 1, 2, 4])
def test_few_options_give_what_all_of_them_do(limits: int) -> None:
    """The linear programme over all options at once, beside the one that lets them in."""
    for seed in range(30):
        objectives, limited, bounds = _drawn(seed, 6, 12, limits)
        shares = shares_of(Problem(objectives, limited, bounds))
        least = sum(one.min(0) for one in limited)
        if (least > bounds).any():
            continue
        count, ones = 6 * 12, np.repeat(np.eye(6), 12, axis=1)
        takes = np.concatenate(limited).T
        whole = linprog(
            np.concatenate(objectives),
            A_ub=takes if limits else None,
            b_ub=bounds if limits else None,
            A_eq=ones,
            b_eq=np.ones(6),
        )
        if whole.status != 0:
            assert shares is None
            continue
        assert shares is not None
        x = np.concatenate(shares)
        assert len(x) == count
        assert (takes @ x <= bounds * (1 + 1e-6)).all()
        assert np.concatenate(objectives) @ x == pytest.approx(whole.fun, rel=1e-6, abs=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("limits", [1, 2, 3])
def test_a_rounded_choice_keeps_all_limits_and_is_near_the_best(limits: int) -> None:
    found = 0
    for seed in range(40):
        objectives, limited, bounds = _drawn(seed, 4, 5, limits)
        best = _best(objectives, limited, bounds)
        choice = relaxed(Problem(objectives, limited, bounds))
        if choice is None:
            continue
        found += 1
        sums = np.sum([one[at] for one, at in zip(limited, choice, strict=True)], axis=0)
        assert (sums <= bounds).all()
        assert best is not None
    assert found > 1
    rng = np.random.default_rng(limits)
    limited = [rng.random((20, limits)) for _ in range(60)]
    objectives = [1.1 - one.mean(1) * rng.uniform(0.9, 1.1, 20) for one in limited]
    bounds = np.full(limits, 60 * 0.3)
    whole, quick = (one(Problem(objectives, limited, bounds)) for one in (solve, relaxed))
    assert whole is not None
    assert quick is not None
    least, near = (
        sum(float(one[at]) for one, at in zip(objectives, choice, strict=True))
        for choice in (whole, quick)
    )
    assert near <= 1.02 * least


def test_bounds_that_a_single_choice_keeps_to_the_last_number() -> None:
    """The choice drawn beforehand sets the bounds: one less of any and there may be none."""
    for seed in range(30):
        rng = np.random.default_rng(seed)
        objectives, limited, _ = _drawn(seed, 4, 5, 3)
        drawn_ = rng.integers(0, 5, 4)
        bounds = np.sum([one[at] for one, at in zip(limited, drawn_, strict=True)], axis=0)
        choice = solve(Problem(objectives, limited, bounds))
        assert choice is not None
        sums = np.sum([one[at] for one, at in zip(limited, choice, strict=True)], axis=0)
        assert (sums <= bounds).all()
        for column in range(3):
            less = bounds.copy()
            less[column] -= 1
            found = solve(Problem(objectives, limited, less))
            assert (found is None) == (_best(objectives, limited, less) is None)


def test_a_limit_kept_in_highs_eyes_only_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A solution above a limit by rounding is banned, and the next one taken."""
    objectives = [np.array([0.0, 1.0, 2.0]), np.array([0.0, 5.0])]
    limited = [np.array([[1e9 + 1], [1e9], [1.0]]), np.array([[1e9], [2.0]])]
    bounds = np.array([2e9])
    asked = []
    whole = exact._whole

    def loose(left: Problem, banned: Any, *more: Any) -> Any:
        asked.append(len(banned))
        # as if within a tolerance
        return whole(replace(left, bounds=left.bounds + 1), banned, *more)

    monkeypatch.setattr(exact, "_whole", loose)
    assert solve(Problem(objectives, limited, bounds)) == [1, 0]
    assert asked == [0, 1] or asked == [0]


def _kept(units: Sequence[Unit], bounds: dict[str, float]) -> list[int] | None:
    """Return what ``allocate`` finds, whether or not each limit alone can be kept."""
    try:
        return allocate(units, bounds)
    except OutOfReachError:
        return None


@pytest.mark.slow
@pytest.mark.parametrize("limits", [2, 3, 4])
def test_allocation_refuses_nothing_that_can_be_kept(limits: int) -> None:
    names = ("params", "macs", "time", "time32")[:limits]
    kept = refused = 0
    for seed in range(40):
        rng = np.random.default_rng(100 * limits + seed)
        units = [drawn(rng, 6, names[1:]) for _ in range(4)]
        bounds = {
            name: float(rng.uniform(0.1, 0.35))
            * sum(float(quantity(unit, name).max()) for unit in units)
            for name in names
        }
        limited = [np.stack([quantity(unit, name) for name in names], 1) for unit in units]
        objectives = [quantity(unit, "error") for unit in units]
        best = _best(objectives, limited, np.array(list(bounds.values())))
        if best is None:
            refused += 1
            with pytest.raises(OutOfReachError) as caught:
                allocate(units, bounds)
            name, least = caught.value.quantity, caught.value.least
            assert least > bounds[name]
            others = {one: bound for one, bound in bounds.items() if one != name}
            if _kept(units, others) is not None:
                # What is called the least is kept where it is asked for, and next to nothing less.
                assert _kept(units, {**others, name: least * (1 + 1e-9)}) is not None
                assert _kept(units, {**others, name: least * 0.998}) is None
            continue
        kept += 1
        choice = allocate(units, bounds)
        for name, bound in bounds.items():
            total = sum(float(quantity(u, name)[at]) for u, at in zip(units, choice, strict=True))
            assert total <= bound * (1 + 1e-11)
    assert kept > 5
    assert refused > 5


def test_rounding_alone_misses_some() -> None:
    """The negative twin: the linear programme finds most choices, and not every one there is."""
    problems = [_drawn(seed, 4, 5, 3) for seed in range(40)]
    assert [one for one in problems if relaxed(Problem(*one)) is None and _best(*one) is not None]


def test_nothing_is_printed_on_standard_output() -> None:
    """HiGHS has a line of its own that no option turns off; results go to standard output."""
    code = (
        "import os, sys\n"
        "from bp_convert.programmes.exact import _quiet\n"
        "print('before')\n"
        "with _quiet():\n"
        "    os.write(1, b'noise')\n"
        "print('after')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["before", "after"]
    assert done.stderr == "noise"


def test_time_that_ran_out_is_no_proof() -> None:
    objectives, limited, _ = _drawn(3, 40, 12, 3)
    bounds = np.array([sum(one[:, column].mean() for one in limited) for column in range(3)]) * 0.6
    with pytest.raises(PlanError, match="not shown"):
        solve(Problem(objectives, limited, bounds), seconds=1e-6)
