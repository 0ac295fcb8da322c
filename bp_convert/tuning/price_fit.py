"""Prices fitted to times: of each thing that is counted, above 0, by least squares."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from bp_convert.prices import Counts, Prices

FAMILIES = {"Conv1d": "Conv", "Conv2d": "Conv", "Conv3d": "Conv"}  # have prices in common
SIDES = ("dense", "twin")


@dataclass(frozen=True)
class Sample:
    """A layer that was timed.

    Attributes:
        kind: the name that its prices go by.
        times: dense and converted, in microseconds.
        counts: what the times hang on, likewise; one object for both where the twin runs as the
            dense layer does.
        words: on it.
    """

    kind: str
    times: tuple[float, float]
    counts: tuple[Counts, Counts]
    words: str = ""

    @property
    def family(self) -> str:
        """Name of the kinds that have its prices."""
        return FAMILIES.get(self.kind, self.kind)

    @property
    def told_apart(self) -> bool:
        """Whether its twin has prices of its own."""
        return self.counts[0] is not self.counts[1]

    def told(self, prices: Prices) -> tuple[float, float]:
        """Return its times by some prices."""
        dense, twin = (
            sum(prices.get(f"{self.kind}.{side}", {}).get(n, 0.0) * c for n, c in counted.items())
            for side, counted in zip(SIDES, self.counts, strict=True)
        )
        return dense, twin


def prices(samples: Sequence[tuple[Mapping[str, float], float]]) -> Counts:
    """Fit a price above 0 to each thing that is counted, by least squares of relative errors.

    Args:
        samples: counts, and the time that they took together.
    """
    from scipy.optimize import nnls  # half a second to import

    names = sorted({name for counted, _ in samples for name in counted})
    table = np.array([[counted.get(n, 0.0) / taken for n in names] for counted, taken in samples])
    scale = np.linalg.norm(table, axis=0).clip(min=1e-30)
    found, _ = nnls(table / scale, np.ones(len(samples)))
    return {name: float(one) for name, one in zip(names, found / scale, strict=True) if one > 0}


def fit(samples: Sequence[Sample]) -> dict[str, Counts]:
    """Return the prices of every kind, dense and converted."""
    found: dict[str, Counts] = {}
    for family in dict.fromkeys(one.family for one in samples):
        mine = [one for one in samples if one.family == family]
        for side, name in enumerate(SIDES):
            rows = [
                (one.counts[side], one.times[side]) for one in mine if not side or one.told_apart
            ]
            members = [kind for kind, known in FAMILIES.items() if known == family] or [family]
            if rows:
                found.update({f"{member}.{name}": prices(rows) for member in members})
    return found


def scaled(known: Prices, samples: Sequence[Sample]) -> dict[str, Counts]:
    """Return known prices at the scale of the machine on which samples were timed."""
    ratios = [
        taken / told
        for one in samples
        for taken, told in zip(one.times, one.told(known), strict=True)
        if told > 0
    ]
    scale = median(ratios) if ratios else 1.0
    return {
        name: {what: scale * price for what, price in counted.items()}
        for name, counted in known.items()
    }


def off(known: Prices, samples: Sequence[Sample]) -> float:
    """Return the median relative difference between times taken and times by prices."""
    found = [
        abs(told / taken - 1)
        for one in samples
        if one.told_apart
        for taken, told in zip(one.times, one.told(known), strict=True)
    ]
    return median(found) if found else 0.0
