"""The bases of all values: frozen, closed to unknown fields, JSON in and out."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Mapping
from math import isfinite
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, PlainSerializer, model_validator

from bp_convert.errors import PlanError

W = TypeVar("W", bound="Worded")
# How values are drawn, as ``bp_convert.pages`` says here: as lines for a terminal (``text``), and
# as a piece of a page with all text escaped (``html``).
LOOKS: dict[str, Callable[[Any], str]] = {}


def _in_json(number: float) -> float | str:
    return number if isfinite(number) else str(number)


# JSON has no infinity; as the text "inf" it comes back as the same number.
Number = Annotated[float, PlainSerializer(_in_json, return_type=float | str, when_used="json")]


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


class Shown(Value):
    """A value that ``print`` and notebooks draw as a table; its ``repr`` is a line or two."""

    def __str__(self) -> str:
        return LOOKS["text"](self) if LOOKS else repr(self)

    def _repr_html_(self) -> str | None:
        return LOOKS["html"](self) if LOOKS else None


def one_or_many(value: Any) -> Any:
    """Return a list where one word, or one number, stands for it."""
    single = isinstance(value, str | int | BaseModel) and not isinstance(value, bool)
    return [value] if single else value


class Worded(Value):
    """A value that may be written as a word, which its ``parse`` reads."""

    @model_validator(mode="before")
    @classmethod
    def _read(cls, value: Any) -> Any:
        if isinstance(value, bool) or not isinstance(value, str | int):
            return value
        try:
            return dict(cls.parse(str(value)))
        except PlanError as problem:
            raise ValueError(problem.allowed) from problem

    @classmethod
    def parse(cls: type[W], text: str) -> W:
        """Read a word.

        Raises:
            PlanError: it has another form.
        """
        raise NotImplementedError


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
