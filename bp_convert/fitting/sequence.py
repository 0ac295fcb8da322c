"""Layer after layer: each reproduces the source's output from the inputs it now gets.

Layers before it are converted already, so what reaches a layer differs from what its trained
weight W expects. With x the source's input and x' the converted model's, the factors minimise
``E |W x - W' x'|^2``, which is ``tr((T - W') C' (T - W')^T)`` and a constant, with C' the moment of
x' and ``T = W E[x x'^T] C'^-1`` (in the manner of ThiNet, Luo, Wu and Lin, ICCV 2017, and of GPTQ,
Frantar et al., ICLR 2023, section 3; here for Kronecker sums). Means go into the bias.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from bp_convert.calibration.gatherer import Gatherer, Moments, Order, order_of
from bp_convert.calibration.moments import Moment
from bp_convert.calibration.tap import Batches, Tap
from bp_convert.fitting.norms import Norms, settle_norms
from bp_convert.fitting.together import TiedTables, names_of
from bp_convert.graph.clone import clone
from bp_convert.graph.tree import rows_in
from bp_convert.graph.walk import Site, walk
from bp_convert.kinds import Factors, Spread
from bp_convert.kron.als import fit_in_metric, natural
from bp_convert.kron.column_order import Columns
from bp_convert.kron.metric import Full, Metric
from bp_convert.values.plan import Plan
from bp_convert.values.progress import Progress, unheard

STAGES = 24  # passes over the data: layers that follow each other share one where there are more
SWEEPS = 30
ROUNDS = 3  # fits of a layer that is called several times, whose output is its own input
UNSEEN = "which rows each of its matrices gets is not looked at"
SETTLING = 4  # batches that norms settle on before a stage's inputs are looked at


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
    stages = _stages(order)
    tables = TiedTables(before, plan, wanted, order, batches)
    errors: dict[str, float] = {}
    for number, names in enumerate(stages):
        progress(f"fitting {names[0]}", number, len(stages))
        stage = [sites[name] for name in names]
        again = any(order.calls[name] > 1 for name in names)
        for _ in range(ROUNDS if again else 1):
            moments = _compared(before, after, stage, order, batches)
            for site in stage:
                if _seen(site, converted, moments):
                    error = _fit(site, converted, moments, tables)
                    if error is not None:
                        errors[site.name] = error
                    for name in names_of(tables.groups, site.name):
                        _brought(converted.get_submodule(name), after.get_submodule(name))
    errors.update(tables.errors(errors))
    settle_norms(source, converted, batches)
    progress("fitted", len(stages), len(stages))
    for site in wanted:
        if site.name not in errors:
            missed[site.name] = (
                "the calibration data did not reach all who share its factors"
                if site.name in tables.groups and site.name in order.calls
                else "the calibration data never reached it"
            )
    return errors, missed


def _stages(order: Order) -> list[list[str]]:
    """Return groups of layers that are fitted from one pass: those that read one tensor, and
    neighbours where there would be too many passes."""
    groups = order.together
    if len(groups) <= STAGES:
        return groups
    edges = [round(i * len(groups) / STAGES) for i in range(STAGES + 1)]
    return [[name for group in groups[a:b] for name in group] for a, b in pairwise(edges)]


def _compared(
    source: nn.Module,
    converted: nn.Module,
    stage: Sequence[Site],
    order: Order,
    batches: Batches,
) -> Moments:
    """Gather the moments of what the stage's layers get, beside what they got in the source."""
    gatherer = Gatherer(stage, order, sum(rows_in(batch) for batch in batches), cross=True)
    names = [site.name for site in stage]
    norms = Norms(source, converted)
    with norms, Tap(source, names, order.calls) as one, Tap(converted, names, order.calls) as two:
        for number, batch in enumerate(batches[:SETTLING] if norms.pairs else ()):
            one.run(batch, number)
            two.run(batch, number)
        for number, batch in enumerate(batches):
            before, after = one.run(batch, number), two.run(batch, number)
            gatherer.add(after, number, batch, before)
    return gatherer.result()


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


def _fit(site: Site, converted: nn.Module, moments: Moments, tables: TiedTables) -> float | None:
    """Fit every matrix of one layer; return the relative error of its output. None where it shares
    its factors, and not all who do were seen."""
    if site.name in tables.groups:
        return tables.fit(site, converted, moments)
    twin = converted.get_submodule(site.name)
    kind = site.kind
    choices = kind.choices(site.module, kind.widths(site.module))
    kind.rest(site.module, twin, Spread())
    gap = total = 0.0
    specs = _specs(twin)
    for role, matrices in kind.computed(site.module, specs).items():
        found = moments[site.name, role]
        metrics = {id(moment): moment.metric() for moment in found}
        spec = specs[role]
        columns = Columns.of(spec, choices[role].kernel)
        for index, weight in enumerate(matrices):
            moment = found[index * len(found) // len(matrices)]
            metric = metrics[id(moment)]
            target = _target(weight, moment, metric)
            near = fit_in_metric(
                target,
                spec,
                columns,
                metric,
                rows=_rows(moment, index, len(weight)),
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


def _rows(moment: Moment, index: int, outputs: int) -> Tensor | None:
    """Return how much the outputs of a role's matrix count, which may be a part of those that the
    moment speaks of."""
    weights = moment.weights
    if weights is None:
        return None
    many = len(weights) // outputs
    return weights.chunk(many)[index % many]


def _specs(twin: nn.Module) -> Factors:
    held: Any = twin.factors
    return dict(held) if isinstance(held, Mapping) else {"weight": held}


def _target(weight: Tensor, moment: Moment, metric: Metric) -> Tensor:
    """Return ``T = W E[x x'^T] C'^-1``, held to W by the metric's ridge; W where no
    moments tell."""
    across = moment.across()
    if across is None or not isinstance(metric, Full):
        return weight
    right = weight.double() @ across + metric.added * weight.double()  # (K, D)
    lower = torch.linalg.cholesky_ex(metric.matrix.double())
    if int(lower.info):
        return weight
    solved = torch.cholesky_solve(right.t(), lower.L).t()
    return solved.float()
