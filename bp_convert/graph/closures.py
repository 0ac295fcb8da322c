"""Functions inside a copied model, made to speak of the copy.

deepcopy takes functions for constants: a hook that closes over its model goes on reading and
writing the original. Here every function that a copy holds, and that reaches a copied object by a
closure, a default, a bound method or a weak reference, is made anew for the copy.
"""

from __future__ import annotations

import copy
import functools
import types
import weakref
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

_BOXES = (dict, list, set, deque)
_NOTHING = object()


def reconnect(memo: dict[int, Any], *, apart: bool) -> None:
    """Make the functions in a copy anew where they reach what was copied.

    Args:
        memo: of the deepcopy: the copies by the ``id`` of what they were made of.
        apart: also copy lists and dictionaries that only functions reach.
    """
    made = _Anew(memo, apart)
    for key, one in list(memo.items()):
        if key == id(memo) or isinstance(one, Tensor | type):
            continue
        if isinstance(one, list):
            made.in_items(one, dict(enumerate(one)))
        elif isinstance(one, dict):
            made.in_items(one, one)
        own = getattr(one, "__dict__", None)
        if isinstance(own, dict) and not isinstance(one, types.ModuleType | types.FunctionType):
            made.in_items(own, own)


@dataclass
class _Anew:
    """Gives the counterpart in the copy of whatever a function holds."""

    memo: dict[int, Any]
    apart: bool
    done: dict[int, tuple[Any, Any]] = field(default_factory=dict)  # each with its counterpart

    def in_items(self, box: Any, items: Mapping[Any, Any]) -> None:
        """Exchange the functions in a list or dictionary of the copy."""
        for key, value in list(items.items()):
            if any(map(_acts, value if isinstance(value, tuple) else (value,))):
                new = self._made(value) if isinstance(value, tuple) else self.of(value)
                if new is not value:
                    box[key] = new

    def of(self, value: Any) -> Any:
        """Return the counterpart of a value; itself where it reaches nothing that was copied."""
        if id(value) in self.done:
            return self.done[id(value)][1]
        found = self.memo.get(id(value), _NOTHING)
        if found is not _NOTHING:
            return found
        new = self._made(value)
        self.done[id(value)] = (value, new)
        return new

    def _made(self, value: Any) -> Any:
        if not self._reaches(value, set()):
            return value
        if isinstance(value, types.FunctionType):
            return self._function(value)
        if isinstance(value, types.MethodType):
            return types.MethodType(self.of(value.__func__), self.of(value.__self__))
        if isinstance(value, types.BuiltinMethodType):
            return getattr(self.of(value.__self__), value.__name__)
        if isinstance(value, functools.partial):
            named = {key: self.of(one) for key, one in value.keywords.items()}
            return functools.partial(self.of(value.func), *map(self.of, value.args), **named)
        if isinstance(value, weakref.ref):
            return weakref.ref(self.of(value()))
        if isinstance(value, tuple):
            new = [self.of(one) for one in value]
            return type(value)(*new) if hasattr(value, "_fields") else type(value)(new)
        return copy.deepcopy(value, self.memo)

    def _function(self, old: types.FunctionType) -> types.FunctionType:
        cells = tuple(types.CellType() for _ in old.__closure__ or ())
        new = types.FunctionType(old.__code__, old.__globals__, old.__name__, None, cells)
        self.done[id(old)] = (old, new)  # it may hold itself
        new.__defaults__ = self.of(old.__defaults__)
        new.__kwdefaults__ = {k: self.of(v) for k, v in (old.__kwdefaults__ or {}).items()}
        new.__dict__.update({key: self.of(one) for key, one in vars(old).items()})
        new.__qualname__, new.__module__ = old.__qualname__, old.__module__
        for cell, one in zip(cells, old.__closure__ or (), strict=True):
            held = _content(one)
            if held is not _NOTHING:
                cell.cell_contents = self.of(held)
        return new

    def _reaches(self, value: Any, known: set[int]) -> bool:
        """Return whether a value leads to something that was copied, or is to be."""
        if id(value) in known:
            return False
        known.add(id(value))
        if self.memo.get(id(value), value) is not value:
            return True
        if self.apart and isinstance(value, _BOXES):
            return True
        return any(self._reaches(one, known) for one in _parts(value))


def _parts(value: Any) -> list[Any]:
    """Return what a value that deepcopy takes for a constant, or a tuple, leads to."""
    if isinstance(value, types.FunctionType):
        cells = [_content(cell) for cell in value.__closure__ or ()]
        defaults = [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
        return [*cells, *defaults, *vars(value).values()]
    if isinstance(value, types.MethodType):
        return [value.__self__, value.__func__]
    if isinstance(value, types.BuiltinMethodType):
        return [value.__self__]
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, weakref.ref):
        return [value()]
    return list(value) if isinstance(value, tuple) else []


def _acts(value: Any) -> bool:
    """Return whether deepcopy takes a value for a constant though it leads elsewhere."""
    return isinstance(
        value,
        types.FunctionType
        | types.MethodType
        | types.BuiltinMethodType
        | functools.partial
        | weakref.ref,
    ) and not isinstance(value, nn.Module)


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return _NOTHING
