"""Chosen sizes written down as a plan of widths, with a reason for every layer that stays."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import sympy
from torch import nn

from bp_convert.kinds import Kind
from bp_convert.kinds.shapes import Attr, Size
from bp_convert.values.plan import AttrChange, Resize
from bp_convert.widths.analysis import Analysis
from bp_convert.widths.new_sizes import NewSizes
from bp_convert.widths.symbols import expr_of


@dataclass(frozen=True)
class TargetWidth:
    """The widths of one layer before and after, and why its output stays (None: it grows)."""

    inputs: tuple[int, int]
    outputs: tuple[int, int]
    reason: str | None


@dataclass(frozen=True)
class WidthPlan:
    """All widths of a model after widening.

    Attributes:
        targets: every layer that some kind speaks for, by its first name.
        resizes: every tensor that changes shape.
        attrs: every attribute that changes.
        failure: why nothing could be widened, in words. None where the model ran at these sizes,
            with outputs of the same shapes, in eval mode and in train mode (in eval mode only
            where the source does not run in train mode either).
    """

    targets: dict[str, TargetWidth]
    resizes: tuple[Resize, ...] = ()
    attrs: tuple[AttrChange, ...] = ()
    failure: str | None = None


@dataclass(frozen=True)
class PlanWriter:
    """Turns an analysis and the sizes chosen for it into a WidthPlan."""

    analysis: Analysis
    sizes: NewSizes

    def plan(self) -> WidthPlan:
        """Write the plan.

        Raises:
            ArithmeticError: a size has no whole value at the chosen sizes.
        """
        return WidthPlan(
            targets={name: self._target(name) for name in self.analysis.sites},
            resizes=tuple(self._resizes()),
            attrs=tuple(self._attrs()),
        )

    def _resizes(self) -> list[Resize]:
        found: list[Resize] = []
        seen: set[int] = set()
        for held in self.analysis.copy.held.values():
            for key, tensor, shape in held.state():
                before = tuple(tensor.shape)
                after = tuple(self.sizes.new(expr_of(size)) for size in shape)
                if before != after and id(tensor) not in seen:
                    seen.add(id(tensor))
                    name = join(held.name, key)
                    found.append(Resize(name=name, before=before, after=after))
        return found

    def _attrs(self) -> list[AttrChange]:
        found: list[AttrChange] = []
        for held in self.analysis.copy.held.values():
            for key, before, size in held.attributes():
                new = self._new(size)
                if new != before:
                    path, _, attr = key.rpartition(".")
                    module = join(held.name, path)
                    found.append(AttrChange(module=module, attr=attr, before=before, after=new))
        return found

    def _new(self, size: Attr) -> Size:
        if isinstance(size, tuple):
            return tuple(self.sizes.new(expr_of(one)) for one in size)
        return self.sizes.new(expr_of(size))

    def _target(self, name: str) -> TargetWidth:
        held = self.analysis.copy.held.get(name)
        if held is None:
            return self._part(name)
        kind = self.analysis.sites[name]
        inputs, outputs = kind.widths(held.module)
        new_inputs = self._new(held.sizes.attrs.get(kind.fields[0], inputs))
        width = self.analysis.width(name)
        new_outputs = outputs if width is None else self.sizes.new(width)
        assert isinstance(new_inputs, int)
        reason = None if new_outputs != outputs else self._reason(name)
        return TargetWidth((inputs, new_inputs), (outputs, new_outputs), reason)

    def _part(self, name: str) -> TargetWidth:
        """Return the widths of a layer whose tensors belong to the module that holds it."""
        module = self.analysis.copy.source.get_submodule(name)
        inputs, outputs = self.analysis.sites[name].widths(module)
        parent, _, own = name.rpartition(".")
        held = self.analysis.copy.held.get(parent)
        size = None if held is None else held.sizes.attrs.get(f"{own}.out_features")
        if size is None:
            fixed = self.analysis.copy.fixed.items()
            why = next((r for n, r in fixed if f"{name}.".startswith(f"{n}." if n else "")), "")
            return TargetWidth((inputs, inputs), (outputs, outputs), why)
        new = self._new(size)
        assert isinstance(new, int)
        reason = None if new != outputs else f"it is part of {parent}, which keeps its width"
        return TargetWidth((inputs, new), (outputs, new), reason)

    def _reason(self, name: str) -> str:
        """Say why a layer's output keeps its width."""
        if self.sizes.alpha == 1:
            return "alpha is 1"
        system, width = self.analysis.system, self.analysis.width(name)
        if name in self.sizes.roots:
            if not self.analysis.calls(name):
                return "never called on the example input"
            frozen = self.sizes.reason(name)
            if frozen is not None:
                return frozen.removeprefix(f"{name} is ")
        if width is None:
            return "its width is not known"
        equality = system.why_fixed(width)
        if equality is not None and system.resolve(width).is_number:
            return f"fixed to {system.resolve(width)} by {equality.origin}"
        if name not in self.sizes.roots:
            return "it follows the layers around it, which keep their width here"
        return f"its width is {_words(system.resolve(width), self._names())}, which stays"

    def _names(self) -> dict[sympy.Symbol, sympy.Expr]:
        """Name every symbol after a layer whose width it is, or else after where it stands."""
        names: dict[sympy.Symbol, sympy.Expr] = {}
        for name, layer in self.sizes.layers.items():
            times, root = self.analysis.system.resolve(layer.width).as_coeff_Mul()
            if root.is_Symbol:
                names.setdefault(root, sympy.Symbol(f"{name}.out") / times)
        for symbol, name in self.analysis.copy.env.names.items():
            names.setdefault(symbol, sympy.Symbol(name))
        return names


def unchanged(model: nn.Module, sites: Mapping[str, Kind], failure: str) -> WidthPlan:
    """Return a plan in which every layer keeps its width for one reason."""
    targets = {}
    for name, kind in sites.items():
        inputs, outputs = kind.widths(model.get_submodule(name))
        targets[name] = TargetWidth((inputs, inputs), (outputs, outputs), failure)
    return WidthPlan(targets=targets, failure=failure)


def join(path: str, name: str) -> str:
    """Join two parts of a dotted name, either of which may be empty."""
    return f"{path}.{name}" if path and name else path or name


def _words(expr: sympy.Expr, names: Mapping[sympy.Symbol, sympy.Expr]) -> str:
    """Write a size over the names of layers."""
    used = {symbol: names[symbol] for symbol in expr.free_symbols}
    if expr.is_polynomial():
        return str(sympy.expand(expr.xreplace(used)))
    layers = sorted({str(s) for name in used.values() for s in name.free_symbols})
    return f"computed from {', '.join(layers)}"
