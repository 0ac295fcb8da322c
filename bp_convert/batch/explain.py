"""pydantic's findings as errors with file, line, column, the nearest key, and what to do."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from types import UnionType
from typing import Any, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError

from bp_convert.batch.marks import Key, Mark, Node
from bp_convert.errors import BpConvertError, RecipeError

V = TypeVar("V", bound=BaseModel)
_ALLOWED = {
    "rank": "a whole number of terms, or a share between 0 and 1",
    "pairs": "fast, paper, or for one layer {out: [k1, k2], in: [d1, d2]}",
    "matrix": "lists of values by key, such as `alpha: [1, 2, 3]`",
    "target": "limits such as params=0.25, macs=0.5, size=20MB or error=0.05",
    "layers": "rules, each with `match:`",
}


def validated(kind: type[V], node: Node, path: str = "", **more: Any) -> V:
    """Check a tree against a pydantic class.

    Args:
        path: words for where the tree lies, for messages, such as ``jobs.3``.
        more: further values, that stand in no file.

    Raises:
        RecipeError: with the place in the file.
    """
    given = node.plain()
    if not isinstance(given, dict):
        raise RecipeError(
            where=str(node.mark),
            found=f"a {_type(given)}" + (f" for {path}" if path else " at the top"),
            allowed="`key: value`, one a line",
            fix=f"name keys such as {', '.join(list(kind.model_fields)[:4])}",
        )
    try:
        return kind.model_validate({**given, **more})
    except ValidationError as problem:
        raise _explained(kind, problem, node, path) from None
    except BpConvertError as problem:  # a value that has a parser of its own
        place = next((key for key in ("target", "inputs", "settings") if key in given), "")
        raise RecipeError(
            where=at(node.at((place,)), path, place),
            found=f"{problem.where}: {problem.found}",
            allowed=problem.allowed,
            fix=problem.fix,
        ) from None


def at(mark: Mark, *parts: str) -> str:
    """Write a place in a file with the dotted key."""
    dotted = ".".join(part for part in parts if part)
    return f"{mark}, at {dotted}" if dotted else str(mark)


def _explained(
    kind: type[BaseModel], problem: ValidationError, node: Node, path: str
) -> RecipeError:
    found = [(_real(error["loc"], node), error) for error in problem.errors()]
    place, error = max(found, key=lambda one: len(one[0]))  # the furthest in; of equals, the first
    where = at(node.at(place), path, *map(str, place))
    message = error["msg"].removeprefix("Value error, ")
    last = next((str(key) for key in reversed(place) if isinstance(key, str)), "")
    if error["type"] == "extra_forbidden":
        key = str(place[-1])
        known = keys_at(kind, place[:-1])
        return unknown(where, key, known)
    if error["type"] == "missing":
        lacking = str(error["loc"][-1])
        return RecipeError(
            where=where,
            found=f"no {lacking!r} here",
            allowed=f"{last or 'this'} with {lacking!r}",
            fix=f"add `{lacking}: ...`",
        )
    if error["type"] == "value_error":
        said = message.partition(" ")[0]
        if not last and node.get(said) is not None:  # of several keys, the one it speaks of
            where = at(node.at((said,)), path, said)
        return RecipeError(
            where=where,
            found=_shown(error.get("input")) if last else message,
            allowed=message if last else "keys that go together",
            fix="correct this value" if last else "change one of them, or leave it out",
        )
    return RecipeError(
        where=where,
        found=_shown(error.get("input")),
        allowed=_ALLOWED.get(last, message),
        fix=f"correct {last}" if last else "correct this value",
    )


def unknown(where: str, key: str, known: Sequence[str]) -> RecipeError:
    """Say that a key is not known, and which comes nearest."""
    near = get_close_matches(key, known, n=1, cutoff=0.5)
    return RecipeError(
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


def _real(loc: Sequence[Key], node: Node) -> tuple[Key, ...]:
    """Return the keys that lead through the tree, without pydantic's names for alternatives."""
    place: list[Key] = []
    for key in loc:
        value = node.value
        found = None
        if isinstance(value, dict):
            found = value.get(key)
        elif isinstance(value, list) and isinstance(key, int) and key < len(value):
            found = value[key]
        if not isinstance(found, Node):
            continue
        node = found
        place.append(key)
    return tuple(place)


def _type(value: Any) -> str:
    words = {list: "list", str: "text", int: "number", float: "number", type(None): "nothing"}
    return words.get(type(value), type(value).__name__)


def _shown(value: Any) -> str:
    if isinstance(value, dict) or value is None:
        return "nothing" if not value else f"a mapping with {', '.join(map(str, value))}"[:120]
    return f"{value!r}"[:120]
