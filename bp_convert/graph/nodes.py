"""torch's symbolic numbers, with a memory: the same sum or comparison is worked out once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import sympy
import torch

from bp_convert.torch_private import SymNode, expr_in

# One run asks the same few questions of strides and sizes tens of thousands of times.
_BINARY = (
    *("add", "sub", "mul", "mod", "int_floordiv", "sym_max", "sym_min"),
    *("eq", "ne", "lt", "le", "gt", "ge", "and_", "or_"),
)


class SizeNode(SymNode):
    """A symbolic number whose results are kept in its environment's ``results``."""

    def wrap_int(self, num: int) -> SymNode:
        results: dict[Any, SymNode] = self.shape_env.results  # type: ignore[union-attr]
        made = results.get(num)
        if made is None:
            made = results[num] = _adopt(super().wrap_int(num))
        return made


def _adopt(node: SymNode) -> SymNode:
    if type(node) is SymNode:
        node.__class__ = SizeNode
    return node


def _remembered(name: str) -> Callable[[SymNode, SymNode], SymNode]:
    work_out = getattr(SymNode, name)

    def method(self: SymNode, other: SymNode) -> SymNode:
        results: dict[Any, SymNode] = self.shape_env.results  # type: ignore[union-attr]
        key = (name, expr_in(self), self.pytype, expr_in(other), other.pytype)
        made = results.get(key)
        if made is None:
            made = results[key] = _adopt(work_out(self, other))
        return made

    return method


for _name in _BINARY:
    setattr(SizeNode, _name, _remembered(_name))


def size(expr: sympy.Expr, env: Any, value: int) -> torch.SymInt:
    """Make a symbolic integer of ``env`` that is ``value`` on the example."""
    return torch.SymInt(SizeNode(expr, env, int, value))
