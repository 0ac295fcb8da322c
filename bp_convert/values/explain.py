"""Faults in training settings, in the four parts of an error."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from pydantic import ValidationError

from bp_convert.errors import TrainingError
from bp_convert.values.training import Distill, Training


def explained(problem: ValidationError, where: str, beside: Sequence[str] = ()) -> TrainingError:
    """Turn pydantic's first finding about a ``Training`` into an error.

    Args:
        where: what the settings were given to.
        beside: further keys that may stand there.
    """
    first = problem.errors()[0]
    place = [str(one) for one in first["loc"]]
    inside = place[:1] == ["distill"] and len(place) > 1
    known = [*(Distill if inside else Training).model_fields, *(() if inside else beside)]
    unknown = first["type"] == "extra_forbidden"
    near = difflib.get_close_matches(place[-1], known, n=1) if place else []
    said = str(first["msg"]).removeprefix("Value error, ")
    return TrainingError(
        where=f"{where} {'.'.join(place)}".strip(),
        found="no such setting" if unknown else f"{said} (got {str(first.get('input'))[:80]})",
        allowed=f"one of: {', '.join(known)}" if unknown else "a value that the setting takes",
        fix=f"did you mean {near[0]}?" if unknown and near else "correct the setting",
    )
