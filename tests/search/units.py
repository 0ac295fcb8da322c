"""Units with options made up, for the tests of the choice."""

from __future__ import annotations

import numpy as np
from torch import nn

from bp_convert.graph.walk import walk
from bp_convert.search.units import COSTS, FreeLayer, Unit

LAYER = FreeLayer(walk(nn.Sequential(nn.Linear(1, 1)))[0], (1, 1), ((), ()), 1)


def made_up(errors: list[float], *, sensitivity: float = 1.0, **costs: list[float]) -> Unit:
    """Return a unit whose options have these errors and costs; costs not named are 0."""
    table = np.zeros((len(errors), len(COSTS)))
    for name, values in costs.items():
        table[:, COSTS.index(name)] = values
    return Unit(
        layer=LAYER,
        role="weight",
        matrices=1,
        shape=(1, 1),
        curves=[],
        sensitivity=sensitivity,
        dense=table[0],
        alone=True,
        picked=np.zeros((len(errors), 2), dtype=np.int64),
        costs=table,
        errors=np.array(errors, dtype=np.float64),
    )


def drawn(generator: np.random.Generator, options: int, names: tuple[str, ...]) -> Unit:
    """Return a unit whose errors fall as its costs rise, roughly."""
    params = np.sort(generator.uniform(1, 100, options))[::-1]
    errors = np.sort(generator.uniform(0, 1, options)) ** 2
    errors[0] = 0
    costs = {"params": params.tolist()}
    for name in names:
        costs[name] = (params * generator.uniform(0.3, 3, options)).tolist()
    return made_up(errors.tolist(), sensitivity=float(generator.uniform(0.1, 10)), **costs)
