"""One symbolic run of a model: what its sizes must satisfy, and what its outputs are made of."""

from __future__ import annotations

from collections.abc import Mapping

import sympy
from torch import nn

from bp_convert.fakes.fake import call
from bp_convert.fakes.fake_run import ForwardError, Shapes, failure
from bp_convert.graph.running import Args, Kwargs, nothing_cached
from bp_convert.graph.tree import named_tensors
from bp_convert.kinds import Kind
from bp_convert.widths.new_sizes import NewSizes, Widenable
from bp_convert.widths.symbolic_copy import SymbolicCopy
from bp_convert.widths.symbolic_mode import SymbolicMode, sizes_as_floats
from bp_convert.widths.symbols import SizeEnv, expr_of
from bp_convert.widths.system import System


class Analysis:
    """A model that ran on symbolic sizes, in eval mode.

    Attributes:
        sites: the layers that some kind speaks for, by their first name.
        copy: the copy that ran.
        system: the equalities that the run needed, solved.
        outputs: sizes of the model's outputs, by words for where each lies.
        shapes: the outputs' shapes in the source, by training mode.

    Raises:
        ForwardError: the forward stopped.
        PlanError: the model cannot be copied.
    """

    system: System

    def __init__(
        self, model: nn.Module, sites: Mapping[str, Kind], args: Args, kwargs: Kwargs
    ) -> None:
        env = SizeEnv()
        self.sites = sites
        self.copy = SymbolicCopy(model, env, SymbolicMode(env))
        self.outputs: dict[str, tuple[sympy.Expr, ...]] = {}
        self.shapes: dict[bool, Shapes] = {}
        self._run(args, kwargs, training=False)

    def train(self, args: Args, kwargs: Kwargs) -> None:
        """Run the same copy in train mode as well, so that what only training reaches has its say.

        Raises:
            ForwardError: the forward stopped.
        """
        self._run(args, kwargs, training=True)

    def _run(self, args: Args, kwargs: Kwargs, *, training: bool) -> None:
        copy, env = self.copy, self.copy.env
        env.running.clear()
        try:
            with nothing_cached(copy.source), sizes_as_floats():
                found = call(copy.module, copy.mode, args, kwargs, training=training)
        except Exception as problem:
            raise failure(problem, env.running) from problem
        outputs = {where: tuple(map(expr_of, t.shape)) for where, t in named_tensors(found)}
        for where, sizes in outputs.items():
            if any(one.free_symbols - env.values.keys() for one in sizes):
                why = f"the size of its {where} depends on numbers that it computes"
                raise ForwardError("", why, looks_at_data=True)
        for where, sizes in outputs.items():
            self.outputs[f"{where} in train mode" if where in self.outputs else where] = sizes
        self.shapes[training] = {w: tuple(map(env.value, sizes)) for w, sizes in outputs.items()}
        widths = [self.width(name) for name in self.sites]
        chosen = [width for width in widths if isinstance(width, sympy.Symbol)]
        self.system = System(env.equalities, chosen, copy.given)

    def width(self, name: str) -> sympy.Expr | None:
        """Return the width that a layer puts out; None where nothing is known of it."""
        held = self.copy.held.get(name)
        return None if held is None or held.sizes.output is None else expr_of(held.sizes.output)

    def calls(self, name: str) -> bool:
        """Return whether the run called a module."""
        return name in self.copy.called

    def follows(self, name: str) -> bool:
        """Return whether a layer's own width is nobody's to choose: it is that of its inputs, it is
        grouped, or the model uses its weight without calling it."""
        held = self.copy.held[name]
        if self.sites[name].follows or getattr(held.module, "groups", 1) != 1:
            return True
        used = any(expr_of(size) in self.system.compared for size in held.inputs)
        return used and not self.calls(name)

    def new_sizes(self, targets: Mapping[str, str], alpha: float) -> NewSizes:
        """Set up the choice of new sizes, with everything frozen that must not change."""
        layers: dict[str, Widenable] = {}
        for name, kind in self.sites.items():
            width = self.width(name)
            if width is not None and not self.follows(name):
                layers[name] = Widenable(width, kind.squared)
        free = {s: v for s, v in self.copy.env.values.items() if s not in self.system.replaced}
        choice = NewSizes(self.system, free, layers, alpha)
        for where, sizes in self.outputs.items():
            for axis, size in enumerate(sizes):
                reason = f"it reaches the model's {where}, axis {axis}"
                choice.freeze(self.system.resolve(size).free_symbols, reason)
        for name in layers:
            if not self.calls(name):
                choice.freeze(choice.roots[name], f"{name} is never called on the example input")
        for name in layers:
            if name not in targets:
                choice.freeze(choice.roots[name], f"{name} is not selected")
        return choice
