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
from itertools import product

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


def solve(
    objectives: Sequence[np.ndarray],
    limited: Sequence[np.ndarray],
    bounds: np.ndarray,
    *,
    gap: float = GAP,
    seconds: float = SECONDS,
) -> list[int] | None:
    """Return the option of each unit, or None where no choice keeps all limits.

    Options that no choice can take, and those that another beats in everything, are left out
    beforehand. What is returned is checked against the limits as they were given.

    Args:
        objectives: (options,) for each unit, to be made least in sum.
        limited: (options, limits) for each unit, what they take of the limits.
        bounds: (limits,).
        gap: how far above the least the objective may be, relatively.
        seconds: after which it ends.

    Raises:
        PlanError: none was found in time, and none ruled out.
    """
    slack = KEPT * np.abs(bounds)
    places = _possible(limited, bounds + slack)
    if places is None:
        return None
    places = [
        at[_front(np.column_stack([one[at], takes[at]]))]
        for one, takes, at in zip(objectives, limited, places, strict=True)
    ]
    left = _Left(objectives, limited, places)
    banned: list[np.ndarray] = []
    for _ in range(AGAIN):
        shares = _programme(left, bounds, banned, gap, seconds)
        if shares is None:
            return None
        found = np.array([int(one.argmax()) for one in shares])
        if (left.sums(found) <= bounds + slack).all():
            return left.choice(found)
        banned.append(found)
    raise _undecided(f"{AGAIN} choices that keep the targets but for rounding, and no other")


def relaxed(
    objectives: Sequence[np.ndarray], limited: Sequence[np.ndarray], bounds: np.ndarray
) -> list[int] | None:
    """Return a choice near the least objective, quickly: units that the linear programme leaves
    between options take those that fit together best. None where no rounding keeps all limits.

    Args: as ``solve``.
    """
    slack = KEPT * np.abs(bounds)
    held = bounds.astype(np.float64)
    for step in range(TIGHTER):
        places = _possible(limited, held + slack)
        if places is None:
            return None
        left = _Left(objectives, limited, places)
        shares = _programme(left, held)
        if shares is None:
            return None
        found, over = _rounded(left, shares, bounds)
        if (over <= slack).all():
            return left.choice(found)
        held = held - 2.0**step * np.maximum(over, 0)
    return None


def _rounded(
    left: _Left, shares: Sequence[np.ndarray], bounds: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return whole options for shares of options, and how far they go beyond each limit: the
    least objective within the limits, or what goes the least beyond them."""
    found = np.array([int(one.argmax()) for one in shares])
    taken = [np.flatnonzero(one > SOME) for one in shares]
    split = [unit for unit, at in enumerate(taken) if len(at) > 1]
    scale = np.maximum(np.abs(bounds), 1e-300)
    best: tuple[float, float] | None = None
    for _, options in zip(range(MOST), product(*(taken[unit] for unit in split)), strict=False):
        tried = found.copy()
        tried[split] = options
        beyond = float(((left.sums(tried) - bounds) / scale).max())
        value = sum(
            float(left.objectives[unit][at]) for unit, at in zip(split, options, strict=True)
        )
        rank = (max(0.0, beyond - KEPT), value)
        if best is None or rank < best:
            best, chosen = rank, tried
    return chosen, left.sums(chosen) - bounds


def in_the_way(limited: Sequence[np.ndarray], bounds: np.ndarray, first: int) -> tuple[int, float]:
    """Return which of limits that no choice keeps is in the way, and the least that it can be:
    one without which the others can be kept, or else one that not even some of them leave room
    for. ``first`` is returned where it is as good as another."""
    if not limited:
        return first, 0.0
    columns = sorted(range(len(bounds)), key=lambda one: one != first)
    for column in columns:
        found = _lowest(limited, bounds, column, [one for one in columns if one != column])
        if found is not None:
            return column, found
    kept: list[int] = []
    for column in reversed(columns):
        found = _lowest(limited, bounds, column, kept)
        if found is None or found > bounds[column]:
            break
        kept.append(column)
    alone = float(sum(one[:, column].min() for one in limited))
    return column, alone if found is None else found


def _lowest(
    limited: Sequence[np.ndarray], bounds: np.ndarray, column: int, kept: Sequence[int]
) -> float | None:
    """Return the least sum of a column while some limits are kept; None where they cannot be."""
    try:
        choice = solve(
            [one[:, column] for one in limited],
            [one[:, list(kept)] for one in limited],
            bounds[list(kept)],
        )
    except PlanError:  # this is for words only
        return None
    if choice is None:
        return None
    return float(sum(one[at, column] for one, at in zip(limited, choice, strict=True)))


def _possible(limited: Sequence[np.ndarray], bounds: np.ndarray) -> list[np.ndarray] | None:
    """Return each unit's options that fit in where all others take their least; None where some
    unit has none."""
    places = [np.arange(len(takes)) for takes in limited]
    while True:
        least = np.array([takes[at].min(0) for takes, at in zip(limited, places, strict=True)])
        room = bounds - least.sum(0)
        kept = [
            at[(takes[at] - own <= room).all(1)]
            for takes, at, own in zip(limited, places, least, strict=True)
        ]
        if any(not len(at) for at in kept):
            return None
        if all(len(one) == len(at) for one, at in zip(kept, places, strict=True)):
            return places
        places = kept


def _front(table: np.ndarray) -> np.ndarray:
    """Return the rows that no other is at most as large as in every column."""
    order = np.lexsort(table.T[::-1])
    rows = table[order]
    kept: list[int] = []
    for at, row in enumerate(rows):
        if not (rows[kept] <= row).all(1).any():
            kept.append(at)
    return np.sort(order[kept])


class _Left:
    """The options that are left of each unit, and where they stand among all."""

    def __init__(
        self,
        objectives: Sequence[np.ndarray],
        limited: Sequence[np.ndarray],
        places: Sequence[np.ndarray],
    ) -> None:
        self.objectives = [one[at] for one, at in zip(objectives, places, strict=True)]
        self.limited = [takes[at] for takes, at in zip(limited, places, strict=True)]
        self.places = places

    def sums(self, found: Sequence[int] | np.ndarray) -> np.ndarray:
        """Return what a choice takes of each limit."""
        total: np.ndarray = np.sum(
            [takes[at] for takes, at in zip(self.limited, found, strict=True)], axis=0
        )
        return total

    def choice(self, found: Sequence[int] | np.ndarray) -> list[int]:
        """Return a choice of what is left as one among all options."""
        return [int(at[one]) for at, one in zip(self.places, found, strict=True)]


def _programme(
    left: _Left,
    bounds: np.ndarray,
    banned: Sequence[np.ndarray] = (),
    gap: float | None = None,
    seconds: float = SECONDS,
) -> list[np.ndarray] | None:
    """Solve it as HiGHS sees it; return the share of each option, by unit.

    Args:
        banned: choices that are not to come back.
        gap: of whole numbers; None leaves them out.
    """
    objectives, limited = left.objectives, left.limited
    # Half a second to import, and seldom needed.
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import csr_matrix

    sizes = [len(one) for one in objectives]
    starts = np.concatenate([[0], np.cumsum(sizes)])
    count, units = int(starts[-1]), len(sizes)
    least = np.array([takes.min(0) for takes in limited])
    room = bounds - least.sum(0)
    takes = np.concatenate([one - own for one, own in zip(limited, least, strict=True)])
    bound = room > 0  # where there is no room, only options that take none are left
    objective = np.concatenate([one - one.min() for one in objectives])
    top = float(objective.max())
    of_unit = csr_matrix(
        (np.ones(count), (np.repeat(np.arange(units), sizes), np.arange(count))), (units, count)
    )
    constraints = [LinearConstraint(of_unit, 1, 1)]
    if bound.any():
        rows = (takes[:, bound] / room[bound] * SCALE).T
        constraints.append(LinearConstraint(rows, -np.inf, np.full(len(rows), SCALE)))
    for choice in banned:
        row = np.zeros((1, count))
        row[0, starts[:-1] + choice] = 1
        constraints.append(LinearConstraint(row, -np.inf, units - 1))
    with _quiet():
        result = milp(
            objective / top if top > 0 else objective,
            constraints=constraints,
            integrality=np.full(count, int(gap is not None)),
            bounds=Bounds(0, 1),
            options={"mip_rel_gap": gap or 0.0, "time_limit": seconds},
        )
    if result.x is None:
        if result.status == TIMED_OUT:
            raise _undecided(f"no choice that keeps all of them in {seconds:g} seconds")
        return None
    return list(np.split(result.x, starts[1:-1]))


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
