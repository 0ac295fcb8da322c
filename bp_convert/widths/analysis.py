"""One symbolic run of a model: what its sizes must satisfy, and what its outputs are made of."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import sympy
from torch import nn

from bp_convert.graph.fake import call
from bp_convert.graph.fake_run import ForwardError, Shapes, failure
from bp_convert.graph.running import Args, Kwargs, nothing_cached
from bp_convert.graph.tree import named_tensors
from bp_convert.kinds import Kind, kind_of
from bp_convert.widths.new_sizes import NewSizes, Widenable
from bp_convert.widths.symbolic_copy import SizedModule, SymbolicCopy
from bp_convert.widths.symbolic_mode import SymbolicMode, sizes_as_floats
from bp_convert.widths.symbols import SizeEnv, expr_of
from bp_convert.widths.system import System

Outputs = dict[str, tuple[sympy.Expr, ...]]


@dataclass
class Analysis:
    """A model that ran on symbolic sizes.

    Attributes:
        sites: the layers that some kind speaks for, by their first name.
        copy: the copy that ran.
        system: the equalities that the run needed, solved.
        outputs: sizes of the model's outputs, by words for where each lies.
        heads: layers that returned one of the outputs themselves.
        shapes: the outputs' shapes in the source, by training mode.
    """

    sites: Mapping[str, Kind]
    copy: SymbolicCopy
    system: System
    outputs: Outputs
    heads: frozenset[str]
    shapes: dict[bool, Shapes]

    def width(self, name: str) -> sympy.Expr | None:
        """Return the width that a layer puts out; None where nothing is known of it."""
        held = self.copy.held.get(name)
        return None if held is None else _width(held)

    def calls(self, name: str) -> bool:
        """Return whether the run called a module."""
        return name in self.copy.called

    def follows(self, name: str) -> bool:
        """Return whether a layer's own width is nobody's to choose: it is grouped, or the model
        uses its weight without calling it."""
        held = self.copy.held[name]
        if getattr(held.module, "groups", 1) != 1:
            return True
        return not self.calls(name) and self.copy.uses(held.inputs)

    def sizes(self) -> dict[sympy.Symbol, int]:
        """Return the free symbols with their sizes in the source."""
        values = self.copy.env.values
        return {s: v for s, v in values.items() if s not in self.system.replaced}

    def new_sizes(self, targets: Mapping[str, str], alpha: float) -> NewSizes:
        """Set up the choice of new sizes, with everything frozen that must not change."""
        layers: dict[str, Widenable] = {}
        for name, kind in self.sites.items():
            width = self.width(name)
            if width is not None and not self.follows(name):
                layers[name] = Widenable(width, kind.squared)
        choice = NewSizes(self.system, self.sizes(), layers, alpha)
        for where, axis, size in self.axes():
            reason = f"it reaches the model's {where}, axis {axis}"
            choice.freeze(self.system.resolve(size).free_symbols, reason)
        for name in layers:
            if not self.calls(name):
                choice.freeze(choice.roots[name], f"{name} is never called on the example input")
        for name in layers:
            if name not in targets:
                choice.freeze(choice.roots[name], f"{name} is not selected")
        return choice

    def axes(self) -> Iterator[tuple[str, int, sympy.Expr]]:
        """Yield every axis of every output: where it lies, its number, its size."""
        for where, sizes in self.outputs.items():
            for axis, size in enumerate(sizes):
                yield where, axis, size


def sites_of(model: nn.Module) -> dict[str, Kind]:
    """Return the layers that some kind speaks for, by their first name."""
    found = ((name, kind_of(module)) for name, module in model.named_modules())
    return {name: kind for name, kind in found if kind is not None}


def analyse(model: nn.Module, sites: Mapping[str, Kind], args: Args, kwargs: Kwargs) -> Analysis:
    """Run a model in eval mode on symbolic sizes.

    Raises:
        ForwardError: the forward stopped.
        PlanError: the model cannot be copied.
    """
    env = SizeEnv()
    copy = SymbolicCopy(model, env, SymbolicMode(env))
    outputs, heads = _run(copy, args, kwargs, training=False)
    shapes = {False: _shapes(env, outputs)}
    return Analysis(sites, copy, _system(copy, sites), outputs, heads, shapes)


def with_training(analysis: Analysis, args: Args, kwargs: Kwargs) -> Analysis:
    """Run the same copy in train mode as well, so that what only training reaches has its say.

    Raises:
        ForwardError: the forward stopped.
    """
    copy = analysis.copy
    found, heads = _run(copy, args, kwargs, training=True)
    outputs = dict(analysis.outputs)
    for where, sizes in found.items():
        outputs[where if where not in outputs else f"{where} in train mode"] = sizes
    shapes = {**analysis.shapes, True: _shapes(copy.env, found)}
    system = _system(copy, analysis.sites)
    return Analysis(analysis.sites, copy, system, outputs, heads | analysis.heads, shapes)


def _run(
    copy: SymbolicCopy, args: Args, kwargs: Kwargs, *, training: bool
) -> tuple[Outputs, frozenset[str]]:
    running = copy.env.running
    running.clear()
    try:
        with nothing_cached(copy.source), sizes_as_floats():
            found = call(copy.module, copy.mode, args, kwargs, training=training)
    except Exception as problem:
        raise failure(problem, running) from problem
    leaves = list(named_tensors(found))
    heads = {name for name, one in copy.returned.items() if any(one is t for _, t in leaves)}
    copy.returned.clear()
    outputs = {where: tuple(expr_of(d) for d in t.shape) for where, t in leaves}
    for where, sizes in outputs.items():
        if any(one.free_symbols - copy.env.values.keys() for one in sizes):
            raise ForwardError(
                "",
                f"the size of its {where} depends on numbers that it computes",
                looks_at_data=True,
            )
    return outputs, frozenset(heads)


def _system(copy: SymbolicCopy, sites: Mapping[str, Kind]) -> System:
    widths = [_width(copy.held[name]) for name in sites if name in copy.held]
    chosen = [width for width in widths if isinstance(width, sympy.Symbol)]
    return System(copy.env.equalities, chosen, copy.given)


def _width(held: SizedModule) -> sympy.Expr | None:
    return None if held.sizes.output is None else expr_of(held.sizes.output)


def _shapes(env: SizeEnv, outputs: Outputs) -> Shapes:
    return {where: tuple(env.value(size) for size in sizes) for where, sizes in outputs.items()}
