"""Pictures as values: what is drawn, and where each mark stands; and scores in pictures.

A value says what it shows; its properties are coordinates in the picture's own units, for the
template that draws it. One unit is about a pixel, so that letters keep their size on a narrow
screen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import isfinite
from typing import ClassVar, TypeAlias

from bp_convert.pages.axis import Axis, quality
from bp_convert.render.numbers import short
from bp_convert.render.words import is_share
from bp_convert.values.report import Score

COLOURS, SHAPES = 8, ("round", "square", "diamond", "triangle")
_CORNERS = {
    "square": ((-4, -4), (4, -4), (4, 4), (-4, 4)),
    "diamond": ((0, -6), (6, 0), (0, 6), (-6, 0)),
    "triangle": ((0, -6), (6, 5), (-6, 5)),
}
Places: TypeAlias = tuple[tuple[float, str], ...]


@dataclass(frozen=True, order=True)
class Dot:
    """One point: its values on both axes, the group that it belongs to, and its name."""

    x: float
    y: float
    group: str
    name: str

    @property
    def drawable(self) -> bool:
        """Whether it has a place: a perplexity may be infinite."""
        return isfinite(self.x) and isfinite(self.y)


@dataclass(frozen=True)
class Marker:
    """One drawn point: a circle, or a polygon where it has corners."""

    x: float
    y: float
    corners: str
    title: str


@dataclass(frozen=True)
class Series:
    """One drawn group; the path is empty where its points are not joined."""

    name: str
    colour: int
    shape: str
    path: str
    marks: tuple[Marker, ...]


@dataclass(frozen=True)
class Chart:
    """One metric over another, a colour for each group.

    Attributes:
        dots: at least one that is drawable.
        groups: all of the page, so that one has the same colour in every chart of it.
        joined: draw a line through the means of a group's points.
        level: a value of ``y`` to compare with, and its name.
    """

    form: ClassVar = "chart"
    size: ClassVar = (400, 280)
    left: ClassVar = 64
    right: ClassVar = 384
    top: ClassVar = 12
    bottom: ClassVar = 232

    title: str
    dots: tuple[Dot, ...]
    x: Axis
    y: Axis
    groups: tuple[str, ...]
    joined: bool = False
    level: tuple[float, str] | None = None

    @property
    def label(self) -> str:
        """What is shown, for those who do not see it."""
        return f"{self.y.label} over {self.x.label}"

    @property
    def varied(self) -> bool:
        """Whether the points stand at different places along the lower edge."""
        return len({dot.x for dot in self.dots}) > 1

    @property
    def x_ticks(self) -> Places:
        """Places and words along the lower edge."""
        marks = self.x.marks(*self._ends[:2])
        return tuple((self._across(value), words) for value, words in marks)

    @property
    def y_ticks(self) -> Places:
        """Places and words along the left edge."""
        marks = self.y.marks(*self._ends[2:])
        return tuple((self._down(value), words) for value, words in marks)

    @property
    def level_at(self) -> float | None:
        """Height of the line to compare with."""
        return self._down(self.level[0]) if self.level and isfinite(self.level[0]) else None

    @property
    def series(self) -> tuple[Series, ...]:
        """All groups that have points here."""
        found = []
        for number, group in enumerate(self.groups):
            mine = sorted(dot for dot in self.dots if dot.group == group and dot.drawable)
            if not mine:
                continue
            shape = SHAPES[number // COLOURS % len(SHAPES)]
            path = " ".join(f"{self._across(x)},{self._down(y)}" for x, y in _means(mine))
            found.append(
                Series(
                    name=group,
                    colour=number % COLOURS,
                    shape=shape,
                    path=path if self.joined else "",
                    marks=tuple(self._mark(dot, shape) for dot in mine),
                )
            )
        return tuple(found)

    def _mark(self, dot: Dot, shape: str) -> Marker:
        x, y = self._across(dot.x), self._down(dot.y)
        corners = " ".join(f"{x + dx:.1f},{y + dy:.1f}" for dx, dy in _CORNERS.get(shape, ()))
        return Marker(x, y, corners, f"{dot.name}: {dot.y:.4g}")

    @cached_property
    def _ends(self) -> tuple[float, float, float, float]:
        """Least and largest place on either axis, with an edge around all that is shown."""
        drawn = [dot for dot in self.dots if dot.drawable]
        level = [self.level[0]] if self.level and isfinite(self.level[0]) else []
        x = [self.x.place(value) for value in (*(dot.x for dot in drawn), *self.x.holds)]
        y = [self.y.place(v) for v in (*(dot.y for dot in drawn), *level, *self.y.holds)]
        return (*_padded(x, 0.06), *_padded(y, 0.1))

    def _across(self, value: float) -> float:
        low, high = self._ends[:2]
        share = (self.x.place(value) - low) / (high - low)
        return round(self.left + (self.right - self.left) * share, 1)

    def _down(self, value: float) -> float:
        low, high = self._ends[2:]
        share = (self.y.place(value) - low) / (high - low)
        return round(self.bottom - (self.bottom - self.top) * share, 1)


def _padded(values: Sequence[float], share: float) -> tuple[float, float]:
    low, high = min(values), max(values)
    edge = share * (high - low) or 0.05 * abs(high) or 0.5
    return low - edge, high + edge


def _means(dots: Sequence[Dot]) -> list[tuple[float, float]]:
    """Return the mean of the dots that stand over each other, such as those of several seeds."""
    at: dict[float, list[float]] = {}
    for dot in dots:
        at.setdefault(dot.x, []).append(dot.y)
    return [(x, sum(values) / len(values)) for x, values in sorted(at.items())]


@dataclass(frozen=True)
class Bars:
    """Two lengths beside each other for each name, such as before and after.

    Attributes:
        rows: (name, first, second), at least one.
        keys: what the first of each is, and the second.
        words: writes a value.
        more: a remark behind the keys.
    """

    form: ClassVar = "bars"
    wide: ClassVar = 340

    title: str
    label: str
    rows: tuple[tuple[str, float, float], ...]
    keys: tuple[str, str]
    words: Callable[[float], str] = short
    more: str = ""

    def width(self, value: float) -> float:
        """Return how long a bar is; all are to one scale."""
        most = max(max(first, second) for _, first, second in self.rows) or 1
        return round(max(1.0, self.wide * value / most), 1)


@dataclass(frozen=True)
class Scored:
    """One scored model: where it stands on the other axis, its group, and its name."""

    x: float
    score: Score
    group: str
    name: str


def charts(
    title: str,
    points: Iterable[Scored],
    x: Axis,
    groups: tuple[str, ...],
    *,
    joined: bool = False,
    source: bool = False,
) -> tuple[Chart, ...]:
    """Draw the final score over something else, one chart for each metric.

    Args:
        source: draw the source's score as a line to compare with.
    """
    by_metric: dict[str, list[Scored]] = {}
    for one in points:
        if isfinite(one.score.after):
            by_metric.setdefault(one.score.metric, []).append(one)
    found = []
    for metric, scored in by_metric.items():
        unit = 100.0 if is_share(metric) else 1.0
        first = scored[0].score
        values = [unit * one.score.after for one in scored]
        level = unit * first.before
        if source and isfinite(level):
            values.append(level)
        found.append(
            Chart(
                title=title if len(by_metric) == 1 else f"{title}: {metric}",
                dots=tuple(Dot(p.x, unit * p.score.after, p.group, p.name) for p in scored),
                x=x,
                y=quality(_label(first), values, _best(first)),
                groups=groups,
                joined=joined,
                level=(level, "source") if source else None,
            )
        )
    return tuple(found)


def _label(score: Score) -> str:
    unit = " (%)" if is_share(score.metric) else ""
    return f"{score.metric}{unit}{'' if score.higher_is_better else ', lower is better'}"


def _best(score: Score) -> float | None:
    """Return the value of a metric that nothing surpasses, as drawn."""
    if not score.higher_is_better:
        return 0.0
    return 100.0 if is_share(score.metric) else 1.0 if score.metric == "cosine" else None
