"""The combinations of a matrix."""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import dataclass
from pathlib import Path

from bp_convert.errors import RecipeError
from bp_convert.values.architecture import Architecture
from bp_convert.values.explain import at, keys_at, unknown
from bp_convert.values.marks import Node
from bp_convert.values.recipe import JobKeys

LARGEST = 10_000  # jobs of one matrix
_UNSAFE = re.compile(r"[^A-Za-z0-9._=+-]+")


@dataclass(frozen=True)
class Combination:
    """One value for each key of a matrix.

    Attributes:
        values: a Node by dotted key.
        suffix: what tells it from the others, for names.
    """

    values: dict[str, Node]
    suffix: str


def combinations(matrix: Node | None, path: str = "matrix") -> list[Combination]:
    """Return the combinations of a matrix, the last key varying fastest.

    Raises:
        RecipeError: a key that no job has, an empty list, or an exclusion that excludes nothing.
    """
    if matrix is None or not isinstance(matrix.value, dict):
        return [Combination({}, "")]
    lists = {key: one for key, one in matrix.value.items() if key != "exclude"}
    for key, one in lists.items():
        where = at(matrix.keys.get(key, one.mark), path, key)
        _check_key(key, where)
        if not isinstance(one.value, list) or not one.value:
            empty = isinstance(one.value, list)
            raise RecipeError(
                where=where,
                found="an empty list" if empty else f"{one.plain()!r}",
                allowed="a list of at least one value",
                fix=f"write {key}: [VALUE, VALUE], or remove the key"
                if empty
                else f"put it into brackets: {key}: [{one.plain()}]",
            )
    count = math.prod(len(one.value) for one in lists.values())
    if count > LARGEST:
        raise RecipeError(
            where=at(matrix.mark, path),
            found=f"{count:,} combinations",
            allowed=f"at most {LARGEST:,}",
            fix="write shorter lists, or several recipes",
        )
    found = [
        dict(zip(lists, chosen, strict=True))
        for chosen in itertools.product(*(one.value for one in lists.values()))
    ]
    exclude = matrix.get("exclude")
    for number, rule in enumerate(exclude.value if exclude is not None else ()):
        where = f"{path}.exclude.{number}"
        for key in rule.value:
            if key not in lists:
                raise unknown(at(rule.keys.get(key, rule.mark), where, key), key, list(lists))
        left = [one for one in found if not _matches(one, rule)]
        if len(left) == len(found):
            raise RecipeError(
                where=at(rule.mark, where),
                found="it excludes no combination",
                allowed="a combination of the values in the lists",
                fix="compare its values with those of the matrix, or remove it",
            )
        found = left
    if not found:
        raise RecipeError(
            where=at(matrix.mark, path),
            found="no combination is left",
            allowed="a matrix with at least one job",
            fix="exclude less",
        )
    many = [key for key, one in lists.items() if len(one.value) > 1]
    return [Combination(one, "-".join(label(key, one[key]) for key in many)) for one in found]


def _check_key(key: str, where: str) -> None:
    parts = key.split(".")
    for place in range(len(parts)):
        known = keys_at(JobKeys, parts[:place])
        if not known:  # inside free options, such as those of an optimiser
            return
        if parts[place] not in known:
            raise unknown(where, parts[place], known)


def _matches(values: dict[str, Node], rule: Node) -> bool:
    wanted = rule.plain()
    return bool(wanted) and all(
        key in values and values[key].plain() == value for key, value in wanted.items()
    )


def label(key: str, node: Node) -> str:
    """Return words for one value of a key, fit for a folder's name."""
    value = node.plain()
    name = key.rpartition(".")[2]
    if isinstance(value, list):
        value = "+".join(str(one) for one in value)
    elif isinstance(value, dict):
        value = "+".join(f"{one}{two}" for one, two in value.items())
    elif isinstance(value, bool):
        value = "yes" if value else "no"
    text = str(value)
    if name in ("model", "arch"):
        text = Architecture.parse(text).name
        return _UNSAFE.sub("-", Path(text).stem).strip("-.")
    if name in ("counterpart", "target", "method", "init"):
        return _UNSAFE.sub("-", text).strip("-.")
    return f"{name}={_UNSAFE.sub('-', text)}".strip("-.")
