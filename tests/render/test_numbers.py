"""Numbers as a person reads them."""

from __future__ import annotations

import pytest

from bp_convert.render.numbers import ticks


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
