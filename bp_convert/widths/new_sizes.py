"""New sizes for the free symbols: every group of layers widened that nothing holds back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import floor

import sympy

from bp_convert.widths.symbols import Equality
from bp_convert.widths.system import System, holds, number

_REPAIRS = 200


@dataclass(frozen=True)
class Widenable:
    """A layer whose output may be widened: its width and whether alpha counts squared."""

    width: sympy.Expr
    squared: bool


class NewSizes:
    """Sizes that satisfy a system of equalities, with as many layers widened as possible.

    Layers that depend on one symbol form a group and are widened by one factor: alpha squared
    where all of them are convolutions, else alpha (paper, table of parameters). A group that an
    equality does not allow to grow is frozen, with the reason.
    """

    def __init__(
        self,
        system: System,
        sizes: Mapping[sympy.Symbol, int],
        layers: Mapping[str, Widenable],
        alpha: float,
    ) -> None:
        self.system = system
        self.layers = layers
        self.alpha = alpha
        self.frozen: dict[sympy.Symbol, str] = {}
        self.before = dict(sizes)
        self.values: dict[sympy.Symbol, int] = dict(sizes)
        self._parent: dict[sympy.Symbol, sympy.Symbol] = {}
        self._solved: dict[sympy.Symbol, int] = {}
        self.roots = {
            name: system.resolve(layer.width).free_symbols for name, layer in layers.items()
        }
        for roots in self.roots.values():
            self._join(roots)
        # Symbols of the rest are resolved once; their numbers change, their form does not.
        self._rest = [
            Equality(system.resolve(one.left), system.resolve(one.right), one.origin)
            for one in system.rest
        ]

    def freeze(self, roots: Iterable[sympy.Symbol], reason: str) -> None:
        """Let symbols, and every group that they are in, keep their sizes."""
        groups = {self._find(root) for root in roots if root in self._parent}
        for root in {*roots, *(r for r in self._parent if self._find(r) in groups)}:
            self.frozen.setdefault(root, reason)

    def reason(self, name: str) -> str | None:
        """Say what froze a layer's group, or None."""
        return next((self.frozen[r] for r in self.roots[name] if r in self.frozen), None)

    def groups(self) -> list[frozenset[str]]:
        """Return the layers that share a factor, group by group."""
        found: dict[sympy.Symbol, set[str]] = {}
        for name, roots in self.roots.items():
            for root in roots:
                found.setdefault(self._find(root), set()).add(name)
        return [frozenset(names) for names in found.values()]

    def settle(self) -> None:
        """Choose all sizes; merge or freeze groups until every equality holds."""
        self._assign()
        for attempt in range(_REPAIRS):
            broken = next((one for one in self._rest if not holds(one, self.values)), None)
            if broken is None:
                return
            self._repair(broken, last=attempt > _REPAIRS // 2)
            self._assign()
        self.freeze(self._parent, "the equalities of its sizes could not be satisfied")
        self._solved.clear()
        self._assign()

    def new(self, expr: sympy.Expr) -> int:
        """Return the new size of an expression.

        Raises:
            ArithmeticError: it has no whole value.
        """
        found = number(self.system.resolve(expr), self.values)
        if found is None:
            raise ArithmeticError(f"{expr} has no whole value at the new sizes")
        return found

    def _factor(self, root: sympy.Symbol) -> float:
        return self._factors.get(self._find(root), 1.0)

    def _assign(self) -> None:
        squared: dict[sympy.Symbol, bool] = {}
        for name, layer in self.layers.items():
            for root in self.roots[name]:
                group = self._find(root)
                squared[group] = squared.get(group, True) and layer.squared
        self._factors = {
            g: self.alpha**2 if all_of else self.alpha for g, all_of in squared.items()
        }
        self.values = {**self.before, **self._solved}
        for symbol in self._parent:
            if symbol not in self.frozen:
                size = floor(self.before[symbol] * self._factor(symbol) + 0.5)
                self.values[symbol] = max(1, size)

    def _repair(self, broken: Equality, *, last: bool) -> None:
        symbols = broken.left.free_symbols | broken.right.free_symbols
        ours = [s for s in symbols if s in self._parent and s not in self.frozen]
        loose = [s for s in symbols if s not in self._parent and s not in self.frozen]
        if not last and loose and self._follow(broken, loose):
            return
        bound = any(s in self.frozen for s in symbols)
        if len({self._find(s) for s in ours}) > 1 and not bound and not last:
            factors = {self._factor(s) for s in ours}
            if len(factors) > 1:
                self._join(ours)
                self._solved.clear()
                return
        self.freeze(ours or loose, f"a size is tied to it by {broken.origin}")
        self._solved.clear()

    def _follow(self, broken: Equality, loose: list[sympy.Symbol]) -> bool:
        """Let symbols that belong to no group follow, so that an equality holds."""
        fresh = [s for s in loose if s not in self._solved]
        factors = dict.fromkeys([self.alpha, self.alpha**2])
        tries = [[s] for s in sorted(fresh, key=lambda s: s.name)]
        for symbols in [*tries, fresh]:
            for factor in factors:
                sizes = {s: floor(self.before[s] * factor + 0.5) for s in symbols}
                if sizes and holds(broken, {**self.values, **sizes}):
                    self._solved.update(sizes)
                    return True
        for symbol in sorted(loose, key=lambda s: (s in self._solved, s.name)):
            size = self._solve(broken, symbol)
            if size is not None and size != self._solved.get(symbol):
                self._solved[symbol] = size
                return True
        return False

    def _solve(self, broken: Equality, symbol: sympy.Symbol) -> int | None:
        """Find the size of one symbol that satisfies a polynomial equality."""
        symbols = broken.left.free_symbols | broken.right.free_symbols
        known = {s: sympy.Integer(self.values[s]) for s in symbols if s is not symbol}
        zero = sympy.expand((broken.left - broken.right).xreplace(known))
        if not zero.is_polynomial(symbol):
            return None
        whole = [r for r in sympy.roots(zero, symbol) if r.is_Integer and r > 0]
        return int(whole[0]) if whole else None

    def _find(self, root: sympy.Symbol) -> sympy.Symbol:
        while self._parent[root] is not root:
            self._parent[root] = self._parent[self._parent[root]]
            root = self._parent[root]
        return root

    def _join(self, roots: Iterable[sympy.Symbol]) -> None:
        members = sorted(roots, key=lambda s: s.name)
        for one in members:
            self._parent.setdefault(one, one)
        for one in members[1:]:
            self._parent[self._find(one)] = self._find(members[0])
        reason = next((self.frozen[m] for m in members if m in self.frozen), None)
        if reason is not None:
            self.freeze(members, reason)
