"""A recipe file read into its jobs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from bp_convert.batch.matrix import Combination, combinations
from bp_convert.errors import RecipeError
from bp_convert.values.explain import at, validated
from bp_convert.values.marks import Mark, Node, read_tree
from bp_convert.values.recipe import TRAININGS, Job, Recipe

_EITHER = {"steps": "epochs", "epochs": "steps"}  # of which a training has one
_OWN = ("name", "about", "extends", "output")  # of one file; nobody inherits them
_NOT_JOBS = (*_OWN, "defaults", "matrix", "jobs")


@dataclass(frozen=True)
class Stated:
    """A job and the tree that states it, for errors that come to light later."""

    job: Job
    node: Node

    def at(self, key: str) -> str:
        """Write where a key of this job stands."""
        return at(self.node.at(tuple(key.split("."))), key)


@dataclass(frozen=True)
class Book:
    """A recipe that was read.

    Attributes:
        name: of the recipe.
        path: its file.
        about: what it is for.
        output: the folder of results.
        jobs: all of them, in order.
    """

    name: str
    path: Path
    about: str
    output: Path
    jobs: tuple[Stated, ...]


def read_recipe(path: Path) -> Book:
    """Read a recipe, what it extends, and its matrix.

    Raises:
        RecipeError: with file, line, column, and what to do.
    """
    tree = _with_base(path)
    top = validated(Recipe, tree)
    name = top.name or path.stem
    jobs = tuple(_jobs(tree, name))
    _check_names(jobs)
    output = Path(top.output) if top.output else Path("runs") / name
    return Book(name, path, top.about, output, jobs)


def _with_base(path: Path, above: tuple[Path, ...] = ()) -> Node:
    """Read a file, and lay it over the one that it extends."""
    tree = read_tree(path)
    validated(Recipe, tree)  # each file by itself, so that errors name the right one
    base = tree.get("extends")
    if base is None or base.value is None:
        return tree
    wanted = path.parent / str(base.value)
    chain = (*above, path.resolve())
    where = at(tree.at(("extends",)), "extends")
    if wanted.resolve() in chain:
        names = [one.name for one in (*chain[chain.index(wanted.resolve()) :], wanted.resolve())]
        raise RecipeError(
            where=where,
            found=f"a circle: {' extends '.join(names)}",
            allowed="recipes that extend others, which do not extend them in turn",
            fix="remove one of these `extends`; put what they share into a file of its own",
        )
    if not wanted.is_file():
        raise RecipeError(
            where=where,
            found=f"no file {wanted}",
            allowed="a recipe, named relative to this file",
            fix="correct the path",
        )
    return merge(_with_base(wanted, chain).without(*_OWN), tree)


def _jobs(tree: Node, name: str) -> list[Stated]:
    base = tree.without(*_NOT_JOBS)
    defaults = tree.get("defaults")
    if defaults is not None and isinstance(defaults.value, dict):
        base = merge(defaults, base)
    entries = tree.get("jobs")
    stated = []
    for chosen in combinations(tree.get("matrix")):
        if entries is None or not entries.value:
            stated.append(_job(base, [chosen], "", name, tree.mark))
            continue
        for number, entry in enumerate(entries.value):
            path = f"jobs.{number}"
            _check_apart(chosen, entry, path)
            given = entry.get("name")
            own = str(given.value) if given is not None else f"job{number + 1}"
            node = merge(base, entry.without("name", "matrix"))
            for inner in combinations(entry.get("matrix"), f"{path}.matrix"):
                stated.append(_job(node, [chosen, inner], own, own, entry.at(("name",))))
    return stated


def _job(
    node: Node, chosen: Sequence[Combination], prefix: str, fallback: str, mark: Mark
) -> Stated:
    for one in chosen:
        for key, value in one.values.items():
            node = put(node, tuple(key.split(".")), value)
    parts = [prefix, *(one.suffix for one in chosen)]
    name = "-".join(part for part in parts if part) or fallback
    keys = {**node.keys, "name": mark}
    node = Node({**node.value, "name": Node(name, mark)}, node.mark, keys)
    return Stated(validated(Job, node, f"job {name}" if prefix else ""), node)


def _check_apart(chosen: Combination, entry: Node, path: str) -> None:
    """Refuse a key that both the matrix and a job set."""
    for key in chosen.values:
        if entry.get(key) is not None:
            raise RecipeError(
                where=at(entry.at((key,)), path, key),
                found=f"{key} stands in this job and in the recipe's matrix",
                allowed="one of the two",
                fix="remove it here, or give the other jobs a matrix of their own",
            )


def _check_names(jobs: Sequence[Stated]) -> None:
    seen: dict[str, Stated] = {}
    for one in jobs:
        first = seen.setdefault(one.job.name.lower(), one)
        if first is not one:
            raise RecipeError(
                where=one.at("name"),
                found=f"the name {one.job.name!r} is taken by {first.at('name')}",
                allowed="a name of its own for each job: it names the job's folder",
                fix="give one of the two jobs another name",
            )


def merge(base: Node, over: Node, key: str = "") -> Node:
    """Lay one tree over another. Lists and scalars replace; `null` takes a mapping away.

    Args:
        key: under which both stand.
    """
    if not (isinstance(base.value, dict) and isinstance(over.value, dict)):
        return over
    left = base.value
    if key in TRAININGS:
        away = {_EITHER[name] for name in over.value if name in _EITHER}
        left = {name: one for name, one in left.items() if name not in away}
    values = dict(left)
    for name, one in over.value.items():
        values[name] = merge(values[name], one, name) if name in values else one
    return replace(over, value=values, keys={**base.keys, **over.keys})


def put(node: Node, path: tuple[str, ...], value: Node) -> Node:
    """Return a tree with a value at a path; mappings on the way are made."""
    head, *rest = path
    below = node.get(head)
    if rest:
        empty = Node({}, value.mark)
        inner = below if below is not None and isinstance(below.value, dict) else empty
        placed = put(inner, tuple(rest), value)
    else:
        placed = value if below is None else merge(below, value, head)
    if head in TRAININGS and rest and rest[0] in _EITHER:
        placed = placed.without(_EITHER[rest[0]])
    marks = {**node.keys, head: value.mark if not rest else node.keys.get(head, value.mark)}
    return replace(node, value={**node.value, head: placed}, keys=marks)
