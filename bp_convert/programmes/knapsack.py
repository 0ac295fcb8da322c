"""One limit, few layers: the best choice by dynamic programming.

The multiple-choice knapsack problem (Kellerer, Pferschy and Pisinger, Knapsack Problems, 2004,
chapter 11): one option of each unit, the least objective, within one limit.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from bp_convert.programmes.exact import front

BINS = 20_000  # of the limit; what an option takes is rounded up to whole ones


def knapsack(
    objectives: Sequence[np.ndarray], takes: Sequence[np.ndarray], bound: float
) -> list[int] | None:
    """Return the option of each unit, or None where the rounding leaves no choice.

    Args:
        objectives: (options,) for each unit, to be made least in sum.
        takes: (options,) for each unit, what they take of ``bound``; below zero counts as zero.
    """
    if not bound > 0:
        return None
    bins = BINS
    if 1 <= bound <= BINS and all((one == np.floor(one)).all() for one in takes):
        bins = int(bound)  # a small limit of whole parameters is kept exactly
    best = np.zeros(bins + 1)  # the least objective within 0, 1, ... bins
    chosen: list[np.ndarray] = []
    costs = [np.ceil(np.maximum(one, 0.0) / bound * bins - 1e-6).astype(int) for one in takes]
    for objective, cost in zip(objectives, costs, strict=True):
        new, which = np.full(bins + 1, np.inf), np.full(bins + 1, -1)
        for option in front(np.column_stack([objective, cost])):
            room = cost[option]
            if room > bins:
                continue
            tried = best[: bins + 1 - room] + objective[option]
            better = tried < new[room:]
            new[room:][better] = tried[better]
            which[room:][better] = option
        best = new
        chosen.append(which)
    if not np.isfinite(best[-1]):
        return None
    found: list[int] = []
    at = bins
    for cost, which in zip(reversed(costs), reversed(chosen), strict=True):
        found.append(int(which[at]))
        at -= int(cost[found[-1]])
    return found[::-1]
