"""How widths travel: which layers of a model can be widened together, and what must follow.

The user's own forward runs once on tensors without data whose sizes are symbols. Wherever torch
or the model needs two sizes to agree, that equality is noted; the equalities say which layers
share a width, what is fixed and by which line. The sizes that are chosen are then checked by
running the model at them.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

import sympy
from torch import nn

from bp_convert.errors import PlanError
from bp_convert.fakes.fake_run import FakeRun, ForwardError, Shapes
from bp_convert.graph.running import Args, Kwargs
from bp_convert.graph.walk import walk
from bp_convert.widths.analysis import Analysis
from bp_convert.widths.plan_writer import PlanWriter, WidthPlan, unchanged
from bp_convert.widths.symbols import expr_of

_TRIES = 16  # runs at new sizes that may be spent on finding what does not widen


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
    sites = {site.name: site.kind for site in walk(model, bare=False)}
    try:
        analysis = Analysis(model, sites, args, kwargs)
    except ForwardError as stopped:
        return unchanged(model, sites, str(stopped))
    except PlanError as stopped:
        return unchanged(model, sites, stopped.found)
    return _Widening(analysis, args, kwargs, alpha, targets).run()


@dataclass
class _Widening:
    analysis: Analysis
    args: Args
    kwargs: Kwargs
    alpha: float
    targets: Mapping[str, str]
    tries: int = _TRIES

    @property
    def model(self) -> nn.Module:
        return self.analysis.copy.source

    def run(self) -> WidthPlan:
        plan, problem = self._attempt({})
        if problem is None:
            return plan
        with suppress(ForwardError):
            self.analysis.train(self.args, self.kwargs)
            plan, problem = self._attempt({})
        return plan if problem is None else self._isolate(problem)

    def _attempt(self, frozen: Mapping[sympy.Symbol, str]) -> tuple[WidthPlan, ForwardError | None]:
        """Choose sizes and run the model at them."""
        sizes = self.analysis.new_sizes(self.targets, self.alpha)
        for root, reason in frozen.items():
            sizes.freeze([root], reason)
        sizes.settle()
        try:
            plan = PlanWriter(self.analysis, sizes).plan()
        except ArithmeticError as problem:
            return self._unchanged(str(problem)), ForwardError("", str(problem))
        return plan, self._verify(plan) if plan.resizes or plan.attrs else None

    def _verify(self, plan: WidthPlan) -> ForwardError | None:
        """Run the model at the new sizes in both modes; return what is wrong, or None."""
        self.tries -= 1
        try:
            trial = FakeRun(self.model, plan.resizes, plan.attrs)
            found = trial.run(self.args, self.kwargs, training=False)
        except ForwardError as stopped:
            return stopped
        wanted = self.analysis.shapes[False]
        if found == wanted:
            try:
                found = trial.run(self.args, self.kwargs, training=True)
            except ForwardError as stopped:
                return stopped if self._in_training() is not None else None
            # The source runs in train mode only where it seems to differ from eval mode.
            wanted = found if found == wanted else self._in_training() or found
        where = next((w for w in {**wanted, **found} if found.get(w) != wanted.get(w)), None)
        if where is None:
            return None
        change = f"from {wanted.get(where)} to {found.get(where)}"
        return ForwardError("", f"the model's {where} changes {change}")

    def _in_training(self) -> Shapes | None:
        """Return the shapes of the source's outputs in train mode, None where it does not run."""
        shapes = self.analysis.shapes
        if True not in shapes:
            with suppress(ForwardError):
                shapes[True] = FakeRun(self.model).run(self.args, self.kwargs, training=True)
        return shapes.get(True)

    def _isolate(self, problem: ForwardError) -> WidthPlan:
        """Freeze what does not widen, and widen the rest."""
        sizes = self.analysis.new_sizes(self.targets, self.alpha)
        groups = [
            {root for name in group for root in sizes.roots[name]}
            for group in sizes.groups()
            if all(sizes.reason(name) is None for name in group)
        ]
        held_back: dict[sympy.Symbol, str] = {}
        while self.tries > _TRIES // 2:
            near = _near(self.analysis, problem.module)
            guilty = [group for group in groups if group & near]
            if not guilty:
                break
            for group in guilty:
                groups.remove(group)
                held_back.update(dict.fromkeys(group, _at_another_width(problem)))
            plan, found = self._attempt(held_back)
            if found is None:
                return plan
            problem = found
        return self._bisect(groups, held_back, problem)

    def _bisect(
        self,
        groups: list[set[sympy.Symbol]],
        held_back: Mapping[sympy.Symbol, str],
        problem: ForwardError,
    ) -> WidthPlan:
        """Add groups to what is widened, by halves, as long as the model runs."""
        good: list[set[sympy.Symbol]] = []
        best: WidthPlan | None = None
        waiting = [groups]
        while waiting and self.tries > 0:
            part = waiting.pop()
            frozen = dict(held_back)
            for group in groups:
                if group not in good and group not in part:
                    frozen.update(dict.fromkeys(group, _at_another_width(problem)))
            plan, found = self._attempt(frozen)
            if found is None:
                good += part
                best = plan
            elif len(part) > 1:
                half = len(part) // 2
                waiting += [part[half:], part[:half]]
        return best or self._unchanged(str(problem))

    def _unchanged(self, failure: str) -> WidthPlan:
        return unchanged(self.model, self.analysis.sites, failure)


def _at_another_width(problem: ForwardError) -> str:
    return f"at another width {problem}"


def _near(analysis: Analysis, module: str) -> set[sympy.Symbol]:
    """Return the free symbols in the tensors of a module and its direct children."""
    found: set[sympy.Symbol] = set()
    for name, held in analysis.copy.held.items():
        if name == module or (module and name.rpartition(".")[0] == module):
            sizes = [expr_of(size) for _, _, shape in held.state() for size in shape]
            found |= analysis.system.roots(sizes)
    return found
