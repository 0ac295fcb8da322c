"""How widths travel: which layers of a model can be widened together, and what must follow.

The user's own forward runs once on tensors without data whose sizes are symbols. Wherever torch
or the model needs two sizes to agree, that equality is noted; the equalities say which layers
share a width, what is fixed and by which line. The sizes that are chosen are then checked by
running the model at them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import sympy
from torch import nn

from bp_convert.errors import PlanError
from bp_convert.graph.choose import Choice, Wish
from bp_convert.graph.forms import Attr
from bp_convert.graph.ghost import Ghost, Held
from bp_convert.graph.observe import Args, Kwargs
from bp_convert.graph.phantom import PhantomMode, call, outputs_of
from bp_convert.graph.symbols import Dim, SizeEnv, expr_of
from bp_convert.graph.system import System
from bp_convert.graph.verify import Failure, Shapes, Trial, words
from bp_convert.kinds import Kind, kind_of

Outputs = dict[str, tuple[sympy.Expr, ...]]

_TRIES = 16  # runs at new sizes that may be spent on finding what does not widen


@dataclass(frozen=True)
class Resize:
    """A parameter or buffer that changes shape.

    Attributes:
        name: dotted state name, the first of its aliases.
        before: shape in the source.
        after: shape after widening.
        groups: for each axis, its size in words such as ``49*features.0.out``; None where fixed.
    """

    name: str
    before: tuple[int, ...]
    after: tuple[int, ...]
    groups: tuple[str | None, ...]


@dataclass(frozen=True)
class AttrChange:
    """A plain attribute of a module that changes with the widths."""

    module: str
    attr: str
    before: int | tuple[int, ...]
    after: int | tuple[int, ...]


@dataclass(frozen=True)
class TargetWidth:
    """The widths of one layer, and why its output is not widened (None where it is)."""

    module: str
    inputs_before: int
    inputs_after: int
    outputs_before: int
    outputs_after: int
    reason: str | None


@dataclass(frozen=True)
class WidthPlan:
    """All widths of a model after widening.

    Attributes:
        targets: every layer that some kind speaks for, by name.
        resizes: every tensor that changes shape.
        attrs: every attribute that changes.
        verified: the model ran at these sizes in eval and train mode, outputs as before.
        failure: why nothing could be widened, in words; None where the analysis succeeded.
        never_called: layers that the example does not call.
        output_layers: layers whose output features are an axis of the model's output.
        groups: layers that must share one factor.
    """

    targets: dict[str, TargetWidth]
    resizes: tuple[Resize, ...] = ()
    attrs: tuple[AttrChange, ...] = ()
    verified: bool = False
    failure: str | None = None
    never_called: tuple[str, ...] = ()
    output_layers: tuple[str, ...] = ()
    groups: tuple[frozenset[str], ...] = ()


def widen(
    model: nn.Module,
    args: Args,
    kwargs: Kwargs,
    *,
    alpha: float,
    targets: Mapping[str, str],
) -> WidthPlan:
    """Find the widths of ``model`` with the outputs of ``targets`` multiplied.

    A group of layers that must agree is widened by ``alpha`` squared where it holds convolutions
    only, else by ``alpha`` (paper, table of parameters). Other layers keep their outputs, and
    follow in their inputs. The model is only read; no weight is copied.

    Args:
        args: positional example inputs, with a batch of at least 2.
        kwargs: keyword example inputs.
        alpha: may be fractional; widths are rounded to whole numbers.
        targets: names of the layers that may be widened, with the name of their kind.
    """
    return _Widening(model, args, kwargs, alpha, targets).run()


@dataclass
class _Analysis:
    """One symbolic run: the ghost, its equalities solved, and the outputs' sizes."""

    ghost: Ghost
    system: System
    outputs: Outputs
    shapes: dict[bool, Shapes]  # by training mode


@dataclass
class _Widening:
    model: nn.Module
    args: Args
    kwargs: Kwargs
    alpha: float
    targets: Mapping[str, str]
    sites: dict[str, Kind] = field(default_factory=dict)
    tries: int = _TRIES

    def __post_init__(self) -> None:
        for name, module in self.model.named_modules():
            kind = kind_of(module)
            if kind is not None:
                self.sites[name] = kind

    def run(self) -> WidthPlan:
        try:
            analysis = self._analyse()
        except (Failure, PlanError) as problem:
            return self._unchanged(_words(problem))
        plan, problem = self._attempt(analysis)
        if problem is None or self.alpha == 1:
            return plan
        try:  # what only training reaches has its say as well
            analysis = self._with_training(analysis)
        except Failure:
            return self._isolate(analysis, problem)
        plan, problem = self._attempt(analysis)
        return plan if problem is None else self._isolate(analysis, problem)

    # Analysis

    def _analyse(self) -> _Analysis:
        env = SizeEnv()
        ghost = Ghost(self.model, env, PhantomMode(env))
        outputs = self._call(ghost, training=False)
        shapes = {False: _shapes(env, outputs)}
        return _Analysis(ghost, System(env.equalities, self._kept(ghost)), outputs, shapes)

    def _with_training(self, analysis: _Analysis) -> _Analysis:
        """Run the same ghost in train mode as well."""
        ghost = analysis.ghost
        found = self._call(ghost, training=True)
        outputs = dict(analysis.outputs)
        for where, sizes in found.items():
            outputs[where if where not in outputs else f"{where} in train mode"] = sizes
        shapes = {**analysis.shapes, True: _shapes(ghost.env, found)}
        system = System(ghost.env.equalities, self._kept(ghost))
        return _Analysis(ghost, system, outputs, shapes)

    def _call(self, ghost: Ghost, *, training: bool) -> Outputs:
        running = ghost.env.running
        running.clear()
        try:
            found = call(ghost.module, ghost.mode, self.args, self.kwargs, training=training)
        except Exception as problem:
            raise Failure(running[-1] if running else "", words(problem)) from problem
        return {where: tuple(expr_of(d) for d in t.shape) for where, t in outputs_of(found)}

    def _kept(self, ghost: Ghost) -> list[sympy.Symbol]:
        """Return the widths of layers, which stay free rather than others."""
        widths = (self._width(ghost.held[name]) for name in self.sites if name in ghost.held)
        return [w for w in widths if isinstance(w, sympy.Symbol)]

    @staticmethod
    def _width(held: Held) -> sympy.Expr | None:
        return None if held.sizes.output is None else expr_of(held.sizes.output)

    # Choice

    def _choice(self, analysis: _Analysis) -> Choice:
        ghost, system = analysis.ghost, analysis.system
        wishes: dict[str, Wish] = {}
        for name, kind in self.sites.items():
            held = ghost.held.get(name)
            width = None if held is None else self._width(held)
            if held is not None and width is not None and not _follows(held, ghost):
                wishes[name] = Wish(width, kind.squared)
        choice = Choice(system, self._roots(analysis), wishes, self.alpha)
        for where, sizes in analysis.outputs.items():
            for axis, size in enumerate(sizes):
                choice.freeze(
                    system.resolve(size).free_symbols,
                    f"it reaches the model's {where}, axis {axis}",
                )
        for name in wishes:
            if name not in ghost.called:
                choice.freeze(choice.roots[name], f"{name} is never called on the example input")
        for name in wishes:
            if name not in self.targets:
                choice.freeze(choice.roots[name], f"{name} is not selected")
        return choice

    @staticmethod
    def _roots(analysis: _Analysis) -> dict[sympy.Symbol, int]:
        env = analysis.ghost.env
        return {s: v for s, v in env.values.items() if s not in analysis.system.replaced}

    # Trial

    def _attempt(
        self, analysis: _Analysis, frozen: Mapping[sympy.Symbol, str] | None = None
    ) -> tuple[WidthPlan, Failure | None]:
        """Choose sizes and run the model at them."""
        choice = self._choice(analysis)
        for root, reason in (frozen or {}).items():
            choice.freeze([root], reason)
        choice.settle()
        try:
            plan = self._plan(analysis, choice)
        except ArithmeticError as problem:
            return self._unchanged(str(problem)), Failure("", str(problem))
        if not plan.resizes and not plan.attrs:
            return plan, None
        problem = self._verify(analysis, plan)
        return plan, problem

    def _verify(self, analysis: _Analysis, plan: WidthPlan) -> Failure | None:
        self.tries -= 1
        changed = {one.name: one.after for one in plan.resizes}
        shapes: dict[int, tuple[int, ...]] = {}
        for held in analysis.ghost.held.values():
            for key, tensor, _ in held.state():
                after = changed.get(_join(held.name, key))
                if after is not None:
                    shapes[id(tensor)] = after
        attrs: dict[str, dict[str, Attr]] = {}
        for one in plan.attrs:
            attrs.setdefault(one.module, {})[one.attr] = one.after
        try:
            trial = Trial(self.model, shapes, attrs)
            for training in (False, True):
                found = trial.run(self.args, self.kwargs, training=training)
                wanted = self._wanted(analysis, training, found)
                if found != wanted:
                    where = next((w for w in found if found[w] != wanted.get(w)), "output")
                    return Failure("", f"{where} changes to {found.get(where)}")
        except Failure as problem:
            return problem
        return None

    def _wanted(self, analysis: _Analysis, training: bool, found: Shapes) -> Shapes:
        """Return the outputs' shapes in the source; the source runs only where they differ from
        those in eval mode."""
        shapes = analysis.shapes
        if training not in shapes and found == shapes[False]:
            return found
        if training not in shapes:
            shapes[training] = Trial(self.model).run(self.args, self.kwargs, training=training)
        return shapes[training]

    def _isolate(self, analysis: _Analysis, problem: Failure) -> WidthPlan:
        """Freeze what does not widen, and widen the rest."""
        held_back: dict[sympy.Symbol, str] = {}
        choice = self._choice(analysis)
        groups = [
            {root for name in group for root in choice.roots[name]}
            for group in choice.groups()
            if all(choice.reason(name) is None for name in group)
        ]
        while problem is not None and self.tries > _TRIES // 2:
            near = self._near(analysis, problem.module)
            guilty = [g for g in groups if g & near]
            if not guilty:
                break
            for group in guilty:
                groups.remove(group)
                held_back.update(dict.fromkeys(group, f"at another width {problem}"))
            plan, found = self._attempt(analysis, held_back)
            if found is None:
                return plan
            problem = found
        return self._bisect(analysis, groups, held_back, problem)

    def _near(self, analysis: _Analysis, module: str) -> set[sympy.Symbol]:
        """Return the free symbols in the tensors of a module and its direct children."""
        found: set[sympy.Symbol] = set()
        for name, held in analysis.ghost.held.items():
            parent = name.rpartition(".")[0]
            if name == module or (parent == module and module):
                sizes = [size for _, _, shape in held.state() for size in shape]
                found |= analysis.system.roots(expr_of(size) for size in sizes)
        return found

    def _bisect(
        self,
        analysis: _Analysis,
        groups: list[set[sympy.Symbol]],
        held_back: dict[sympy.Symbol, str],
        problem: Failure,
    ) -> WidthPlan:
        """Add groups to what is widened, by halves, as long as the model runs."""
        reason = f"at another width {problem}"
        good: list[set[sympy.Symbol]] = []
        best: WidthPlan | None = None
        waiting = [groups]
        while waiting and self.tries > 0:
            part = waiting.pop()
            if not part:
                continue
            kept = {id(g) for g in [*good, *part]}
            frozen = dict(held_back)
            for group in groups:
                if id(group) not in kept:
                    frozen.update(dict.fromkeys(group, reason))
            plan, found = self._attempt(analysis, frozen)
            if found is None:
                good += part
                best = plan
            elif len(part) > 1:
                half = len(part) // 2
                waiting += [part[half:], part[:half]]
        return best or self._unchanged(str(problem), analysis)

    # The result

    def _plan(self, analysis: _Analysis, choice: Choice) -> WidthPlan:
        ghost, system = analysis.ghost, analysis.system
        name_of = self._namer(analysis, choice)
        resizes: list[Resize] = []
        attrs: list[AttrChange] = []
        seen: set[int] = set()
        for held in ghost.held.values():
            for key, tensor, shape in held.state():
                after = tuple(choice.new(expr_of(size)) for size in shape)
                if after == tuple(tensor.shape) or id(tensor) in seen:
                    continue
                seen.add(id(tensor))
                groups = tuple(name_of(system.resolve(expr_of(size))) for size in shape)
                resizes.append(
                    Resize(_join(held.name, key), tuple(tensor.shape), after, groups)
                )
            for key, before, size in held.attributes():
                new = _new_attribute(choice, size)
                if new != before:
                    path, _, attr = key.rpartition(".")
                    attrs.append(AttrChange(_join(held.name, path), attr, before, new))
        return WidthPlan(
            targets={name: self._target(name, analysis, choice) for name in self.sites},
            resizes=tuple(resizes),
            attrs=tuple(attrs),
            verified=True,
            never_called=tuple(n for n in self.sites if n not in ghost.called),
            output_layers=self._output_layers(analysis, choice),
            groups=tuple(choice.groups()),
        )

    def _target(self, name: str, analysis: _Analysis, choice: Choice) -> TargetWidth:
        module = self.model.get_submodule(name)
        inputs, outputs = self.sites[name].widths(module)
        held = analysis.ghost.held.get(name)
        if held is None:
            return self._part(name, analysis, choice)
        attrs = held.sizes.attrs
        key = next((k for k in ("in_features", "in_channels", "input_size") if k in attrs), None)
        new_inputs = inputs if key is None else _new_attribute(choice, attrs[key])
        width = self._width(held)
        new_outputs = outputs if width is None else choice.new(width)
        assert isinstance(new_inputs, int)
        reason = None
        if new_outputs == outputs:
            reason = self._reason(name, analysis, choice, width)
        return TargetWidth(name, inputs, new_inputs, outputs, new_outputs, reason)

    def _part(self, name: str, analysis: _Analysis, choice: Choice) -> TargetWidth:
        """Return the widths of a layer whose tensors belong to the module that holds it."""
        inputs, outputs = self.sites[name].widths(self.model.get_submodule(name))
        parent, _, own = name.rpartition(".")
        held = analysis.ghost.held.get(parent)
        size = None if held is None else held.sizes.attrs.get(f"{own}.out_features")
        new = outputs if size is None else _new_attribute(choice, size)
        assert isinstance(new, int)
        reason = None if new != outputs else next(
            (r for n, r in analysis.ghost.fixed.items() if name == n or name.startswith(f"{n}.")),
            f"it is part of {parent}, which keeps its width",
        )
        return TargetWidth(name, inputs, new if size is not None else inputs, outputs, new, reason)

    def _reason(
        self, name: str, analysis: _Analysis, choice: Choice, width: sympy.Expr | None
    ) -> str:
        if self.alpha == 1:
            return "alpha is 1"
        if name not in analysis.ghost.called and name in choice.roots:
            return "never called on the example input"
        found = choice.reason(name) if name in choice.roots else None
        if found is not None:
            return found.removeprefix(f"{name} is ")
        if width is not None and (equality := analysis.system.why_fixed(width)) is not None:
            return f"fixed to {analysis.ghost.env.value(width)} by {equality.origin}"
        if width is not None and name not in choice.roots:
            return "it follows the layers around it, which keep their width here"
        return "its width does not grow at this alpha"

    def _output_layers(self, analysis: _Analysis, choice: Choice) -> tuple[str, ...]:
        sizes = [size for shape in analysis.outputs.values() for size in shape]
        reached = analysis.system.roots(sizes)
        return tuple(name for name, roots in choice.roots.items() if roots & reached)

    def _namer(self, analysis: _Analysis, choice: Choice) -> Namer:
        names: dict[sympy.Symbol, sympy.Symbol] = {}
        for name, roots in choice.roots.items():
            if len(roots) == 1:
                names.setdefault(next(iter(roots)), sympy.Symbol(f"{name}.out"))
        for symbol, name in analysis.ghost.env.names.items():
            names.setdefault(symbol, sympy.Symbol(name))
        return Namer(names)

    def _unchanged(self, failure: str, analysis: _Analysis | None = None) -> WidthPlan:
        """Return a plan in which every width stays; a plain run tells what is called."""
        called, last = self._plain_run()
        targets = {}
        for name, kind in self.sites.items():
            inputs, outputs = kind.widths(self.model.get_submodule(name))
            targets[name] = TargetWidth(name, inputs, inputs, outputs, outputs, failure)
        return WidthPlan(
            targets=targets,
            failure=failure,
            never_called=tuple(n for n in self.sites if called and n not in called),
            output_layers=last,
        )

    def _plain_run(self) -> tuple[set[str], tuple[str, ...]]:
        """Return what is called, and the last layer that is: likely the one of the output."""
        try:
            trial = Trial(self.model)
            trial.run(self.args, self.kwargs, training=False)
        except (Failure, PlanError):
            return set(), ()
        last = [name for name in trial.called if name in self.sites][-1:]
        return set(trial.called), tuple(last)


@dataclass(frozen=True)
class Namer:
    """Writes sizes over the names of layers."""

    names: Mapping[sympy.Symbol, sympy.Symbol]

    def __call__(self, expr: sympy.Expr) -> str | None:
        if not expr.free_symbols:
            return None
        return str(expr.xreplace({s: self.names[s] for s in expr.free_symbols}))


def _shapes(env: SizeEnv, outputs: Outputs) -> Shapes:
    return {where: tuple(env.value(size) for size in sizes) for where, sizes in outputs.items()}


def _follows(held: Held, ghost: Ghost) -> bool:
    """Return whether a layer's own width is nobody's to choose: it is grouped, or the model uses
    its weight without calling it."""
    if getattr(held.module, "groups", 1) != 1:
        return True
    return held.name not in ghost.called and ghost.uses(held.inputs)


def _new_attribute(choice: Choice, value: Attr) -> int | tuple[int, ...]:
    if isinstance(value, tuple):
        return tuple(choice.new(expr_of(one)) for one in value)
    return choice.new(expr_of(value))


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path and name else path or name


def _words(problem: Failure | PlanError) -> str:
    return problem.found if isinstance(problem, PlanError) else str(problem)


__all__ = ["AttrChange", "Dim", "Resize", "TargetWidth", "WidthPlan", "widen"]
