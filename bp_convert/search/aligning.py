"""Numbers of terms brought to multiples that the machine computes faster on, where nearly free.

The inner width of a layer of low rank is its number of terms. Where ``bp-convert tune`` has seen
that widths of such multiples are faster, the larger ones are rounded down to them, and what is left
over goes to those that gain most by the next multiple.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from bp_convert.prices import ALIGNED, current
from bp_convert.search.allocate import ERROR, quantity
from bp_convert.search.pace import Choice
from bp_convert.search.units import COSTS

LEAST = 4  # multiples: fewer terms are too coarse a grid


def align(choice: Choice, limits: Mapping[str, float], worth: float) -> set[int]:
    """Bring a choice's numbers of terms to multiples; return the units that are there then.

    The choice stays as it is where the loss would grow beyond ``worth`` times.

    Args:
        limits: that are kept.
    """
    step = int(current().get(ALIGNED, {}).get("step", 0))
    if not step or not limits or ERROR in limits:
        return set()
    tried = Choice(choice.units, list(choice.at))
    free: set[int] = set()
    for place, (unit, at) in enumerate(zip(choice.units, choice.at, strict=True)):
        spec = unit.spec(at)
        low_rank = spec is not None and spec.out[1] == spec.inp[0] == 1 and not spec.axes
        if not low_rank or unit.picked[at, 1] < LEAST * step:
            continue
        curve, terms = map(int, unit.picked[at])
        below = unit.add(curve, np.array([terms - terms % step]))
        if unit.costs[below, 0] >= unit.layer.floor * unit.matrices * unit.size:
            tried.at[place] = below
            free.add(place)
    _spend(tried, set(free), limits, step)
    if tried.sum(ERROR) > worth * choice.sum(ERROR):
        return set()
    choice.at = tried.at
    return free


def _spend(tried: Choice, free: set[int], limits: Mapping[str, float], step: int) -> None:
    """Give one more multiple to those who gain most by it for what it takes, while it fits."""
    columns = [COSTS.index(name) for name in limits]
    bounds = np.array(list(limits.values()))
    room = bounds - np.array([tried.sum(name) for name in limits])
    moves = []
    for place in sorted(free):
        unit, at = tried.units[place], tried.at[place]
        curve, terms = map(int, unit.picked[at])
        if terms + step >= len(unit.curves[curve].errors):
            continue
        above = unit.add(curve, np.array([terms + step]))
        takes = unit.costs[above, columns] - unit.costs[at, columns]
        losses = quantity(unit, ERROR)
        share = float((takes / np.maximum(np.abs(bounds), 1e-12)).max())
        moves.append((float(losses[at] - losses[above]) / max(share, 1e-12), place, above, takes))
    for gain, place, above, takes in sorted(moves, key=lambda one: (-one[0], one[1])):
        if gain > 0 and (takes <= room).all():
            tried.at[place] = above
            room = room - takes
