"""How a result was made, so that a reader of its page can make it again."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from bp_convert.render.numbers import clock
from bp_convert.values.settings import Settings


def facts(
    *,
    command: str = "",
    source: str = "",
    settings: Settings | None = None,
    inputs: Sequence[object] = (),
    data: str = "",
    versions: Mapping[str, str] | None = None,
    machine: str = "",
    seconds: float | None = None,
) -> tuple[tuple[str, str], ...]:
    """Return (what, words) for all that is known.

    Args:
        command: as it was typed; empty where no command was.
        inputs: that one example is.
        data: what factors were fitted to.
    """
    known = {
        "command": command,
        "model": source,
        "settings": "" if settings is None else asked(settings),
        "seed": "" if settings is None else str(settings.seed),
        "inputs": ", ".join(map(str, inputs)),
        "fitted to": data,
        "versions": ", ".join(f"{name} {number}" for name, number in (versions or {}).items()),
        "machine": machine,
        "time": clock(seconds) if seconds else "",
    }
    return tuple((what, words) for what, words in known.items() if words)


def asked(settings: Settings) -> str:
    """Write what differs from the settings that hold where nothing is asked."""
    given = settings.model_dump(mode="json", by_alias=True, exclude_defaults=True, exclude={"seed"})
    plain = {**given, "target": [str(one) for one in settings.target]}
    plain |= {"inputs": [str(one) for one in settings.inputs]}
    said = [f"{name} {_value(value)}" for name, value in plain.items() if value not in ([], ())]
    return "; ".join(said) or "all defaults"


def _value(value: Any) -> str:
    if isinstance(value, list) and all(isinstance(one, str) for one in value):
        return ", ".join(value)
    return value if isinstance(value, str) else json.dumps(value)
