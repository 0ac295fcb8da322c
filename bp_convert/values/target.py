"""A budget in the user's words: a quarter of the parameters, 20 MB, an error of 0.05."""

from __future__ import annotations

import re
from difflib import get_close_matches
from typing import Annotated, Literal, get_args

from pydantic import Field, model_validator

from bp_convert.errors import PlanError
from bp_convert.values.base import Worded

Quantity = Literal["params", "macs", "size", "error", "latency"]
_UNITS = {
    "": 1,
    "k": 1e3,
    "m": 1e6,
    "g": 1e9,
    "b": 1,
    "kb": 1e3,
    "mb": 1e6,
    "gb": 1e9,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "%": 0.01,
}
_TIMES = {"us": 1.0, "ms": 1e3, "s": 1e6}  # in microseconds
_NUMBER = r"([0-9]*\.?[0-9]+(?:e[+-]?[0-9]+)?)"
_FORM = re.compile(rf"(params|macs|size|error|latency)={_NUMBER}\s*([a-z%]*)", re.I)


class Target(Worded):
    """One limit that the converted model has to keep.

    Attributes:
        quantity: ``params``, ``macs`` (of one example), ``size`` (bytes of the saved file),
            ``latency`` (time of a pass, at the batch that the settings state) or ``error``
            (estimated relative error of the output).
        value: a share of the source's where it is at most 1, a count, bytes or microseconds above;
            for ``error`` the error itself.
    """

    quantity: Quantity
    value: Annotated[float, Field(gt=0)]

    @model_validator(mode="after")
    def _error_is_relative(self) -> Target:
        if self.quantity == "error" and self.value >= 1:
            raise ValueError("an error is relative: between 0 and 1")
        return self

    @property
    def is_share(self) -> bool:
        """Whether ``value`` is a share of the source's."""
        return self.quantity != "error" and self.value <= 1

    def limit(self, before: float) -> float:
        """Return the limit in the quantity's own unit, given the source's."""
        return self.value * before if self.is_share else self.value

    @property
    def hint(self) -> str:
        """What was perhaps meant, where the limit is a count that hardly any model has."""
        if self.quantity in ("error", "latency") or not 1 < self.value <= 100:
            return ""
        return f"; did you mean {self.quantity}={self.value / 100:g}?"

    @classmethod
    def parse(cls, text: str) -> Target:
        """Read ``params=0.25``, ``params=1.5M``, ``macs=0.5``, ``size=20MB``, ``latency=8ms`` or
        ``error=0.05``.

        Raises:
            PlanError: any other text.
        """
        found = _FORM.fullmatch(text.strip())
        unit = found[3].lower() if found else ""
        value = _value(found[1].lower(), float(found[2]), unit) if found else None
        if found and value is not None:
            return cls.model_validate({"quantity": found[1].lower(), "value": value})
        raise PlanError(
            where=f"target {text!r}",
            found="no limit that bp-convert knows",
            allowed="params=0.25, params=1.5M, macs=0.5, size=20MB, latency=0.5, latency=8ms or "
            "error=0.05: a share of the source's up to 1, a count, bytes or a time above it; an "
            "error between 0 and 1",
            fix=_nearest(text) or "write QUANTITY=VALUE, such as params=0.25",
        )

    def said(self, amount: float) -> str:
        """Write an amount of its quantity in words."""
        if self.quantity != "latency":
            return f"{amount:,.0f}"
        return f"{amount / 1e3:.3g} ms"

    def __str__(self) -> str:
        if self.quantity == "latency" and not self.is_share:
            return f"latency={self.value / 1e3:.12g}ms"
        return f"{self.quantity}={self.value:.12g}"


def _value(quantity: str, number: float, unit: str) -> float | None:
    """Return a limit in its quantity's own unit; None where the unit is another's."""
    if quantity == "latency":
        value = number * (_TIMES.get(unit) or {"": 1.0, "%": 0.01}.get(unit, 0.0))
        share = unit not in _TIMES  # a time of a microsecond or less would be one, too
        return value if value > 0 and share == (value <= 1) else None
    if unit not in _UNITS or (unit.endswith("b") and quantity != "size"):
        return None
    value = number * _UNITS[unit]
    return value if value > 0 and not (quantity == "error" and value >= 1) else None


def _nearest(text: str) -> str:
    """Return a suggestion for a limit without its quantity, or with a mistyped one."""
    name, equals, limit = text.strip().rpartition("=")
    near = get_close_matches(name.lower(), get_args(Quantity), n=1) if equals else ["params"]
    found = _FORM.fullmatch(f"{near[0]}={limit}") if near else None
    value = _value(near[0], float(found[2]), found[3].lower()) if found else None
    if found is None or not value or near[0] == name.lower():
        return ""
    if not equals:
        limit = f"{value / 100 if 1 < value <= 100 else value:g}"
    return f"did you mean {near[0]}={limit}?"
