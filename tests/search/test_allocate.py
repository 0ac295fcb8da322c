"""The choice over all units against every combination of their options."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise, product

import numpy as np
import pytest

from bp_convert.search.allocate import OutOfReachError, allocate, quantity
from bp_convert.search.units import Unit
from tests.search.units import drawn, made_up


def _total(units: Sequence[Unit], choice: Sequence[int], name: str) -> float:
    return float(sum(quantity(unit, name)[at] for unit, at in zip(units, choice, strict=True)))


def _best(units: Sequence[Unit], limits: dict[str, float]) -> float | None:
    """Return the least objective that keeps all limits, by trying all there are."""
    objective = "params" if "error" in limits else "error"
    found = [
        _total(units, choice, objective)
        for choice in product(*(range(len(unit.errors)) for unit in units))
        if all(_total(units, choice, name) <= bound * (1 + 1e-9) for name, bound in limits.items())
    ]
    return min(found, default=None)


def _largest_edge(units: Sequence[Unit], objective: str, limited: str) -> float:
    """Return the most that one vertex of a unit's lower convex hull is above the next: what
    prices, which see vertices only, may lose in one unit."""
    steps = [0.0]
    for unit in units:
        hull: list[tuple[float, float]] = []
        points = sorted(zip(quantity(unit, limited), quantity(unit, objective), strict=True))
        for x, y in points:
            if hull and y >= hull[-1][1]:
                continue
            while len(hull) > 1 and (hull[-1][1] - hull[-2][1]) * (x - hull[-2][0]) >= (
                y - hull[-2][1]
            ) * (hull[-1][0] - hull[-2][0]):
                hull.pop()
            hull.append((float(x), float(y)))
        steps += [one[1] - two[1] for one, two in pairwise(hull)]
    return max(steps)


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("limited", ["params", "error"])
def test_one_limit_is_met_as_well_as_by_trying_all(seed: int, limited: str) -> None:
    generator = np.random.default_rng(seed)
    units = [drawn(generator, 7, ()) for _ in range(2 + seed % 2)]
    most = sum(float(quantity(unit, limited).max()) for unit in units)
    least = sum(float(quantity(unit, limited).min()) for unit in units)
    for share in (0.0, 0.1, 0.3, 0.6, 0.9, 1.0):
        limits = {limited: least + share * (most - least)}
        choice = allocate(units, limits)
        best = _best(units, limits)
        assert best is not None
        assert _total(units, choice, limited) <= limits[limited] * (1 + 1e-9)
        objective = "error" if limited == "params" else "params"
        found = _total(units, choice, objective)
        assert found >= best * (1 - 1e-9)
        assert found <= best + _largest_edge(units, objective, limited) * (1 + 1e-9)


def test_few_units_and_one_limit_get_the_best_there_is() -> None:
    """The slack above is for error limits, and for parameters that are no whole numbers."""
    exact = tried = 0
    for seed in range(60):
        generator = np.random.default_rng(1000 + seed)
        units = [drawn(generator, 6, ()) for _ in range(3)]
        most = sum(float(quantity(unit, "params").max()) for unit in units)
        for share in (0.2, 0.4, 0.6, 0.8):
            limits = {"params": share * most}
            best = _best(units, limits)
            if best is None:
                continue
            tried += 1
            exact += _total(units, allocate(units, limits), "error") <= best * 1.02 + 1e-12
    assert tried > 150
    assert exact > 0.98 * tried


@pytest.mark.parametrize("seed", range(60))
def test_several_limits_are_all_kept(seed: int) -> None:
    generator = np.random.default_rng(seed)
    names = ("params", "macs", "time")
    units = [drawn(generator, 6, names[1:]) for _ in range(3)]
    limits = {
        name: float(generator.uniform(0.2, 0.9))
        * sum(float(quantity(unit, name).max()) for unit in units)
        for name in names
    }
    best = _best(units, limits)
    if best is None:
        with pytest.raises(OutOfReachError) as caught:
            allocate(units, limits)
        least = sum(float(quantity(unit, caught.value.quantity).min()) for unit in units)
        assert caught.value.least >= least * (1 - 1e-9)
        return
    choice = allocate(units, limits)
    for name, bound in limits.items():
        assert _total(units, choice, name) <= bound * (1 + 1e-11)
    assert _total(units, choice, "error") >= best * (1 - 1e-9)


@pytest.mark.slow
@pytest.mark.parametrize(
    "names", [("params", "macs", "time"), ("error", "macs"), ("error", "time")]
)
def test_what_can_be_kept_is_never_given_up(names: tuple[str, ...]) -> None:
    """Limits that pull against each other, on few options: the hard case."""
    kept = 0
    for seed in range(80):
        generator = np.random.default_rng(seed)
        units = [drawn(generator, 10, ("macs", "time")) for _ in range(3)]
        limits = {
            name: float(generator.uniform(0.2, 0.7))
            * sum(float(quantity(unit, name).max()) for unit in units)
            for name in names
        }
        best = _best(units, limits)
        if best is None:
            with pytest.raises(OutOfReachError):
                allocate(units, limits)
            continue
        choice = allocate(units, limits)
        kept += 1
        assert all(_total(units, choice, n) <= b * (1 + 1e-11) for n, b in limits.items())
        assert _total(units, choice, "params" if "error" in names else "error") >= best * 0.999999
    assert kept > 30


def test_without_a_limit_nothing_is_lost() -> None:
    units = [made_up([0, 0.1], params=[10, 1]), made_up([0.2, 0.0], params=[3, 5])]
    assert allocate(units, {}) == [0, 1]


def test_what_is_out_of_reach_is_said_with_the_least() -> None:
    units = [made_up([0, 0.5], params=[10, 4]), made_up([0, 0.5], params=[20, 7])]
    assert allocate(units, {"params": 11}) == [1, 1]
    with pytest.raises(OutOfReachError) as caught:
        allocate(units, {"params": 10.99})
    assert (caught.value.quantity, caught.value.least) == ("params", 11)
    units = [made_up([0.1, 0.5], params=[10, 4], macs=[1, 9])]
    with pytest.raises(OutOfReachError) as caught:
        allocate(units, {"error": 0.05})
    assert caught.value.least == pytest.approx(float(quantity(units[0], "error").min()))
    with pytest.raises(OutOfReachError):  # each alone, but not both
        allocate(units, {"params": 5, "macs": 5})


def test_the_more_sensitive_unit_gets_more() -> None:
    def unit(sensitivity: float) -> Unit:
        params = [float(n) for n in range(100, 0, -1)]
        errors = [(1 - p / 100) ** 2 for p in params]
        return made_up(errors, sensitivity=sensitivity, params=params)

    units = [unit(1), unit(4), unit(1)]
    left, middle, right = allocate(units, {"params": 150})
    spent = [float(u.costs[at, 0]) for u, at in zip(units, (left, middle, right), strict=True)]
    assert spent[1] > max(spent[0], spent[2])
    assert abs(spent[0] - spent[2]) <= 1
    assert sum(spent) == 150  # to the last number


def test_nothing_to_choose() -> None:
    """No unit at all is a budget of nothing."""
    assert allocate([made_up([0], params=[5])], {"params": 5}) == [0]
    assert allocate([], {"params": 0.0, "macs": 3.0}) == []
    for limits in ({"params": -1.0}, {"params": 2.0, "macs": -1.0}):
        with pytest.raises(OutOfReachError) as caught:
            allocate([], limits)
        assert (caught.value.quantity, caught.value.least) == (list(limits)[-1], 0)
