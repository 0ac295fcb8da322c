"""Pictures of a recipe's results, as SVG that stands in the page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from math import ceil, floor, isfinite, log10

from bp_convert.render.numbers import ticks as round_ticks
from bp_convert.values.outcome import Outcome, Summary

LEFT, TOP, WIDE, HIGH = 78, 16, 560, 290  # of the frame
COLOURS = ("#1f6feb", "#b35900", "#1a7f37", "#8250df", "#bf3989", "#57606a", "#0a6c74", "#9a6700")
SHAPES = ("circle", "square", "diamond", "triangle")


@dataclass(frozen=True)
class _Dot:
    x: float
    y: float
    group: str
    name: str


def by_size(summary: Summary) -> str:
    """Draw the final score of every job over its parameters, on a logarithmic axis."""
    dots = [
        _Dot(log10(one.params.after), value, _kind(one, summary), one.name)
        for one in summary.jobs
        if one.params and (value := _value(one)) is not None
    ]
    return _chart(dots, summary, "parameters (logarithmic)", _powers, lines=False)


def by_alpha(summary: Summary) -> str:
    """Draw the final score over alpha, a line for each way of converting."""
    dots = []
    for one in summary.jobs:
        alpha, value = one.keys.get("alpha"), _value(one)
        if isinstance(alpha, int | float) and value is not None and not _other(one):
            dots.append(_Dot(float(alpha), value, _kind(one, summary), one.name))
    if len({dot.x for dot in dots}) < 2:
        return ""
    asked = sorted({dot.x for dot in dots})

    def ticks(low: float, high: float) -> list[tuple[float, str]]:
        return [(x, f"{x:g}") for x in asked] if len(asked) <= 8 else _steps(low, high)

    return _chart(dots, summary, "alpha", ticks, lines=True)


def _value(one: Outcome) -> float | None:
    """Return the score as drawn: shares in percent."""
    if one.score is None or not isfinite(one.score.after):
        return None
    return one.score.after * (100 if _is_share(one) else 1)


def _is_share(one: Outcome) -> bool:
    metric = "" if one.score is None else one.score.metric
    return metric == "accuracy" or metric.startswith("top")


def _other(one: Outcome) -> bool:
    """Return whether alpha is not what this job varies."""
    return bool(one.keys.get("counterpart") or one.keys.get("target")) or one.keys.get("rank") != 1


def _kind(one: Outcome, summary: Summary) -> str:
    """Name the group of a job: how it was made, and of which model where there are several."""
    counterpart = str(one.keys.get("counterpart") or "")
    method = str(one.keys.get("method") or "")
    words = counterpart or ("low rank" if method.startswith("svd") else "bilinear")
    if one.keys.get("init") == "random" and counterpart != "full":
        words += ", from scratch"
    several = len({job.model for job in summary.jobs if job.model}) > 1
    return f"{one.model}: {words}" if several else words


def _chart(
    dots: Sequence[_Dot],
    summary: Summary,
    label: str,
    ticks: Callable[[float, float], list[tuple[float, str]]],
    *,
    lines: bool,
) -> str:
    if not dots:
        return ""
    low, high = _padded([dot.x for dot in dots], 0.06)
    bottom, top = _padded([dot.y for dot in dots], 0.1)

    def place(x: float, y: float) -> tuple[float, float]:
        return LEFT + WIDE * (x - low) / (high - low), TOP + HIGH * (top - y) / (top - bottom)

    parts = [
        f'<rect x="{LEFT}" y="{TOP}" width="{WIDE}" height="{HIGH}" fill="none" stroke="#57606a"/>'
    ]
    for at, words in ticks(low, high):
        x, _ = place(at, top)
        parts.append(
            f'<line x1="{x:.1f}" y1="{TOP}" x2="{x:.1f}" y2="{TOP + HIGH}" stroke="#e1e4e8"/>'
            f'<text x="{x:.1f}" y="{TOP + HIGH + 18}" text-anchor="middle">{words}</text>'
        )
    for at, words in _steps(bottom, top):
        _, y = place(low, at)
        parts.append(
            f'<line x1="{LEFT}" y1="{y:.1f}" x2="{LEFT + WIDE}" y2="{y:.1f}" stroke="#e1e4e8"/>'
            f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{words}</text>'
        )
    drawn = {dot.group for dot in dots}
    keys = []
    # Numbered over all jobs, so that a group has one colour in every picture of a page.
    for number, group in enumerate(dict.fromkeys(_kind(one, summary) for one in summary.jobs)):
        if group not in drawn:
            continue
        colour = COLOURS[number % len(COLOURS)]
        shape = SHAPES[number // len(COLOURS) % len(SHAPES)]
        mine = sorted((dot for dot in dots if dot.group == group), key=lambda dot: (dot.x, dot.y))
        if lines:
            parts.append(_line([place(x, y) for x, y in _means(mine)], colour))
        parts += [_mark(shape, *place(dot.x, dot.y), colour, dot) for dot in mine]
        keys.append(f'<span class="dot" style="background:{colour}"></span>{escape(group)}')
    metric = next((one.score.metric for one in summary.jobs if one.score), "score")
    share = any(_is_share(one) for one in summary.jobs)
    worse = next((not one.score.higher_is_better for one in summary.jobs if one.score), False)
    words = f"{metric}{' (%)' if share else ''}{', lower is better' if worse else ''}"
    return (
        f'<svg viewBox="0 0 {LEFT + WIDE + 24} {TOP + HIGH + 50}" role="img" '
        f'aria-label="{escape(words)} over {escape(label)}">{"".join(parts)}'
        f'<text x="{LEFT + WIDE / 2}" y="{TOP + HIGH + 42}" text-anchor="middle">{label}</text>'
        f'<text x="16" y="{TOP + HIGH / 2}" text-anchor="middle" '
        f'transform="rotate(-90 16 {TOP + HIGH / 2})">{escape(words)}</text></svg>'
        f"<p>{' '.join(keys)}</p>"
    )


def _padded(values: Sequence[float], share: float) -> tuple[float, float]:
    low, high = min(values), max(values)
    edge = share * (high - low) or 0.05 * abs(high) or 0.5
    return low - edge, high + edge


def _means(dots: Sequence[_Dot]) -> list[tuple[float, float]]:
    """Return the mean of the dots that stand over each other, such as those of several seeds."""
    at: dict[float, list[float]] = {}
    for dot in dots:
        at.setdefault(dot.x, []).append(dot.y)
    return [(x, sum(values) / len(values)) for x, values in sorted(at.items())]


def _line(points: Sequence[tuple[float, float]], colour: str) -> str:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>'


def _mark(shape: str, x: float, y: float, colour: str, dot: _Dot) -> str:
    title = f"<title>{escape(dot.name)}: {dot.y:.4g}</title>"
    style = f'fill="{colour}" stroke="#fff"'
    if shape == "circle":
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" {style}>{title}</circle>'
    corners = {
        "square": ((-4, -4), (4, -4), (4, 4), (-4, 4)),
        "diamond": ((0, -6), (6, 0), (0, 6), (-6, 0)),
        "triangle": ((0, -6), (6, 5), (-6, 5)),
    }[shape]
    path = " ".join(f"{x + dx:.1f},{y + dy:.1f}" for dx, dy in corners)
    return f'<polygon points="{path}" {style}>{title}</polygon>'


def _steps(low: float, high: float) -> list[tuple[float, str]]:
    return [(value, f"{value:.10g}") for value in round_ticks(low, high)]


def _powers(low: float, high: float) -> list[tuple[float, str]]:
    """Return round counts in a range of logarithms."""
    units = ((1e9, "G"), (1e6, "M"), (1e3, "k"), (1, ""))
    found = []
    digits = (1, 2, 5) if high - low < 2.5 else (1,)
    if high - low < 0.5:
        digits = (1, 1.5, 2, 3, 4, 5, 6, 7, 8, 9)  # type: ignore[assignment]
    for power in range(floor(low), ceil(high) + 1):
        for digit in digits:
            value = digit * 10.0**power
            if low <= log10(value) <= high:
                unit, name = next((one for one in units if value >= one[0]), (1, ""))
                found.append((log10(value), f"{value / unit:g}{name}"))
    return found
