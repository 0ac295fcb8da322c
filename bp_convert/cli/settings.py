"""Flags and a settings file put into one Settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from bp_convert.errors import PlanError, RecipeError
from bp_convert.values.settings import LayerRule, Pairs, Settings
from bp_convert.values.tensors import TensorSpec

_LISTS = ("include", "exclude", "inputs")
_ALLOWED = {
    "rank": "a whole number of terms, or a share between 0 and 1",
    "pairs": "fast, paper, or for one layer {out: [k1, k2], in: [d1, d2]}",
    "out": "two factors, [k1, k2]",
    "in": "two factors, [d1, d2]",
}


def settings_from(path: Path | None, flags: Mapping[str, Any]) -> Settings:
    """Merge a settings file with the flags that were given; flags win.

    Raises:
        RecipeError: the file cannot be read or holds something that is no setting.
        PlanError: a flag's value is not valid.
    """
    merged = {} if path is None else _read(path)
    merged.update(flags)
    for name in _LISTS:
        if isinstance(merged.get(name), str):
            merged[name] = [merged[name]]
    if isinstance(merged.get("inputs"), list):
        merged["inputs"] = [
            TensorSpec.parse(one) if isinstance(one, str) else one for one in merged["inputs"]
        ]
    try:
        return Settings.model_validate(merged)
    except ValidationError as problem:
        raise _explained(problem, merged, path) from None


def _read(path: Path) -> dict[str, Any]:
    import yaml

    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as problem:
        raise _unreadable(path, problem.strerror or str(problem), "check the path") from None
    except (UnicodeDecodeError, yaml.YAMLError) as problem:
        words = " ".join(line.strip() for line in str(problem).splitlines())
        raise _unreadable(path, words[:300], "correct the file's syntax") from None
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise RecipeError(
            where=str(path),
            found=f"a {type(data).__name__} at the top",
            allowed="settings as `name: value`, one a line",
            fix=f"name settings such as {', '.join(list(Settings.model_fields)[:4])}",
        )
    return {str(key): value for key, value in data.items()}


def _unreadable(path: Path, found: str, fix: str) -> RecipeError:
    return RecipeError(where=str(path), found=found, allowed="a YAML file of settings", fix=fix)


def _explained(
    problem: ValidationError, data: Mapping[str, Any], path: Path | None
) -> PlanError | RecipeError:
    """Turn pydantic's findings into one error about the place that is furthest in."""
    found = [(_place(error["loc"], data), error) for error in problem.errors()]
    place, error = max(found, key=lambda one: len(one[0]))  # of equals, the first
    dotted = ".".join(place) or "the whole"
    kind = RecipeError if path is not None else PlanError
    where = f"{path}, at {dotted}" if path is not None else f"setting {dotted}"
    if error["type"] == "extra_forbidden":
        known = _fields_beside(place)
        near = get_close_matches(place[-1], known, n=1)
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
