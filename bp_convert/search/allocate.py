"""The choice over the whole model at once: the least error within the limits.

A layer of squared relative error e keeps ``1 - e`` of its signal's energy, and what the model keeps
is taken as the product over its layers, each to the power of its sensitivity. The objective is
minus its logarithm. Where errors are small that is their weighted sum: they add up like independent
noise (Zhou, Moosavi-Dezfooli, Cheung and Frossard, Adaptive Quantization for Deep Neural Network,
AAAI 2018, section 3); a layer of which nothing is left costs all. With a price on what is limited
every layer chooses for itself (Everett, 1963), but for as many layers as there are limits; a linear
programme finds the prices, and what is left of a limit is then spent greedily. One limit on few
layers is spent exactly. Where the linear programme's solution cannot be rounded to a choice that
keeps all limits, an integer programme finds one, or says that there is none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from bp_convert.programmes.exact import Problem, in_the_way, relaxed, solve
from bp_convert.programmes.knapsack import knapsack
from bp_convert.search.units import COSTS, Unit

ERROR = "error"
MOVES = 2000
FULL = 0.998  # share of a limit above which two options at once are not tried
PAIRS = 12  # exchanges of two options
NEAR = 160  # options of a unit that take part in those, the nearest in what they take
UNITS = 24  # the units that take part: with more, single exchanges are fine enough
FEW = 16  # units up to which one limit is spent by dynamic programming
LEAST = 1e-4  # of a signal's energy: less counts as this


class OutOfReachError(Exception):
    """No choice keeps a limit.

    Attributes:
        quantity: which.
        least: the least that it can be while the other limits are kept.
    """

    def __init__(self, quantity: str, least: float) -> None:
        super().__init__(quantity, least)
        self.quantity = quantity
        self.least = least


@dataclass
class _Move:
    """An exchange of one unit's option: its gain for what it takes, to where, and what it takes."""

    value: float
    place: int
    takes: np.ndarray  # (limits,)


def allocate(
    units: Sequence[Unit], limits: Mapping[str, float], *, exact: bool = True
) -> list[int]:
    """Return the option of each unit; all limits are kept.

    Args:
        limits: of the sums over units of ``COSTS`` and of the squared error, ``error``. The
            objective is the squared error, or the parameters where the error is limited.
        exact: where nothing is found quickly, make sure that there is nothing. Without it a
            choice may be missed.

    Raises:
        OutOfReachError: a limit that nothing keeps.
    """
    names = list(limits)
    objective = "params" if ERROR in limits else ERROR
    problem = Problem(
        [quantity(unit, objective) for unit in units],
        [_columns(unit, names) for unit in units],
        np.array([limits[name] for name in names]),
    )
    bounds = problem.bounds
    least = np.sum([one.min(0) for one in problem.limited], axis=0) if units else 0 * bounds
    beyond = np.flatnonzero(least > bounds + problem.slack)
    if len(beyond):
        raise _out_of_reach(problem, names, int(beyond[0]), exact=exact)
    if not names or not units:
        return [int(one.argmin()) for one in problem.objectives]
    choice = relaxed(problem)
    if choice is None and (exact or len(names) == 1):
        choice = solve(problem)
    if choice is None:
        raise _out_of_reach(problem, names, 0, exact=exact)
    choice = _spend(problem, choice)
    for _ in range(PAIRS):
        if (problem.sums(choice) / problem.scale).max() >= FULL:
            break
        better = _exchange(problem, choice)
        if better is None:
            break
        choice = _spend(problem, better)
    if len(names) == 1 and len(units) <= FEW:
        takes = [one[:, 0] for one in problem.limited]
        best = knapsack(problem.objectives, takes, bounds[0])
        if best is not None and problem.keeps(best) and problem.total(best) < problem.total(choice):
            choice = _spend(problem, best)
    return choice


def quantity(unit: Unit, name: str) -> np.ndarray:
    """Return what each option of a unit adds to a quantity."""
    if name == ERROR:
        return loss(unit.errors) * unit.sensitivity
    found: np.ndarray = unit.costs[:, COSTS.index(name)]
    return found


def loss(errors: np.ndarray | float) -> np.ndarray:
    """Return ``-log(1 - e)`` of squared relative errors, bounded where nothing is left."""
    found: np.ndarray = -np.log(np.maximum(1.0 - np.asarray(errors, dtype=np.float64), LEAST))
    return found


def squared_error(total: float) -> float:
    """Return the squared relative error that losses of this sum stand for."""
    return float(1.0 - np.exp(-total))


def _columns(unit: Unit, names: Sequence[str]) -> np.ndarray:
    limited = [quantity(unit, name) for name in names]
    return np.array(limited).reshape(len(names), len(unit.errors)).T


def _out_of_reach(
    problem: Problem, names: Sequence[str], first: int, *, exact: bool
) -> OutOfReachError:
    if exact:
        column, least = in_the_way(problem, first)
    else:
        column, least = first, float(sum(one[:, first].min() for one in problem.limited))
    return OutOfReachError(names[column], least)


def _spend(problem: Problem, choice: list[int]) -> list[int]:
    """Take the exchange of one option that gains most for what it takes, until none fits."""
    choice = list(choice)
    slack = problem.slack
    room = problem.bounds - problem.sums(choice)
    best: list[_Move | None] = [None] * len(choice)
    stale = list(range(len(choice)))
    for _ in range(MOVES):
        for index in stale:
            best[index] = _best_move(problem, index, choice[index], room + slack)
        moves = [(one.value, -index) for index, one in enumerate(best) if one is not None]
        if not moves:
            break
        index = -max(moves)[1]
        move = best[index]
        assert move is not None
        choice[index] = move.place
        room = room - move.takes
        # While room only shrinks, a best move stays the best for as long as it fits.
        grown = bool((move.takes < 0).any())
        stale = [
            other
            for other, one in enumerate(best)
            if grown or other == index or (one and (one.takes > room + slack).any())
        ]
    return choice


def _best_move(problem: Problem, index: int, at: int, room: np.ndarray) -> _Move | None:
    """Return the exchange of one unit's option that gains most for what it takes, if any fits."""
    objective, limited = problem.objectives[index], problem.limited[index]
    gain = objective[at] - objective
    takes = limited - limited[at]
    fits = (takes <= room).all(1) & (gain > 0)
    if not fits.any():
        return None
    weight = np.maximum(takes / problem.scale, 0).max(1) + 1e-9
    value = np.where(fits, gain / weight, 0.0)
    place = int(value.argmax())
    return _Move(float(value[place]), place, takes[place])


def _exchange(problem: Problem, choice: Sequence[int]) -> list[int] | None:
    """Return the choice with two units' options exchanged at once for the largest gain, or None:
    one gives what the other takes, where neither alone fits."""
    room = problem.bounds - problem.sums(choice) + problem.slack
    moves = []
    for objective, limited, at in zip(problem.objectives, problem.limited, choice, strict=True):
        takes = limited - limited[at]  # (options, limits)
        near = np.argsort(np.abs(takes / problem.scale).max(1), kind="stable")[:NEAR]
        moves.append((near, takes[near], objective[at] - objective[near]))
    widest = sorted(range(len(moves)), key=lambda i: -float(np.ptp(moves[i][2])))[:UNITS]
    best, found = 0.0, None
    for place, one in enumerate(sorted(widest)):
        for two in sorted(widest)[place + 1 :]:
            gain = moves[one][2][:, None] + moves[two][2][None]  # (options, options)
            takes = moves[one][1][:, None] + moves[two][1][None]
            gain = np.where((takes <= room).all(2), gain, 0.0)
            top = int(gain.argmax())
            if gain.flat[top] > best * (1 + 1e-9) + 1e-15:
                best = float(gain.flat[top])
                found = (one, two, *divmod(top, gain.shape[1]))
    if found is None:
        return None
    one, two, first, second = found
    changed = list(choice)
    changed[one] = int(moves[one][0][first])
    changed[two] = int(moves[two][0][second])
    return changed
