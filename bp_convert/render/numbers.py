"""Numbers as a person reads them."""

from __future__ import annotations

from math import ceil, floor, log10

from bp_convert.values.plan import Totals

_UNITS = ((1e9, "G"), (1e6, "M"), (1e3, "k"))


def rounded(count: float) -> str:
    """Return a round number without zeros that say nothing: 500, 20k or 1.5M."""
    unit, suffix = next((one for one in _UNITS if count >= one[0]), (1.0, ""))
    return f"{count / unit:g}{suffix}"


def short(count: float) -> str:
    """Return 999, 12.3k, 4.56M or 7.89G."""
    for limit, suffix in _UNITS:
        if abs(count) >= limit:
            value = count / limit
            return f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f}{suffix}"
    return f"{count:.0f}"


def size(count: float) -> str:
    """Return bytes as 999 B, 12.3 kB, 4.56 MB or 7.89 GB."""
    text = short(count)
    return f"{text[:-1]} {text[-1]}B" if text[-1].isalpha() else f"{text} B"


def percent(share: float) -> str:
    """Return a share as a percentage, finer where it is small."""
    value = 100 * share
    if 0 < abs(value) < 0.1:
        return "less than 0.1 %"
    return f"{value:.1f} %" if abs(value) < 10 else f"{value:.0f} %"


def milliseconds(value: float) -> str:
    """Return 0.123 ms, 45.6 ms or 7,890 ms."""
    return f"{value:,.0f} ms" if value >= 100 else f"{value:.3g} ms"


def clock(seconds: float) -> str:
    """Return 4.2 s, 3:05 or 2:01:30."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Return round numbers between two, for an axis."""
    rough = (high - low) / about
    power = 10.0 ** floor(log10(rough))
    step = next(step * power for step in (1, 2, 5, 10) if step * power >= rough)
    digits = max(0, 1 - floor(log10(step)))
    count = floor(high / step) - ceil(low / step) + 1
    return [round((ceil(low / step) + place) * step, digits) for place in range(count)]


def change(totals: Totals) -> str:
    """Say how a total changed: 74 % less, 3.2x, unchanged."""
    ratio = totals.ratio
    if totals.before == totals.after:
        return "unchanged"
    if ratio > 1:
        return f"{percent(ratio - 1)} more"
    return f"{percent(1 - ratio)} less"


def layers(count: int) -> str:
    """Write a number of layers."""
    return "1 layer" if count == 1 else f"{count} layers"
