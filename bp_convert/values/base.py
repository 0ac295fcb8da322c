"""The base of all values: frozen, closed to unknown fields, JSON in and out."""

from __future__ import annotations

import inspect
import re
from typing import Any

from pydantic import BaseModel, ConfigDict


def _described(schema: dict[str, Any], cls: type[BaseModel]) -> None:
    """Put the words of docstrings, which editors show, into a JSON schema."""
    words: dict[str, str] = {}
    for one in reversed(cls.__mro__):
        words.update(attributes(one))
    fields = {one.alias or key: key for key, one in cls.model_fields.items()}
    for key, field in schema.get("properties", {}).items():
        if fields.get(key, key) in words:
            field["description"] = words[fields.get(key, key)]


def attributes(cls: type) -> dict[str, str]:
    """Return what the section "Attributes" of a class's own docstring says of each."""
    text = inspect.cleandoc(vars(cls).get("__doc__") or "").partition("Attributes:\n")[2]
    entries = re.findall(
        r"^    (\w+): (.+(?:\n     +.+)*)", text.partition("\n\n")[0], re.MULTILINE
    )
    return {name: " ".join(words.replace("``", "`").split()) for name, words in entries}


class Value(BaseModel):
    """A frozen pydantic model. Equal values do the same thing."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", populate_by_name=True, json_schema_extra=_described
    )
