"""How a result was made, so that a reader of its page can make it again."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from bp_convert.render.numbers import clock
from bp_convert.values.outcome import Summary
from bp_convert.values.report import Report
from bp_convert.values.settings import Settings
from bp_convert.values.study import Probe, Sweep


def facts(
    result: Report | Probe | Sweep | Summary,
    command: str,
    settings: Settings | None = None,
    inputs: Sequence[object] = (),
) -> tuple[tuple[str, str], ...]:
    """Return (what, words) for all that is known.

    Args:
        command: as it was typed; empty where no command was.
        settings: that were asked for.
        inputs: that one example is.
    """
    # A summary is of jobs that have a model, data and a time of their own.
    one = None if isinstance(result, Summary) else result
    known = {
        "command": command,
        "model": one.source if one else "",
        "settings": asked(settings) if settings else "",
        "seed": str(settings.seed) if settings else "",
        "inputs": ", ".join(map(str, inputs)),
        "fitted to": one.calibration if one else "",
        "versions": ", ".join(f"{name} {number}" for name, number in result.versions.items()),
        "machine": result.machine,
        "time": clock(one.seconds) if one and one.seconds else "",
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
