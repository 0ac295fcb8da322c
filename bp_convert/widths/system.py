"""The equalities of one forward, solved: which sizes are one size, and which are fixed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import gcd

import sympy

from bp_convert.widths.symbols import Equality

Values = Mapping[sympy.Symbol, int]


@dataclass(frozen=True)
class Replaced:
    """A symbol's expression over others, and the equality that says so."""

    expr: sympy.Expr
    equality: Equality
    order: int


class System:
    """Equalities between sizes.

    What is linear is used up to replace symbols by others, so that few remain free; what is not
    (divisibility, floors, products) is left in ``rest`` and checked on numbers.

    Args:
        equalities: in the order in which the forward met them.
        chosen: widths that are somebody's to choose; they stay free rather than others, and never
            follow a sum.
        given: widths that the layer before gives; they are the first to be replaced.

    Attributes:
        compared: every symbol that some equality speaks of.
        replaced: symbols that others stand for.
        rest: equalities that are not linear.
    """

    def __init__(
        self,
        equalities: Sequence[Equality],
        chosen: Sequence[sympy.Symbol] = (),
        given: Iterable[sympy.Symbol] = (),
    ) -> None:
        self._chosen = {symbol: index for index, symbol in enumerate(chosen)}
        self._given = frozenset(given)
        self.compared = {
            s for one in equalities for side in (one.left, one.right) for s in side.free_symbols
        }
        self.replaced: dict[sympy.Symbol, Replaced] = {}
        waiting = list(equalities)
        while waiting:
            left = [one for one in waiting if not self._use(one)]
            if len(left) == len(waiting):
                break
            waiting = left
        self.rest = waiting

    def resolve(self, expr: sympy.Expr) -> sympy.Expr:
        """Write an expression over free symbols only."""
        while True:
            known = {s: self.replaced[s].expr for s in expr.free_symbols if s in self.replaced}
            if not known:
                return expr
            expr = sympy.expand(expr.xreplace(known))

    def roots(self, exprs: Iterable[sympy.Expr]) -> set[sympy.Symbol]:
        """Return the free symbols on which expressions depend."""
        found: set[sympy.Symbol] = set()
        for expr in exprs:
            found |= self.resolve(expr).free_symbols
        return found

    def why_fixed(self, expr: sympy.Expr) -> Equality | None:
        """Return the equality that first fixed a size to a number, or None if none did."""
        todo = list(expr.free_symbols)
        seen: set[sympy.Symbol] = set()
        found: Replaced | None = None
        while todo:
            symbol = todo.pop()
            step = self.replaced.get(symbol)
            if symbol in seen or step is None:
                continue
            seen.add(symbol)
            todo.extend(step.equality.left.free_symbols | step.equality.right.free_symbols)
            if step.expr.is_number and (found is None or step.order < found.order):
                found = step
        return found.equality if found else None

    def _use(self, equality: Equality) -> bool:
        left, right = self.resolve(equality.left), self.resolve(equality.right)
        if left == right:
            return True
        if left.is_Symbol and right.is_Symbol:
            old, new = sorted((left, right), key=self._order, reverse=True)
            return self._replace(old, new, equality)
        for symbol, plain in ((left, right), (right, left)):
            if symbol.is_Symbol and plain.is_number:
                return self._replace(symbol, plain, equality)
        solved = self._solve(sympy.expand(left - right))
        return solved is not None and (
            solved[0] is None or self._replace(solved[0], solved[1], equality)
        )

    def _replace(self, symbol: sympy.Symbol, expr: sympy.Expr, equality: Equality) -> bool:
        self.replaced[symbol] = Replaced(expr, equality, len(self.replaced))
        return True

    def _order(self, symbol: sympy.Symbol) -> tuple[bool, int, str]:
        place = self._chosen.get(symbol, len(self._chosen))
        return symbol in self._given, place, symbol.name

    def _solve(self, zero: sympy.Expr) -> tuple[sympy.Symbol | None, sympy.Expr] | None:
        """Solve ``zero == 0`` for one symbol in whole multiples of the others.

        Returns (None, ...) where it holds anyway, None where it cannot be solved so.
        """
        terms = zero.as_coefficients_dict()
        if not zero.free_symbols:
            return (None, zero) if zero == 0 else None
        if not all(c.is_Integer for c in terms.values()):
            return None
        content = gcd(*(int(c) for c in terms.values()))
        bound = {s for term in terms if not term.is_Symbol for s in term.free_symbols}
        linear = [t for t in terms if t.is_Symbol and t not in bound]
        # What stands in no layer's output gives way first.
        for symbol in sorted(linear, key=self._order, reverse=True):
            factor = int(terms[symbol]) // content
            rest = {t: -int(c) // content for t, c in terms.items() if t != symbol}
            if any(c % factor for c in rest.values()):
                continue
            rest = {t: c // factor for t, c in rest.items()}
            if symbol not in self._given and (len(rest) > 1 or any(c < 0 for c in rest.values())):
                continue
            return symbol, sympy.Add(*(c * t for t, c in rest.items()))
        return None


def number(expr: sympy.Expr, values: Values) -> int | None:
    """Compute an expression, or return None where it has no whole value at these sizes."""
    try:
        found = expr.xreplace({s: sympy.Integer(values[s]) for s in expr.free_symbols})
        found = sympy.expand(found)
    except (ZeroDivisionError, ValueError, ArithmeticError):
        return None
    return int(found) if found.is_Integer else None


def holds(equality: Equality, values: Values) -> bool:
    """Return whether both sides are equal at these sizes."""
    left, right = number(equality.left, values), number(equality.right, values)
    return left is not None and left == right
