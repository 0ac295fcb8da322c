"""Axes and marks of pictures, by their numbers."""

from __future__ import annotations

from typing import Any

import pytest

from bp_convert.pages.axis import linear, logarithmic, quality
from bp_convert.pages.chart import Bars, Chart, Dot, Scored, charts
from bp_convert.values.report import Score

X = logarithmic("parameters")


def _chart(*dots: tuple[float, float], **change: object) -> Chart:
    values = [y for _, y in dots]
    fields: dict[str, Any] = {
        "title": "",
        "dots": tuple(Dot(x, y, "a", f"{x:g}") for x, y in dots),
        "x": X,
        "y": quality("accuracy (%)", values, 100.0),
        "groups": ("a",),
    }
    return Chart(**{**fields, **change})


def _heights(chart: Chart) -> list[float]:
    return [mark.y for mark in chart.series[0].marks]


def test_an_axis_is_finer_where_the_best_lie_close_together() -> None:
    chart = _chart((1, 99.80), (2, 98.15), (3, 75.6), (4, 59.0))
    assert chart.y.label == "accuracy (%), finer towards 100"
    best, good, fair, poor = _heights(chart)
    assert best < good < fair < poor  # a worse point lies lower
    assert good - best > 0.3 * (poor - best)  # even steps would leave 4 % of the height
    assert {"99.5", "99", "98", "80"} <= {words for _, words in chart.y_ticks}
    places = [place for place, _ in chart.y_ticks]
    assert all(12 <= place <= 232 for place in places)


def test_an_axis_has_even_steps_where_they_tell_values_apart() -> None:
    chart = _chart((1e6, 92.0), (1e5, 78.0))
    assert chart.y.label == "accuracy (%)"
    assert [words for _, words in chart.y_ticks] == ["80", "85", "90"]
    assert quality("score", [1.0, 500.0], None).label == "score"


def test_the_best_itself_has_a_place() -> None:
    chart = _chart((1, 100.0), (2, 99.9), (3, 10.0))
    assert [words for _, words in chart.y_ticks][-1] == "100"
    top, next_, last = _heights(chart)
    assert top < next_ < last
    zero = _chart((1, 0.0), (2, 0.01), (3, 0.9), y=quality("error", [0.0, 0.01, 0.9], 0.0))
    top, next_, last = _heights(zero)
    assert top > next_ > last  # an error of 0 lies lowest
    assert ("0", True) in [(words, place > next_) for place, words in zero.y_ticks]


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (1.8e4, 2.6e6, ["20k", "50k", "100k", "200k", "500k", "1M", "2M"]),
        (10, 1e9, ["10", "100", "1k", "10k", "100k", "1M", "10M", "100M", "1G"]),
        (2e6, 4.1e6, ["2M", "3M", "4M"]),
    ],
)
def test_a_logarithmic_axis_has_round_counts(low: float, high: float, expected: list[str]) -> None:
    assert [words for _, words in X.marks(X.place(low), X.place(high))] == expected


def test_each_metric_has_a_chart_of_its_own() -> None:
    def scored(metric: str, after: float, x: float) -> Scored:
        score = Score(metric=metric, before=1.0, after=after, higher_is_better=True, examples=9)
        return Scored(x, score, metric, "job")

    points = [scored("accuracy", 0.9, 10), scored("cosine", 0.95, 20), scored("accuracy", 0.8, 30),
              scored("cosine", float("inf"), 40)]  # fmt: skip
    accuracy, cosine = charts("Size", points, X, ("accuracy", "cosine"))
    assert (accuracy.y.label, cosine.y.label) == ("accuracy (%)", "cosine")
    assert accuracy.title == "Size: accuracy"
    assert [dot.y for dot in accuracy.dots] == [90.0, 80.0]
    assert [dot.y for dot in cosine.dots] == [0.95]
    assert (accuracy.series[0].colour, cosine.series[0].colour) == (0, 1)


def test_points_over_each_other_are_joined_at_their_mean() -> None:
    chart = _chart((1, 60.0), (1, 80.0), (2, 70.0), x=linear("alpha", only=[1, 2]), joined=True)
    (first, second) = chart.series[0].path.split()
    assert first.split(",")[1] == second.split(",")[1]
    assert len(chart.series[0].marks) == 3
    assert [words for _, words in chart.x_ticks] == ["1", "2"]
    assert _chart((1, 60.0)).series[0].path == ""


def test_more_groups_than_colours_have_other_shapes() -> None:
    names = tuple(f"g{i}" for i in range(10))
    dots = tuple(Dot(1 + i, 50.0 + i, name, name) for i, name in enumerate(names))
    drawn = _chart((1, 1.0), dots=dots, groups=names).series
    assert len({(one.colour, one.shape) for one in drawn}) == 10
    assert drawn[0].marks[0].corners == ""
    assert len(drawn[9].marks[0].corners.split()) == 4


def test_bars_are_to_one_scale() -> None:
    bars = Bars("t", "l", (("a", 200, 50), ("b", 100, 0)), ("before", "after"))
    assert [bars.width(value) for value in (200, 50, 100, 0)] == [340, 85, 170, 1]
