"""Numbers as a person reads them."""

from __future__ import annotations

import pytest

from bp_convert.render.numbers import clock, milliseconds, rounded, ticks


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0.69, 1.02, [0.7, 0.8, 0.9, 1.0]),
        (0.0, 1.0, [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (0.997, 0.9982, [0.997, 0.9975, 0.998]),
        (12.0, 480.0, [100, 200, 300, 400]),
        (-0.3, 0.4, [-0.2, 0.0, 0.2, 0.4]),
    ],
)
def test_an_axis_has_round_numbers(low: float, high: float, expected: list[float]) -> None:
    assert ticks(low, high) == expected


def test_round_numbers_times_and_durations() -> None:
    assert [rounded(n) for n in (5, 500, 1e3, 1.5e6, 2e9)] == ["5", "500", "1k", "1.5M", "2G"]
    assert [milliseconds(n) for n in (0.1234, 45.67, 6684.4)] == ["0.123 ms", "45.7 ms", "6,684 ms"]
    assert [clock(n) for n in (4.24, 185, 7290)] == ["4.2 s", "3:05", "2:01:30"]
