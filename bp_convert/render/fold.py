"""Repeated layers put into one row, so that a deep model fits a screen."""

from __future__ import annotations

import re
from dataclasses import dataclass

from bp_convert.values.report import LayerReport

_NUMBER = re.compile(r"\d+")


@dataclass(frozen=True)
class Row:
    """One row of a table: a layer, or several that differ only by numbers in their names."""

    name: str
    count: int
    layer: LayerReport
    params_before: int
    params_after: int
    macs_before: int
    macs_after: int
    errors: tuple[float, ...]


def fold(layers: tuple[LayerReport, ...]) -> list[Row]:
    """Group layers whose names differ by numbers only and that fare alike."""
    groups: dict[tuple[object, ...], list[LayerReport]] = {}
    for layer in layers:
        pairs = tuple(sorted((role, str(spec)) for role, spec in layer.pairs.items()))
        shape = _NUMBER.sub("*", layer.name)
        key = (shape, layer.kind, layer.action, layer.reason, pairs, layer.params_before)
        groups.setdefault(key, []).append(layer)
    return [_row(group) for group in groups.values()]


def unfolded(layers: tuple[LayerReport, ...]) -> list[Row]:
    """Return a row for each layer."""
    return [_row([layer]) for layer in layers]


def _row(group: list[LayerReport]) -> Row:
    return Row(
        name=common([layer.name for layer in group]),
        count=len(group),
        layer=group[0],
        params_before=sum(layer.params_before for layer in group),
        params_after=sum(layer.params_after for layer in group),
        macs_before=sum(layer.macs_before for layer in group),
        macs_after=sum(layer.macs_after for layer in group),
        errors=tuple(layer.fit_error for layer in group if layer.fit_error is not None),
    )


def common(names: list[str]) -> str:
    """Write names that differ by numbers as one, with the numbers that differ as ranges."""
    if len(names) == 1:
        return names[0]
    parts = [_NUMBER.split(name) for name in names]
    numbers = [[int(n) for n in _NUMBER.findall(name)] for name in names]
    text = parts[0][0]
    for place, rest in enumerate(parts[0][1:]):
        found = sorted({one[place] for one in numbers})
        text += str(found[0]) if len(found) == 1 else f"{{{found[0]}-{found[-1]}}}"
        text += rest
    return text


def middle(name: str, width: int) -> str:
    """Shorten a name in its middle, where dotted names say least."""
    if len(name) <= width:
        return name
    tail = (width - 1) * 3 // 5
    return f"{name[: width - 1 - tail]}…{name[-tail:]}"
