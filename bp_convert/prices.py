"""The prices by which times of layers are predicted: those that are shipped, or a machine's own.

Prices of a CPU stand in ``kinds/speed.json``, which ``python benchmarks/cost_model.py`` wrote and
which names the machine; ``bp-convert tune`` measures those of the machine that it runs on.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from importlib.resources import files

Counts = dict[str, float]
Prices = Mapping[str, Counts]  # by kind and side, such as "Linear.twin"
ALIGNED = "aligned"  # in their place: the "step" of inner widths that are faster, if there is one

_OWN: ContextVar[Prices | None] = ContextVar("prices", default=None)


def current() -> Prices:
    """Return the prices that hold here."""
    return _OWN.get() or shipped()


@contextmanager
def priced(own: Prices | None) -> Iterator[None]:
    """Let other prices hold for a while; kinds that they lack have those that are shipped.

    Args:
        own: None for those that are shipped.
    """
    token = _OWN.set(None if own is None else {**shipped(), **own})
    try:
        yield
    finally:
        _OWN.reset(token)


@lru_cache(maxsize=1)
def shipped() -> Prices:
    """Return the prices that come with the package."""
    text = (files("bp_convert.kinds") / "speed.json").read_text(encoding="utf-8")
    found: Prices = json.loads(text)["prices"]
    return found
