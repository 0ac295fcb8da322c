"""Flags and a settings file put into one Settings."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from bp_convert.errors import PlanError, RecipeError
from bp_convert.values.settings import LayerRule, Settings
from bp_convert.values.tensors import TensorSpec


def settings_from(path: Path | None, flags: Mapping[str, Any]) -> Settings:
    """Merge a settings file with the flags that were given; flags win.

    Raises:
        RecipeError: the file cannot be read or holds something that is no setting.
        PlanError: a flag's value is not valid.
    """
    merged = {} if path is None else _read(path)
    merged.update(flags)
    inputs = merged.get("inputs")
    if inputs:
        merged["inputs"] = [
            TensorSpec.parse(one) if isinstance(one, str) else one for one in inputs
        ]
    try:
        return Settings.model_validate(merged)
    except ValidationError as problem:
        raise _explained(problem, path) from None


def _read(path: Path) -> dict[str, Any]:
    import yaml

    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as problem:
        words = str(problem).splitlines()
        raise RecipeError(
            where=str(path),
            found=" ".join(line.strip() for line in words)[:300],
            allowed="a YAML file of settings",
            fix="check the path and the file's syntax",
        ) from None
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


def _explained(problem: ValidationError, path: Path | None) -> PlanError | RecipeError:
    first = problem.errors()[0]
    place = ".".join(str(part) for part in first["loc"]) or "the whole"
    kind = RecipeError if path is not None else PlanError
    where = f"{path}, at {place}" if path is not None else f"setting {place}"
    if first["type"] == "extra_forbidden":
        key = str(first["loc"][-1])
        fields = LayerRule.model_fields if len(first["loc"]) > 1 else Settings.model_fields
        near = get_close_matches(key, fields, n=1)
        return kind(
            where=where,
            found=f"{key!r} is no setting",
            allowed=", ".join(fields),
            fix=f"did you mean {near[0]!r}?" if near else "remove it",
        )
    return kind(
        where=where,
        found=f"{first.get('input')!r}"[:120],
        allowed=first["msg"],
        fix="correct this value",
    )
