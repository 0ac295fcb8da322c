"""Repeated layers put into one row, so that a deep model fits a screen."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from bp_convert.values.plan import LayerPlan
from bp_convert.values.report import Report

_NUMBER = re.compile(r"\d+")


@dataclass(frozen=True)
class Folded:
    """One row of a table: a layer, or several that differ only by numbers in their names.

    Attributes:
        layers: at least one; they fare alike.
        errors: of those that were fitted.
    """

    layers: tuple[LayerPlan, ...]
    errors: tuple[float, ...]

    @property
    def name(self) -> str:
        """The name of all, with the numbers that differ as ranges."""
        return common([layer.name for layer in self.layers])

    @property
    def count(self) -> int:
        """How many layers there are."""
        return len(self.layers)

    @property
    def layer(self) -> LayerPlan:
        """The first, which speaks for all."""
        return self.layers[0]

    @property
    def params(self) -> tuple[int, int]:
        """Parameters of all, before and after."""
        return _sum(layer.params for layer in self.layers)

    @property
    def macs(self) -> tuple[int, int]:
        """Multiply-adds of all, before and after."""
        return _sum(layer.macs for layer in self.layers)


def _sum(pairs: Iterable[tuple[int, int]]) -> tuple[int, int]:
    before, after = zip(*pairs, strict=True)
    return sum(before), sum(after)


def fold(report: Report, *, every: bool = False) -> list[Folded]:
    """Group layers whose names differ by numbers only and that fare alike.

    Args:
        every: a row for each layer.
    """
    groups: dict[tuple[object, ...], list[LayerPlan]] = {}
    for layer in report.layers:
        pairs = tuple(sorted((role, str(spec)) for role, spec in layer.factors.items()))
        shape = layer.name if every else _NUMBER.sub("*", layer.name)
        alike = (layer.kind, layer.action, layer.way, layer.reason, layer.params[0], layer.store)
        key = (shape, pairs, *alike)
        groups.setdefault(key, []).append(layer)
    errors = report.fit_errors
    return [
        Folded(tuple(group), tuple(errors[one.name] for one in group if one.name in errors))
        for group in groups.values()
    ]


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


def wrapped(name: str, width: int) -> str:
    """Break a dotted name into lines of a width, after its dots where that goes."""
    lines = [""]
    for part in re.findall(r"[^.]*\.?", name):
        room = width - len(lines[-1])
        if len(part) > room and lines[-1].strip():
            lines.append(" ")
            room = width - 1
        while len(part) > room:  # wider than a line by itself
            lines[-1] += part[:room]
            part, room = part[room:], width - 1
            lines.append(" ")
        lines[-1] += part
    return "\n".join(lines)


def middle(name: str, width: int) -> str:
    """Shorten a name in its middle, where dotted names say least."""
    if len(name) <= width:
        return name
    tail = (width - 1) * 3 // 5
    return f"{name[: width - 1 - tail]}…{name[-tail:]}"
