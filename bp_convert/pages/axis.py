"""What an axis of a picture measures, where values stand on it, and which of them are marked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil, floor, log10
from typing import TypeAlias

from bp_convert.render.numbers import rounded, ticks

ROOM = 8  # for marks on an axis
MANY = 20.0  # times nearer to the best than the worst: a linear axis shows these as one

Words: TypeAlias = Callable[[float], str]


@dataclass(frozen=True)
class Axis:
    """What an axis measures, and how.

    Attributes:
        label: the quantity and its unit.
        place: from a value to where it stands; growing.
        marks: round values between two places, with their words.
        holds: values that the axis shows besides those of the data.
    """

    label: str
    place: Callable[[float], float]
    marks: Callable[[float, float], Sequence[tuple[float, str]]]
    holds: tuple[float, ...] = ()


def linear(label: str, only: Sequence[float] = ()) -> Axis:
    """Return an axis of even steps.

    Args:
        only: values that are marked, if there are few; else round ones are.
    """

    def marks(low: float, high: float) -> list[tuple[float, str]]:
        found = only if 0 < len(only) <= 8 else ticks(low, high)
        return [(value, f"{value:.10g}") for value in found]

    return Axis(label, float, marks)


def logarithmic(
    label: str, words: Callable[[float], str] = rounded, holds: tuple[float, ...] = ()
) -> Axis:
    """Return an axis on which equal ratios are equally long."""

    def marks(low: float, high: float) -> list[tuple[float, str]]:
        return [(value, words(value)) for value in _decades(low, high)]

    return Axis(f"{label} (logarithmic)", log10, marks, holds)


def quality(label: str, values: Sequence[float], best: float | None) -> Axis:
    """Return the axis of a metric: finer towards the best where that tells values apart.

    Args:
        values: that will be drawn.
        best: the value that nothing surpasses; None where there is none.
    """
    gaps = sorted({abs(best - value) for value in values}) if best is not None else []
    far = [gap for gap in gaps if gap > 0]
    if best is None or not far or len(gaps) < 2:
        return linear(label)
    nearest = far[0] if gaps[0] > 0 else far[0] / 2  # the best itself stands at half the next gap
    if gaps[-1] < MANY * nearest:
        return linear(label)
    top, sign = best, -1 if best else 1

    def place(value: float) -> float:
        return sign * log10(max(abs(top - value), nearest))

    least = 1.5 * nearest if gaps[0] == 0 else nearest  # no number over the best's

    def marks(low: float, high: float) -> list[tuple[float, str]]:
        ends = sorted((sign * low, sign * high))
        found = _decades(max(ends[0], log10(least)), min(ends[1], log10(gaps[-1])))
        shown = (*(top + sign * gap for gap in found), *([top] if gaps[0] == 0 else []))
        return [(value, f"{value:.10g}") for value in shown]

    return Axis(f"{label}, finer towards {best:g}", place, marks)


def _decades(low: float, high: float) -> list[float]:
    """Return round numbers whose logarithms lie in a range, as many as there is room for."""
    found: list[float] = []
    for digits in ((1, 1.5, 2, 3, 4, 5, 6, 7, 8, 9), (1, 2, 5), (1,)):
        every = (d * 10.0**p for p in range(floor(low), ceil(high) + 1) for d in digits)
        found = [value for value in every if low <= log10(value) <= high]
        if len(found) <= ROOM:
            break
    return found
