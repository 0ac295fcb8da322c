"""Values with looks of their own: a table where they are printed, and in a notebook.

A value does not know how it is drawn: ``bp_convert.render`` registers that here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from bp_convert.values.base import Value


class _Looks(NamedTuple):
    """How a class of values is drawn."""

    text: Callable[[Any], str]
    html: Callable[[Any], str]


_LOOKS: dict[type, _Looks] = {}


class Shown(Value):
    """A value that ``print`` and notebooks draw as a table; its ``repr`` is a line or two."""

    def __str__(self) -> str:
        looks = _LOOKS.get(type(self))
        return repr(self) if looks is None else looks.text(self)

    def _repr_html_(self) -> str | None:
        looks = _LOOKS.get(type(self))
        return None if looks is None else looks.html(self)


def looks_of(*kinds: type[Shown], text: Callable[[Any], str], html: Callable[[Any], str]) -> None:
    """Register how values of some classes are drawn.

    Args:
        text: returns lines for a terminal.
        html: returns a piece of a page, with all text escaped.
    """
    for kind in kinds:
        _LOOKS[kind] = _Looks(text, html)
