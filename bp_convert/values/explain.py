"""pydantic's findings as errors in four parts, with the place, the nearest key, and what to do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from types import UnionType
from typing import Any, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError

from bp_convert.errors import BpConvertError, RecipeError
from bp_convert.values.marks import Key, Mark, Node

SHOULD = "Input should be "  # pydantic's words
V = TypeVar("V", bound=BaseModel)
_ALLOWED = {
    "rank": "a whole number of terms, or a share between 0 and 1",
    "pairs": "fast, paper, or for one layer {out: [k1, k2], in: [d1, d2]}",
    "out": "two factors, [k1, k2]",
    "in": "two factors, [d1, d2]",
    "matrix": "lists of values by key, such as `alpha: [1, 2, 3]`",
    "target": "limits such as params=0.25, macs=0.5, size=20MB or error=0.05",
    "layers": "rules, each with `match:`",
}


def validated(
    kind: type[V],
    given: Node | Mapping[str, Any],
    where: str = "",
    *,
    error: type[BpConvertError] = RecipeError,
    beside: Sequence[str] = (),
) -> V:
    """Check values against a pydantic class.

    Args:
        given: what was asked: a tree that knows its file, or plain values.
        where: words for where it lies: in a tree the dotted key, such as ``jobs.3``; else what
            stands in front of the key, such as ``setting``.
        error: the class to raise.
        beside: further keys that may stand at the top.

    Raises:
        BpConvertError: of the class ``error``, about the place that is furthest in.
    """
    values = given.plain() if isinstance(given, Node) else given
    if not isinstance(values, Mapping):
        raise error(
            where=at(given, where),
            found=f"a {_type(values)}" + (f" for {where}" if where else " at the top"),
            allowed="`key: value`, one a line",
            fix=f"name keys such as {', '.join(list(kind.model_fields)[:4])}",
        )
    try:
        return kind.model_validate(values)
    except ValidationError as problem:
        raise explained(kind, problem, given, where, error=error, beside=beside) from None


def at(given: Node | Mapping[str, Any] | Mark, where: str, *place: Key) -> str:
    """Write a place: in a file with line, column and the dotted key, else in words."""
    dotted = ".".join(map(str, place))
    if isinstance(given, Node):
        given = given.at(place)
    if isinstance(given, Mark):
        dotted = ".".join(filter(None, (where, dotted)))
        return f"{given}, at {dotted}" if dotted else str(given)
    return f"{where} {dotted}".strip()


def explained(
    kind: type[BaseModel],
    problem: ValidationError,
    given: Node | Mapping[str, Any],
    where: str,
    *,
    error: type[BpConvertError] = RecipeError,
    beside: Sequence[str] = (),
) -> BpConvertError:
    """Turn pydantic's findings about ``given`` into one error; see ``validated``."""
    places = [(_real(one["loc"], given), one) for one in problem.errors()]
    place, first = max(places, key=lambda one: len(one[0]))  # of equals, the first
    here = at(given, where, *place)
    message = first["msg"].removeprefix("Value error, ")
    last = next((str(key) for key in reversed(place) if isinstance(key, str)), "")
    if first["type"] == "extra_forbidden":
        known = [*keys_at(kind, place[:-1]), *(beside if len(place) == 1 else ())]
        return unknown(here, str(place[-1]), known, error)
    if first["type"] == "missing":
        lacking = str(first["loc"][-1])
        return error(
            where=here,
            found=f"no {lacking!r} here",
            allowed=_ALLOWED.get(str(place[-1]) if place else "", f"{last or 'this'} with it"),
            fix=f"add `{lacking}: ...`",
        )
    cause = getattr(first.get("ctx", {}).get("error"), "__cause__", None)
    if isinstance(cause, BpConvertError):  # of a value that has a reader of its own
        found = f"{cause.where}: {cause.found}"
        return error(where=here, found=found, allowed=cause.allowed, fix=cause.fix)
    if first["type"] == "value_error" and not last:  # of keys that stand together
        said = message.partition(" ")[0]  # of several, the one it speaks of
        if isinstance(given, Node) and given.get(said) is not None:
            here = at(given, where, said)
        return error(
            where=here,
            found=message,
            allowed="keys that go together",
            fix="change one of them, or leave it out",
        )
    same = dict.fromkeys(one["msg"] for spot, one in places if spot == place)  # alternatives
    if all(one.startswith(SHOULD) for one in same):
        message = SHOULD + ", or ".join(one.removeprefix(SHOULD) for one in same)
    return error(
        where=here,
        found=_shown(first.get("input")),
        allowed=_ALLOWED.get(last, message) if first["type"] != "value_error" else message,
        fix=f"correct {last}" if last else "correct this value",
    )


def unknown(
    where: str, key: str, known: Sequence[str], error: type[BpConvertError] = RecipeError
) -> BpConvertError:
    """Say that a key is not known, and which comes nearest."""
    near = get_close_matches(key, known, n=1, cutoff=0.5)
    return error(
        where=where,
        found=f"the unknown key {key!r}",
        allowed=", ".join(known),
        fix=f"did you mean {near[0]!r}?" if near else "remove it, or use one of these keys",
    )


def keys_at(kind: Any, path: Sequence[Key]) -> list[str]:
    """Return the keys that may stand at a path of a pydantic class."""
    for key in path:
        kind = _inside(kind, key)
    model = _model(kind)
    if model is None:
        return []
    return [field.alias or name for name, field in model.model_fields.items()]


def _inside(kind: Any, key: Key) -> Any:
    if isinstance(key, int):
        return kind  # an entry of a list: _model looks through the list
    model = _model(kind)
    if model is None:
        return None
    for name, field in model.model_fields.items():
        if key in (name, field.alias):
            return field.annotation
    return None


def _model(kind: Any) -> type[BaseModel] | None:
    """Return the pydantic class in an annotation, if one stands there."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return kind
    if get_origin(kind) in (Union, UnionType, tuple, list) or get_args(kind):
        return next((found for one in get_args(kind) if (found := _model(one))), None)
    return None


def _real(loc: Sequence[Key], given: Node | Mapping[str, Any]) -> tuple[Key, ...]:
    """Return the keys that lead through the values, without pydantic's names for alternatives."""
    place: list[Key] = []
    value: Any = given
    for key in loc:
        inner = value.value if isinstance(value, Node) else value
        in_list = isinstance(inner, list | tuple) and isinstance(key, int) and key < len(inner)
        if in_list or (isinstance(inner, Mapping) and key in inner):
            value = inner[key]
            place.append(key)
    return tuple(place)


def _type(value: Any) -> str:
    words = {list: "list", str: "text", int: "number", float: "number", type(None): "nothing"}
    return words.get(type(value), type(value).__name__)


def _shown(value: Any) -> str:
    if isinstance(value, dict) or value is None:
        return "nothing" if not value else f"a mapping with {', '.join(map(str, value))}"[:120]
    return f"{value!r}"[:120]
