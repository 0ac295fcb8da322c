"""Layer after layer: each reproduces the source's output from the inputs it now gets.

Layers before it are converted already, so what reaches a layer differs from what its trained
weight W expects. With x the source's input and x' the converted model's, the factors minimise
``E |W x - W' x'|^2``, which is ``tr((T - W') C' (T - W')^T)`` and a constant, with C' the moment of
x' and ``T = W E[x x'^T] C'^-1`` (in the manner of ThiNet, Luo, Wu and Lin, ICCV 2017, and of GPTQ,
Frantar et al., ICLR 2023, section 3; here for Kronecker sums). Means go into the bias.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from bp_convert.calibration.ahead import Ahead, beside
from bp_convert.calibration.gatherer import Moments, order_of
from bp_convert.calibration.held import Yardstick, parted
from bp_convert.calibration.moments import Moment
from bp_convert.calibration.norms import Norms, settle_norms
from bp_convert.calibration.replay import Replay
from bp_convert.calibration.slopes import Slopes, gather_slopes
from bp_convert.calibration.tap import Batches
from bp_convert.calibration.work import BACKWARD, SLOPES, passes_over, within
from bp_convert.fitting.together import Targets, Together
from bp_convert.graph.clone import clone
from bp_convert.graph.example import device_of
from bp_convert.graph.tree import rows_in
from bp_convert.graph.walk import Site, walk
from bp_convert.kinds import Factors, Spread
from bp_convert.kron.als import fit_in_metric, natural
from bp_convert.kron.column_order import Columns
from bp_convert.kron.metric import Diagonal, Metric
from bp_convert.values.plan import Plan
from bp_convert.values.progress import Progress, unheard

STAGES = 24  # passes over the data: layers that follow each other share one where there are more
FEWEST = 8  # of them, where passes take long
SWEEPS = 30
ROUNDS = 3  # fits of a layer that is called several times, whose output is its own input
FURTHER = "fitted to the data, the model is further off on examples held out of it"
UNSEEN = "which rows each of its matrices gets is not looked at"


@torch.no_grad()
def fit_to_data(
    source: nn.Module,
    converted: nn.Module,
    plan: Plan,
    batches: Batches,
    progress: Progress = unheard,
) -> tuple[dict[str, float], dict[str, str]]:
    """Fit the factors of every replaced layer of ``converted``, in place.

    Args:
        source: the model that was converted; it is run and left as it is.
        converted: its conversion by ``plan``; the factors of layers that start warm are set.
        batches: (args, kwargs) of forward; labels are not needed.

    Returns:
        The relative error of each fitted layer's output, and for each layer that no data reached,
        the reason; those keep the factors that they have.

    Raises:
        DataError: the model does not run on the data.
    """
    sites = {site.name: site for site in walk(source)}
    warm = [sites[layer.name] for layer in plan.converted if layer.init == "warm"]
    wanted = [site for site in warm if not site.kind.bare]
    missed = {site.name: UNSEEN for site in warm if site.kind.bare}
    if not wanted:
        return {}, missed
    # Copies, for models that write on themselves; the second gets what is fitted.
    before, after = clone(source, apart=True), clone(converted, apart=True)
    order = order_of(before, wanted, batches)
    batches, held = parted(batches)
    yardstick = Yardstick(clone(source, apart=True), held)
    start = {name: one.clone() for name, one in converted.state_dict().items()} if held else {}
    off = yardstick.error(clone(converted, apart=True)) if held else None
    passes, batches = stages_for(plan, batches, device_of(source))
    two = {one.name for one in plan.converted if one.sides == "both"}
    macs = 0 if plan.macs is None else plan.macs.before
    few = within(batches, BACKWARD * macs, SLOPES, device_of(source))
    slopes = gather_slopes(before, [one for one in wanted if one.name in two], few, progress)
    stages = order.stages(passes)
    ahead = Ahead(before, stages, order.calls, batches)
    norms, replay = Norms(before, after, batches), Replay(after)
    together = Together(before, plan, wanted, order, batches)
    errors: dict[str, float] = {}
    for number, names in enumerate(stages):
        progress(f"fitting {names[0]}", number, len(stages))
        stage = [sites[name] for name in names]
        again = any(order.calls[name] > 1 for name in names)
        for _ in range(ROUNDS if again else 1):
            moments = beside(after, stage, order, batches, ahead.of(number), norms, replay)
            targets = _targets(
                [one for one in stage if together.shares(one.name)], moments, plan.shrink
            )
            for site in stage:
                if _seen(site, converted, moments):
                    if together.shares(site.name):
                        error = together.fit(site, converted, moments, targets)
                    else:
                        error = _fit(site, converted, moments, slopes, plan.shrink)
                    if error is not None:
                        errors[site.name] = error
                    for name in together.names(site.name):
                        _brought(converted.get_submodule(name), after.get_submodule(name))
    errors.update(together.errors(errors))
    settle_norms(source, converted, batches)
    now = None if off is None else yardstick.error(clone(converted, apart=True))
    if off is not None and now is not None and now > off:
        converted.load_state_dict(start)
        return {}, {**missed, **dict.fromkeys(errors, FURTHER)}
    progress("fitted", len(stages), len(stages))
    for site in wanted:
        if site.name not in errors:
            missed[site.name] = (
                "it shares factors, and not all who do were reached"
                if together.shares(site.name) and site.name in order.calls
                else "the calibration data never reached it"
            )
    return errors, missed


def stages_for(plan: Plan, batches: Batches, device: torch.device) -> tuple[int, Batches]:
    """Return in how many stages a plan's layers are fitted, and to which examples."""
    each = 0 if plan.macs is None else plan.macs.before + plan.macs.after
    return passes_over(batches, each, STAGES, FEWEST, device)


def foretold_examples(model: nn.Module, plan: Plan, batches: Batches) -> Sequence[str]:
    """Return a line where layers are fitted to fewer examples than there are, or none."""
    mine = parted(batches)[0]
    _, few = stages_for(plan, mine, device_of(model))
    count, whole = sum(map(rows_in, few)), sum(map(rows_in, mine))
    if not plan.converted or count >= whole:
        return ()
    words = "more would take long for a model of this size"
    return (f"layers are fitted to {count} of the {whole} examples: {words}",)


def _seen(site: Site, converted: nn.Module, moments: Moments) -> bool:
    """Return whether the data reached every matrix of a layer of the converted model."""
    roles = _specs(converted.get_submodule(site.name))
    return all(
        moment.count for role in roles for moment in moments.get((site.name, role), ())
    ) and all((site.name, role) in moments for role in roles)


def _brought(layer: nn.Module, other: nn.Module) -> None:
    """Give a layer's copy its parameters."""
    for mine, found in zip(other.parameters(), layer.parameters(), strict=True):
        mine.copy_(found)


def _targets(sites: Sequence[Site], moments: Moments, shrink: float) -> Targets:
    """Return what layers that share a factor are to reproduce, and in which metric: one object for
    those that read one tensor."""
    metrics: dict[int, Metric] = {}
    found = {}
    for site in sites:
        held = moments.get((site.name, "weight"))
        if held and held[0].count and not site.kind.lookup:
            if id(held[0]) not in metrics:
                metrics[id(held[0])] = held[0].metric(shrink)
            metric = metrics[id(held[0])]
            weight = site.kind.computed(site.module)["weight"][0]
            found[site.name] = (held[0].target(weight, metric), metric)
    return found


def _fit(
    site: Site,
    converted: nn.Module,
    moments: Moments,
    slopes: Slopes | None = None,
    shrink: float = 0.0,
) -> float:
    """Fit every matrix of one layer; return the relative error of its output."""
    twin = converted.get_submodule(site.name)
    kind = site.kind
    choices = kind.choices(site.module, kind.widths(site.module))
    kind.rest(site.module, twin, Spread())
    gap = total = 0.0
    specs = _specs(twin)
    for role, matrices in kind.computed(site.module, specs).items():
        found = moments[site.name, role]
        metrics = {id(moment): moment.metric(shrink) for moment in found}
        slope = (slopes or {}).get((site.name, role))
        counts = None if slope is None else slope.forms(len(matrices), shrink)
        spec = specs[role]
        columns = Columns.of(spec, choices[role].kernel)
        for index, weight in enumerate(matrices):
            moment = found[index * len(found) // len(matrices)]
            metric = metrics[id(moment)]
            target = moment.target(weight, metric)
            near = fit_in_metric(
                target,
                spec,
                columns,
                metric,
                outputs=_outputs(moment, index, len(weight)) if counts is None else counts[index],
                sweeps=SWEEPS,
                name=site.name,
            )
            kind.place(twin, role, index, near.w1, near.w2)
            fitted = natural(near.w1, near.w2, columns)[:, : weight.shape[1]]
            if moment.centred and not kind.lookup:
                before, after = moment.other_mean.float(), moment.mean.float()
                kind.shift(twin, role, index, weight @ before - fitted @ after)
            lost, size = moment.error(weight, fitted)
            gap, total = gap + lost, total + size
    return (gap / total) ** 0.5 if total else 0.0


def _outputs(moment: Moment, index: int, outputs: int) -> Diagonal | None:
    """Return how much the outputs of a role's matrix count, which may be a part of those that the
    moment speaks of."""
    weights = moment.weights
    if weights is None:
        return None
    many = len(weights) // outputs
    return Diagonal(weights.chunk(many)[index % many].square())


def _specs(twin: nn.Module) -> Factors:
    held: Any = twin.factors
    return dict(held) if isinstance(held, Mapping) else {"weight": held}
