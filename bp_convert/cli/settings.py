"""Flags and a settings file put into one Settings."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from bp_convert.errors import RecipeError
from bp_convert.values.explain import settings_explained
from bp_convert.values.settings import Settings
from bp_convert.values.tensors import TensorSpec

_LISTS = ("include", "exclude", "inputs")


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
        raise settings_explained(problem, merged, path) from None


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
