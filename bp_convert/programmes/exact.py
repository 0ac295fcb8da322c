"""The choice over limits as a programme: relaxed and rounded, or exact where that finds nothing.

One option of each unit, the least objective, within all limits. Without whole numbers it is a
linear programme, at whose solution no more units than there are limits take part of several
options; with them it is solved by branch and bound (HiGHS: Huangfu and Hall, Mathematical
Programming Computation, 2018; through scipy).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np

from bp_convert.errors import PlanError

KEPT = 1e-12  # of a limit, what a sum may be above it by rounding
SECONDS = 120.0  # for one programme
GAP = 1e-3  # relative, within which an objective is good enough
SCALE = 1e3  # of a limit in the programme: HiGHS takes it as kept within 1e-6
TIMED_OUT = 1  # milp's status
AGAIN = 20  # solutions that keep a limit in HiGHS's eyes only, after which it is given up
TIGHTER = 10  # times that limits are drawn in, where the rounded choice goes beyond them
SOME = 1e-7  # of a unit, what an option has at least to count as taken
MOST = 512  # ways of rounding that are tried
BETTER = 1e-9  # of the largest objective, what an option has to bring to be looked at


@dataclass(frozen=True)
class Problem:
    """The options of each unit, and the limits.

    Attributes:
        objectives: (options,) for each unit, to be made least in sum.
        limited: (options, limits) for each unit, what they take of the limits.
        bounds: (limits,).
    """

    objectives: Sequence[np.ndarray]
    limited: Sequence[np.ndarray]
    bounds: np.ndarray

    @property
    def slack(self) -> np.ndarray:
        """What a sum may be above each limit by rounding."""
        found: np.ndarray = KEPT * np.abs(self.bounds)
        return found

    @property
    def scale(self) -> np.ndarray:
        """The limits as what things are measured by, also where a limit is nothing."""
        found: np.ndarray = np.maximum(np.abs(self.bounds), 1e-12)
        return found

    def sums(self, choice: Sequence[int] | np.ndarray) -> np.ndarray:
        """Return what a choice takes of each limit."""
        taken = [one[at] for one, at in zip(self.limited, choice, strict=True)]
        found: np.ndarray = np.sum(taken, axis=0)
        return found

    def total(self, choice: Sequence[int] | np.ndarray) -> float:
        """Return the objective of a choice."""
        return sum(float(one[at]) for one, at in zip(self.objectives, choice, strict=True))

    def keeps(self, choice: Sequence[int] | np.ndarray) -> bool:
        """Return whether a choice keeps all limits."""
        return bool((self.sums(choice) <= self.bounds + self.slack).all())

    def at(self, places: Sequence[np.ndarray]) -> Problem:
        """Return the problem with some options of each unit only."""
        objectives = [one[at] for one, at in zip(self.objectives, places, strict=True)]
        limited = [takes[at] for takes, at in zip(self.limited, places, strict=True)]
        return Problem(objectives, limited, self.bounds)


def solve(problem: Problem, *, gap: float = GAP, seconds: float = SECONDS) -> list[int] | None:
    """Return the option of each unit, or None where no choice keeps all limits.

    Options that no choice can take, and those that another beats in everything, are left out
    beforehand. What is returned is checked against the limits as they were given.

    Args:
        gap: how far above the least the objective may be, relatively.
        seconds: after which it ends.

    Raises:
        PlanError: none was found in time, and none ruled out.
    """
    places = _possible(problem)
    if places is None:
        return None
    left = problem.at(places)
    best = [front(np.column_stack(one)) for one in zip(left.objectives, left.limited, strict=True)]
    places = [at[kept] for at, kept in zip(places, best, strict=True)]
    left = problem.at(places)
    banned: list[np.ndarray] = []
    for _ in range(AGAIN):
        shares = _whole(left, banned, gap, seconds)
        if shares is None:
            return None
        found = np.array([int(one.argmax()) for one in shares])
        if left.keeps(found):
            return _among(places, found)
        banned.append(found)
    raise _undecided(f"{AGAIN} choices that keep the targets but for rounding, and no other")


def relaxed(problem: Problem) -> list[int] | None:
    """Return a choice near the least objective, quickly: units that the linear programme leaves
    between options take those that fit together best. None where no rounding keeps all limits."""
    tighter = problem.bounds.astype(np.float64)
    for step in range(TIGHTER):
        drawn = replace(problem, bounds=tighter)
        places = _possible(drawn)
        if places is None:
            return None
        shares = shares_of(drawn.at(places))
        if shares is None:
            return None
        left = problem.at(places)
        found = _rounded(left, shares)
        if left.keeps(found):
            return _among(places, found)
        tighter = tighter - 2.0**step * np.maximum(left.sums(found) - problem.bounds, 0)
    return None


def _among(places: Sequence[np.ndarray], found: np.ndarray) -> list[int]:
    """Return a choice of what was left of the options as one of all."""
    return [int(at[one]) for at, one in zip(places, found, strict=True)]


def _rounded(left: Problem, shares: Sequence[np.ndarray]) -> np.ndarray:
    """Return whole options for shares of options: those of the least objective within the limits,
    or what goes the least beyond them."""
    found = np.array([int(one.argmax()) for one in shares])
    taken = [np.flatnonzero(one > SOME) for one in shares]
    split = [unit for unit, at in enumerate(taken) if len(at) > 1]
    best: tuple[float, float] | None = None
    for _, options in zip(range(MOST), product(*(taken[unit] for unit in split)), strict=False):
        tried = found.copy()
        tried[split] = options
        beyond = float(((left.sums(tried) - left.bounds) / left.scale).max())
        rank = (max(0.0, beyond - KEPT), left.total(tried))
        if best is None or rank < best:
            best, chosen = rank, tried
    return chosen


def in_the_way(problem: Problem, first: int) -> tuple[int, float]:
    """Return which of limits that no choice keeps is in the way, and the least that it can be:
    one without which the others can be kept, or else one that not even some of them leave room
    for. ``first`` is returned where it is as good as another."""
    if not problem.limited:
        return first, 0.0
    columns = sorted(range(len(problem.bounds)), key=lambda one: one != first)
    for column in columns:
        found = _lowest(problem, column, [one for one in columns if one != column])
        if found is not None:
            return column, found
    kept: list[int] = []
    for column in reversed(columns):
        found = _lowest(problem, column, kept)
        if found is None or found > problem.bounds[column]:
            break
        kept.append(column)
    alone = float(sum(one[:, column].min() for one in problem.limited))
    return column, alone if found is None else found


def _lowest(problem: Problem, column: int, kept: Sequence[int]) -> float | None:
    """Return the least sum of a column while some limits are kept; None where they cannot be."""
    least = Problem(
        [one[:, column] for one in problem.limited],
        [one[:, list(kept)] for one in problem.limited],
        problem.bounds[list(kept)],
    )
    try:
        choice = solve(least)
    except PlanError:  # this is for words only
        return None
    return None if choice is None else least.total(choice)


def _possible(problem: Problem) -> list[np.ndarray] | None:
    """Return each unit's options that fit in where all others take their least; None where some
    unit has none."""
    places = [np.arange(len(takes)) for takes in problem.limited]
    while True:
        left = problem.at(places)
        least = np.array([takes.min(0) for takes in left.limited])
        room = problem.bounds + problem.slack - least.sum(0)
        kept = [
            at[(takes - own <= room).all(1)]
            for takes, at, own in zip(left.limited, places, least, strict=True)
        ]
        if any(not len(at) for at in kept):
            return None
        if all(len(one) == len(at) for one, at in zip(kept, places, strict=True)):
            return places
        places = kept


def front(table: np.ndarray) -> np.ndarray:
    """Return the rows that no other is at most as large as in every column."""
    order = np.lexsort(table.T[::-1])
    rows = table[order]
    kept: list[int] = []
    for at, row in enumerate(rows):
        if not (rows[kept] <= row).all(1).any():
            kept.append(at)
    return np.sort(order[kept])


@dataclass(frozen=True)
class _Scaled:
    """A problem as HiGHS gets it: what options take beyond each unit's least, of the room there is.

    Attributes:
        objective: (options) of all units.
        takes: (options, limits).
        starts: of each unit's options, and their end.
    """

    objective: np.ndarray
    takes: np.ndarray
    starts: np.ndarray

    @classmethod
    def of(cls, left: Problem) -> _Scaled:
        """Scale a problem."""
        starts = np.concatenate([[0], np.cumsum([len(one) for one in left.objectives])])
        least = np.array([takes.min(0) for takes in left.limited])
        room = left.bounds - least.sum(0)
        takes = np.concatenate([one - own for one, own in zip(left.limited, least, strict=True)])
        bound = room > 0  # where there is no room, only options that take none are left
        objective = np.concatenate([one - one.min() for one in left.objectives])
        top = float(objective.max())
        return cls(
            objective / top if top > 0 else objective, takes[:, bound] / room[bound] * SCALE, starts
        )

    @property
    def units(self) -> int:
        return len(self.starts) - 1

    @property
    def unit(self) -> np.ndarray:
        """Which unit each option is of."""
        return np.repeat(np.arange(self.units), np.diff(self.starts))

    def of_units(self) -> Any:
        """Return which unit each option is of, as a sparse matrix (units, options)."""
        from scipy.sparse import csr_matrix

        count = len(self.objective)
        return csr_matrix((np.ones(count), (self.unit, np.arange(count))), (self.units, count))

    def apart(self, shares: np.ndarray) -> list[np.ndarray]:
        """Return what stands for each option by unit."""
        return list(np.split(shares, self.starts[1:-1]))


def shares_of(left: Problem) -> list[np.ndarray] | None:
    """Solve the linear programme; return the share of each option, by unit.

    Few options of each unit are looked at, and those come in that would be better at the prices
    which the limits have then (column generation: Dantzig and Wolfe, 1960), until none would.
    """
    from scipy.optimize import linprog

    whole = _Scaled.of(left)
    of_units = whole.of_units().tocsc()
    unit = whole.unit
    columns = np.column_stack([whole.objective, whole.takes, whole.takes.sum(1)])
    firsts = [
        start + columns[start:end].argmin(0)
        for start, end in zip(whole.starts[:-1], whole.starts[1:], strict=True)
    ]
    among = np.unique(np.concatenate(firsts))
    limits = np.full(whole.takes.shape[1], SCALE)
    while True:
        with _quiet():
            result = linprog(
                whole.objective[among],
                A_ub=whole.takes[among].T if len(limits) else None,
                b_ub=limits if len(limits) else None,
                A_eq=of_units[:, among],
                b_eq=np.ones(whole.units),
                method="highs",
            )
        if result.x is None or result.status != 0:
            if len(among) == len(whole.objective):
                return None
            among = np.arange(len(whole.objective))  # few were not enough to keep the limits
            continue
        cost = whole.objective - result.eqlin.marginals[unit]
        if len(limits):
            cost = cost - whole.takes @ result.ineqlin.marginals
        best = [
            start + int(cost[start:end].argmin())
            for start, end in zip(whole.starts[:-1], whole.starts[1:], strict=True)
        ]
        more = [at for at in best if cost[at] < -BETTER]
        grown = np.union1d(among, more)
        if len(grown) == len(among):
            shares = np.zeros(len(whole.objective))
            shares[among] = result.x
            return whole.apart(shares)
        among = grown.astype(np.int64)


def _whole(
    left: Problem, banned: Sequence[np.ndarray], gap: float, seconds: float
) -> list[np.ndarray] | None:
    """Solve the programme in whole numbers; return the share of each option, by unit.

    Args:
        banned: choices that are not to come back.
    """
    # Half a second to import, and seldom needed.
    from scipy.optimize import Bounds, LinearConstraint, milp

    scaled = _Scaled.of(left)
    count, limits = scaled.takes.shape
    constraints = [LinearConstraint(scaled.of_units(), 1, 1)]
    if limits:
        constraints.append(LinearConstraint(scaled.takes.T, -np.inf, np.full(limits, SCALE)))
    for choice in banned:
        row = np.zeros((1, count))
        row[0, scaled.starts[:-1] + choice] = 1
        constraints.append(LinearConstraint(row, -np.inf, scaled.units - 1))
    with _quiet():
        result = milp(
            scaled.objective,
            constraints=constraints,
            integrality=np.ones(count),
            bounds=Bounds(0, 1),
            options={"mip_rel_gap": gap, "time_limit": seconds},
        )
    if result.x is None:
        if result.status == TIMED_OUT:
            raise _undecided(f"no choice that keeps all of them in {seconds:g} seconds")
        return None
    return scaled.apart(result.x)


def _undecided(found: str) -> PlanError:
    return PlanError(
        where="the targets together",
        found=f"{found}; that there is none was not shown either",
        allowed="targets that leave some room",
        fix="raise one of the targets a little",
    )


@contextmanager
def _quiet() -> Iterator[None]:
    """Send what HiGHS prints past its options to standard error: standard output is for results."""
    try:
        sys.stdout.flush()
        kept = os.dup(1)
        os.dup2(2, 1)
    except (OSError, ValueError, AttributeError):  # there is none
        yield
        return
    try:
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
