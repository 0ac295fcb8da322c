"""YAML and JSON as a tree that knows where each value stands; words of a command line alike."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from bp_convert.errors import RecipeError

LARGEST = 50_000  # values in one file; aliases of aliases grow without bounds
Key = str | int


@dataclass(frozen=True)
class Mark:
    """A place in a file; lines and columns count from 1."""

    file: str
    line: int
    column: int

    def __str__(self) -> str:
        return f"{self.file}, line {self.line}, column {self.column}"


@dataclass(frozen=True)
class Node:
    """A value with the place where it stands.

    Attributes:
        value: a dict of Nodes by key, a list of Nodes, or a scalar.
        mark: where it begins.
        keys: of a dict, where each key stands.
    """

    value: Any
    mark: Mark
    keys: Mapping[str, Mark] = field(default_factory=dict)

    def plain(self) -> Any:
        """Return the value without marks."""
        if isinstance(self.value, dict):
            return {key: one.plain() for key, one in self.value.items()}
        if isinstance(self.value, list):
            return [one.plain() for one in self.value]
        return self.value

    def at(self, path: tuple[Key, ...]) -> Mark:
        """Return where the value at a path stands: its key's place, if it has one."""
        node, mark = self, self.mark
        for key in path:
            if isinstance(node.value, dict) and key in node.value:
                mark = node.keys.get(str(key), node.value[key].mark)
                node = node.value[key]
            elif isinstance(node.value, list) and isinstance(key, int) and key < len(node.value):
                node = node.value[key]
                mark = node.mark
            else:
                break
        return mark

    def get(self, key: str) -> Node | None:
        """Return the value under a key of a dict, or None."""
        found = self.value.get(key) if isinstance(self.value, dict) else None
        return found if isinstance(found, Node) else None

    def without(self, *keys: str) -> Node:
        """Return a dict without some keys."""
        left = {key: one for key, one in self.value.items() if key not in keys}
        return replace(self, value=left)


class _Loader(yaml.SafeLoader):
    """YAML 1.2's plain values: `no` and `1:30` are text, `1e-3` is a number."""


_Loader.yaml_implicit_resolvers = {}
for _tag, _form, _first in (
    ("bool", r"^(?:true|True|TRUE|false|False|FALSE)$", "tTfF"),
    ("int", r"^[-+]?(?:0|[1-9][0-9_]*|0x[0-9a-fA-F]+|0o[0-7]+)$", "-+0123456789"),
    (
        "float",
        r"^[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?$|^[-+]?\.(?:inf|Inf|INF)$"
        r"|^\.(?:nan|NaN|NAN)$",
        "-+0123456789.",
    ),
    ("null", r"^(?:~|null|Null|NULL|)$", ["~", "n", "N", ""]),
    ("merge", r"^(?:<<)$", "<"),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(_form), list(_first))


def read_word(text: str) -> Any:
    """Read a value that stands on a command line as it would be read in a file."""
    try:
        found = yaml.load(text, _Loader)
    except (yaml.YAMLError, ValueError, RecursionError):
        return text
    return text if isinstance(found, str) else found  # as it was typed, # and blanks included


def read_tree(path: Path) -> Node:
    """Read a YAML or JSON file.

    Raises:
        RecipeError: it cannot be read, its syntax is wrong, or a key stands twice in a mapping.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as problem:
        raise RecipeError(
            where=str(path),
            found=problem.strerror or str(problem),
            allowed="a YAML or JSON file that can be read",
            fix="check the path",
        ) from None
    except UnicodeDecodeError as problem:
        raise RecipeError(
            where=f"{path}, byte {problem.start}",
            found="bytes that are not UTF-8",
            allowed="YAML or JSON text in UTF-8",
            fix="save the file as UTF-8",
        ) from None
    try:
        loader = _Loader(text)
        try:
            root = loader.get_single_node()
            if root is None:
                return Node({}, Mark(str(path), 1, 1))
            return _Tree(loader, str(path)).node(root)
        finally:
            loader.dispose()
    except yaml.YAMLError as problem:
        raise _syntax(path, problem) from None
    except RecursionError:
        raise RecipeError(
            where=str(path),
            found="values in values in values, without an end",
            allowed="a few levels",
            fix="close the brackets, or indent less",
        ) from None


def _syntax(path: Path, problem: yaml.YAMLError) -> RecipeError:
    mark = getattr(problem, "problem_mark", None) or getattr(problem, "context_mark", None)
    place = f"{path}, line {mark.line + 1}, column {mark.column + 1}" if mark else str(path)
    words = [getattr(problem, "context", None), getattr(problem, "problem", None)]
    found = ": ".join(str(one) for one in words if one) or str(problem).splitlines()[0]
    tabs = "\\t" in found
    return RecipeError(
        where=place,
        found=f"this is no YAML: {found}",
        allowed="`key: value`, one a line, nested by two spaces",
        fix="indent with spaces, not tabs"
        if tabs
        else "look at this line and the one above: brackets, quotes, the space after a colon",
    )


class _Tree:
    def __init__(self, loader: _Loader, file: str) -> None:
        self.loader = loader
        self.file = file
        self.count = 0
        self.above: list[int] = []  # nodes that are being read: an alias to one is a cycle

    def node(self, node: yaml.Node) -> Node:
        mark = Mark(self.file, node.start_mark.line + 1, node.start_mark.column + 1)
        self.count += 1
        if id(node) in self.above or self.count > LARGEST:
            raise RecipeError(
                where=str(mark),
                found="an alias of what it stands in" if id(node) in self.above else "no end",
                allowed=f"at most {LARGEST:,} values in a file",
                fix="write the value out instead of the alias",
            )
        self.above.append(id(node))
        try:
            return self._read(node, mark)
        finally:
            self.above.pop()

    def _read(self, node: yaml.Node, mark: Mark) -> Node:
        if isinstance(node, yaml.MappingNode):
            keys: dict[str, Mark] = {}
            found: dict[str, Node] = {}
            for name, key, value in self._pairs(node):
                place = Mark(self.file, key.start_mark.line + 1, key.start_mark.column + 1)
                if name in found:
                    raise RecipeError(
                        where=f"{place}, at {name}",
                        found=f"{name!r} stands here and in line {keys[name].line}",
                        allowed="each key once",
                        fix="remove one of the two",
                    )
                keys[name] = place
                found[name] = self.node(value)
            return Node(found, mark, keys)
        if isinstance(node, yaml.SequenceNode):
            return Node([self.node(one) for one in node.value], mark)
        try:
            value = self.loader.construct_object(node, deep=True)
        except ValueError as problem:  # a number of thousands of digits
            raise yaml.constructor.ConstructorError(
                None, None, str(problem), node.start_mark
            ) from None
        return Node(value, mark)

    def _pairs(self, node: yaml.MappingNode) -> Iterator[tuple[str, yaml.Node, yaml.Node]]:
        """Yield the pairs of a mapping; what `<<` brings in is weaker than what stands there."""
        own = [(key, value) for key, value in node.value if not _merges(key)]
        names = set()
        for key, value in own:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(
                    None, None, "a key that is no word", key.start_mark
                )
            names.add(key.value)
            yield key.value, key, value
        for key, value in node.value:
            if not _merges(key):
                continue
            parts = value.value if isinstance(value, yaml.SequenceNode) else [value]
            for part in parts:
                if not isinstance(part, yaml.MappingNode):
                    raise yaml.constructor.ConstructorError(
                        None, None, "<< takes a mapping", part.start_mark
                    )
                self.count += len(part.value)
                for name, inner, given in self._pairs(part):
                    if name not in names:
                        names.add(name)
                        yield name, inner, given


def _merges(key: yaml.Node) -> bool:
    return isinstance(key, yaml.ScalarNode) and key.tag == "tag:yaml.org,2002:merge"
