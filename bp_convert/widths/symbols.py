"""Sizes that remember: integers that compute like numbers and note down what they must equal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any

import sympy
import torch
from sympy.logic.boolalg import BooleanAtom

from bp_convert.fakes.origin import Origin, origin_of
from bp_convert.kinds.shapes import Dim
from bp_convert.torch_private import ShapeEnv, SymNode, expr_in, new_symbol


@dataclass(frozen=True)
class Equality:
    """Two sizes that were found to be equal where the forward needed to know."""

    left: sympy.Expr
    right: sympy.Expr
    origin: Origin


class SizeEnv(ShapeEnv):
    """A shape environment that answers every question by the sizes of the example, and keeps the
    equalities that it affirmed.

    torch's own environment simplifies and substitutes at each question, which costs most of the
    time of a symbolic run; here the equalities are only noted and are solved once, at the end.
    """

    def __init__(self) -> None:
        super().__init__(duck_shape=False, specialize_zero_one=True, assume_static_by_default=False)
        self.equalities: list[Equality] = []
        self.values: dict[sympy.Symbol, int] = {}
        self.names: dict[sympy.Symbol, str] = {}
        self.running: list[str] = []  # the modules that are being called, innermost last
        self.results: dict[Any, SymNode] = {}  # of the arithmetic, see SizeNode
        self._answers: dict[sympy.Basic, sympy.Basic] = {}

    def symbol(self, name: str, value: int) -> Dim:
        """Return a size of this value that is free to change; 0 and 1 stay plain numbers."""
        if value <= 1:
            return value
        expr = new_symbol(self, value, f"width{len(self.names)}")
        self.names[expr] = name
        self.values[expr] = value
        return size(expr, self, value)

    def value(self, one: Dim | sympy.Expr) -> int:
        """Return the size that an expression has on the example."""
        expr = expr_of(one)
        return int(expr.xreplace({s: sympy.Integer(self.values[s]) for s in expr.free_symbols}))

    def evaluate_expr(
        self,
        orig_expr: sympy.Basic,
        hint: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> sympy.Basic:
        """Answer by the example's sizes; note an equality that holds."""
        known = self._answers.get(orig_expr)
        if known is not None:
            return known
        if isinstance(orig_expr, BooleanAtom) or orig_expr.is_number:
            return orig_expr
        if hint is None:
            if not orig_expr.free_symbols <= self.values.keys():
                return super().evaluate_expr(orig_expr, hint, *args, **kwargs)
            hint = orig_expr.xreplace(
                {s: sympy.Integer(self.values[s]) for s in orig_expr.free_symbols}
            )
        answer = sympy.sympify(hint)
        self._answers[orig_expr] = answer
        self._note(orig_expr, answer)
        return answer

    def pin(self, one: Dim) -> None:
        """Note that a size must stay as it is, for what is being run now."""
        if isinstance(one, torch.SymInt):
            origin = self.origin()
            self.equalities.append(Equality(expr_of(one), sympy.Integer(self.value(one)), origin))

    def _note(self, expr: sympy.Basic, answer: sympy.Basic) -> None:
        if answer is sympy.true:
            for one in expr.args if isinstance(expr, sympy.And) else (expr,):
                if isinstance(one, sympy.Eq):
                    self.equalities.append(Equality(one.lhs, one.rhs, self.origin()))
        elif answer is sympy.false:
            if isinstance(expr, sympy.Ne):
                self.equalities.append(Equality(expr.lhs, expr.rhs, self.origin()))
        elif expr.is_integer:
            # A plain number was asked for; numbers with a point are scales, not sizes.
            self.equalities.append(Equality(expr, answer, self.origin()))

    def _maybe_evaluate_static(  # type: ignore[override]
        self, expr: sympy.Basic, **kwargs: Any
    ) -> sympy.Basic | None:
        if isinstance(expr, BooleanAtom) or expr.is_number:
            return expr
        if expr.free_symbols <= self.values.keys():
            return None
        found: sympy.Basic | None = super()._maybe_evaluate_static(expr, **kwargs)
        return found

    def origin(self) -> Origin:
        """Return the innermost line of the model's own code that is running now."""
        running = self.running[-1] if self.running else ""
        return origin_of(_outwards(sys._getframe(1)), running)


def _outwards(frame: FrameType | None) -> Iterator[tuple[str, int]]:
    while frame is not None:
        yield frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back


def expr_of(one: Dim | sympy.Expr) -> sympy.Expr:
    """Return a size as an expression over the symbols that were created."""
    if isinstance(one, torch.SymInt):
        return expr_in(one.node)
    return sympy.sympify(one)


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
