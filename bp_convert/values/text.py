"""Values as JSON text that every reader takes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import isfinite
from typing import Any


def as_json(plain: Any, indent: int | None = 1) -> str:
    """Write plain values as JSON; numbers that are not finite, which JSON has no form for, are
    null."""
    return json.dumps(_finite(plain), indent=indent, allow_nan=False)


def _finite(plain: Any) -> Any:
    if isinstance(plain, float):
        return plain if isfinite(plain) else None
    if isinstance(plain, Mapping):
        return {key: _finite(value) for key, value in plain.items()}
    if isinstance(plain, list | tuple):
        return [_finite(one) for one in plain]
    return plain
