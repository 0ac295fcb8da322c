"""Faults in settings, in the four parts of an error."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from bp_convert.errors import PlanError, RecipeError, TrainingError
from bp_convert.values.settings import LayerRule, Pairs, Settings
from bp_convert.values.training import Distill, Training

_ALLOWED = {
    "rank": "a whole number of terms, or a share between 0 and 1",
    "pairs": "fast, paper, or for one layer {out: [k1, k2], in: [d1, d2]}",
    "out": "two factors, [k1, k2]",
    "in": "two factors, [d1, d2]",
}


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


def settings_explained(
    problem: ValidationError,
    data: Mapping[str, Any],
    path: Path | None = None,
    beside: Sequence[str] = (),
) -> PlanError | RecipeError:
    """Turn pydantic's findings about ``Settings`` into one error about the place that is furthest
    in.

    Args:
        data: what was given.
        path: the file that it stands in; None for keywords and flags.
        beside: further keywords that may stand there.
    """
    found = [(_place(error["loc"], data), error) for error in problem.errors()]
    place, error = max(found, key=lambda one: len(one[0]))  # of equals, the first
    dotted = ".".join(place) or "the whole"
    kind = RecipeError if path is not None else PlanError
    where = f"{path}, at {dotted}" if path is not None else f"setting {dotted}"
    if error["type"] == "extra_forbidden":
        known = [*_fields_beside(place), *(beside if len(place) == 1 else ())]
        near = difflib.get_close_matches(place[-1], known, n=1)
        return kind(
            where=where,
            found=f"{place[-1]!r} is no setting",
            allowed=", ".join(known),
            fix=f"did you mean {near[0]!r}?" if near else "remove it",
        )
    if error["type"] == "value_error" and not place:  # of settings that stand together
        return kind(
            where=str(path or "settings"),
            found=error["msg"].removeprefix("Value error, "),
            allowed="settings that go together",
            fix="change one of them, or leave it out",
        )
    lacks = f", without {error['loc'][-1]!r}" if error["type"] == "missing" else ""
    return kind(
        where=where,
        found=f"{error.get('input')!r}"[:120] + lacks,
        allowed=_ALLOWED.get(
            place[-1] if place else "", error["msg"].removeprefix("Value error, ")
        ),
        fix="add it" if lacks else "correct this value",
    )


def _place(loc: Sequence[str | int], data: Any) -> list[str]:
    """Return the keys that lead through the data, without pydantic's names for alternatives."""
    place = []
    for key in loc:
        in_list = isinstance(data, list) and isinstance(key, int) and key < len(data)
        if in_list or (isinstance(data, dict) and key in data):
            place.append(str(key))
            data = data[key]
    return place


def _fields_beside(place: list[str]) -> list[str]:
    """Return the names that may stand where the last key of ``place`` stands."""
    if place[-2:-1] == ["pairs"]:
        return [field.alias or name for name, field in Pairs.model_fields.items()]
    return list(LayerRule.model_fields if len(place) > 1 else Settings.model_fields)
