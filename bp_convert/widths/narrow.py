"""How a model becomes narrower: one share of every layer's outputs, as many as a size allows."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from math import prod

import sympy
from torch import nn

from bp_convert.errors import PlanError
from bp_convert.fakes.fake_run import ForwardError
from bp_convert.graph.running import Args, Kwargs
from bp_convert.graph.walk import walk
from bp_convert.widths.analysis import Analysis
from bp_convert.widths.new_sizes import NewSizes
from bp_convert.widths.plan_writer import PlanWriter, WidthPlan

STEPS = 12  # halvings of the share: finer than any layer has outputs


@dataclass(frozen=True)
class Narrow:
    """Widths that fit a size.

    Attributes:
        widths: of every layer.
        groups: by layer, words that layers with the same outputs share; only layers whose
            outputs are chosen freely.
        share: of every free layer's outputs that is kept.
    """

    widths: WidthPlan
    groups: dict[str, str]
    share: float


def narrow(
    model: nn.Module, args: Args, kwargs: Kwargs, *, params: int, targets: dict[str, str]
) -> Narrow:
    """Find the largest share of every layer's outputs with which a model keeps to a size.

    Args:
        args: positional example inputs, with a batch of at least 2.
        kwargs: keyword example inputs.
        params: parameters at most.
        targets: layers that may become narrower, with the name of their kind.

    Raises:
        PlanError: the model does not run on symbolic sizes, or the size is out of reach.
    """
    try:
        sites = {site.name: site.kind for site in walk(model, bare=False)}
        analysis = Analysis(model, sites, args, kwargs)
        with suppress(ForwardError):  # a model that does not train is followed in eval mode
            analysis.train(args, kwargs)
    except ForwardError as stopped:
        raise _refused(model, str(stopped)) from None
    whole = sum(p.numel() for p in model.parameters())
    parameters = {name for name, _ in model.named_parameters()}
    low, high = 0.0, 1.0
    best: tuple[WidthPlan, NewSizes, float] | None = None
    for _ in range(STEPS):
        share = (low + high) / 2
        sizes = analysis.new_sizes(targets, share)
        sizes.layers = {name: replace(one, squared=False) for name, one in sizes.layers.items()}
        sizes.settle()
        plan = PlanWriter(analysis, sizes).plan()
        size = whole + sum(
            prod(one.after) - prod(one.before) for one in plan.resizes if one.name in parameters
        )
        if size <= params:
            low, best = share, (plan, sizes, share)
        else:
            high = share
    if best is None:
        raise PlanError(
            where=f"{type(model).__name__}, pruned to {params:,} parameters",
            found="a model that is larger with one output a layer",
            allowed="a size that narrower layers can reach",
            fix="ask for a larger model, or compare with low-rank layers",
        )
    plan, sizes, share = best
    if not plan.resizes:
        raise _refused(model, "no layer's outputs are free to be left out")
    return Narrow(plan, _groups(analysis, sizes, plan), share)


def _groups(analysis: Analysis, sizes: NewSizes, plan: WidthPlan) -> dict[str, str]:
    found = {}
    for name in sizes.layers:
        width = analysis.width(name)
        target = plan.targets[name]
        if width is None or target.outputs[0] == target.outputs[1]:
            continue
        resolved = analysis.system.resolve(width)
        if isinstance(resolved, sympy.Symbol):
            found[name] = str(resolved)
    return found


def _refused(model: nn.Module, why: str) -> PlanError:
    return PlanError(
        where=f"{type(model).__name__}, pruned",
        found=why,
        allowed="a model whose widths can be followed",
        fix="leave the pruned counterpart out, or describe the input with `input`",
    )
