"""Values as JSON text that every reader takes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import isfinite
from typing import Any

from pydantic import BaseModel


def as_json(what: Any, indent: int | None = 1) -> str:
    """Write a value, or plain ones, as JSON; numbers that are not finite, which JSON has no form
    for, are null."""
    return json.dumps(_finite(what), indent=indent, allow_nan=False)


def _finite(plain: Any) -> Any:
    if isinstance(plain, BaseModel):
        plain = plain.model_dump(mode="json", by_alias=True)
    if isinstance(plain, float):
        return plain if isfinite(plain) else None
    if isinstance(plain, Mapping):
        return {key: _finite(value) for key, value in plain.items()}
    if isinstance(plain, list | tuple):
        return [_finite(one) for one in plain]
    return plain
