"""Scores in pictures: one chart for each metric, since metrics share no axis."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import isfinite

from bp_convert.render.axis import Axis, quality
from bp_convert.render.chart import Chart, Dot
from bp_convert.render.words import is_share
from bp_convert.values.score import Score


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
