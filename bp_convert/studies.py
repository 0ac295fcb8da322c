"""Before you decide: how far each layer can go, and what each target costs."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from bp_convert.counting import count_params
from bp_convert.data import Data, Uses, examples_for, split_for
from bp_convert.errors import PlanError
from bp_convert.evaluation import Scorer
from bp_convert.graph.merging import merged
from bp_convert.graph.running import draws_kept
from bp_convert.kron.als import low_rank
from bp_convert.planner import candidate_units
from bp_convert.provenance import machine, versions
from bp_convert.run.job import Given, Result, run
from bp_convert.run.opening import SourceModel
from bp_convert.run.written import Outputs
from bp_convert.search.curves import Curve
from bp_convert.search.method import settled
from bp_convert.search.units import Unit
from bp_convert.values.factors import FactorSpec
from bp_convert.values.progress import Progress, told
from bp_convert.values.recipe import Job
from bp_convert.values.settings import Settings
from bp_convert.values.study import Point, Probe, ProbeRow, Sweep
from bp_convert.values.target import Target

SHARES = (0.5, 0.25, 0.1, 0.05)
MIDDLE = 0.25
SCORED = 512  # examples that each point is scored on at most
ERROR = 0.3
GOOD = 0.01  # share of a metric that a recommended point may lose
CLOSE = 0.1  # estimated error that a recommended point may have, where nothing is scored


def probe(
    model: nn.Module,
    settings: Settings | None = None,
    *,
    calibrate: Data | None = None,
    shares: Sequence[float] = SHARES,
    error: float = ERROR,
    source: str = "",
    progress: Progress | bool | None = None,
) -> Probe:
    """Say how far every layer of ``model`` can be compressed; change nothing.

    Args:
        settings: which layers take part, and the inputs.
        calibrate: data that errors are measured on; None takes the weights' own errors.
        shares: of a layer's parameters, at which errors are given.
        error: relative error at which savings are counted.
        source: words on where the model came from.
        progress: called with words, steps done and their number; True draws a bar.
    """
    start = time.perf_counter()
    settings = settings or Settings()
    model = merged(model)[0] if settings.merge_adapters else model
    examples = None if calibrate is None else examples_for(model, calibrate, settings)
    with told(progress) as tell:
        units, reasons = candidate_units(model, settings, examples=examples, progress=tell)
    rows = _with_ways(units, [_row(unit, shares, error) for unit in units])
    rows.sort(key=lambda row: (-row.saves, -row.params))
    rows += [
        ProbeRow(
            layer=site.name,
            kind=site.kind.name,
            params=count_params(site.held).before,
            reason=reason,
        )
        for site, reason in reasons
    ]
    return Probe(
        model=f"{type(model).__module__}.{type(model).__qualname__}",
        source=source,
        shares=tuple(shares),
        error=error,
        calibration="" if examples is None else examples.source,
        rows=tuple(rows),
        seconds=time.perf_counter() - start,
        settings=settings,
        versions=versions(),
        machine=machine(),
    )


def _row(unit: Unit, shares: Sequence[float], error: float) -> ProbeRow:
    svd = next(curve for curve in unit.curves if low_rank(curve.spec))
    best, rank = _best(unit.curves, MIDDLE * unit.size)
    total = unit.matrices * unit.size
    fits = unit.errors <= error**2
    least = float(unit.costs[fits, 0].min()) if fits.any() else float(total)
    return ProbeRow(
        layer=unit.name,
        kind=unit.layer.site.kind.name,
        role=unit.role,
        shape=unit.shape,
        params=total,
        errors=tuple(_root(_best(unit.curves, s * unit.size)[0], s * unit.size) for s in shares),
        svd=tuple(_root(svd, s * unit.size) for s in shares),
        best=best.spec.model_copy(update={"rank": rank}) if rank else None,
        saves=max(0, total - int(least)),
    )


def _with_ways(units: Sequence[Unit], rows: Sequence[ProbeRow]) -> list[ProbeRow]:
    """Say how each layer would run that has a best pair for each of its weights."""
    best: dict[str, dict[str, FactorSpec]] = {}
    for row in rows:
        if row.best is not None:
            best.setdefault(row.layer, {})[row.role] = row.best
    found = []
    for unit, row in zip(units, rows, strict=True):
        factors, layer = best.get(row.layer, {}), unit.layer
        whole = factors.keys() == layer.any_factors().keys()
        found.append(row.model_copy(update={"way": layer.way_of(factors) if whole else None}))
    return found


def _best(curves: Sequence[Curve], params: float) -> tuple[Curve, int]:
    best = min(curves, key=lambda curve: curve.at(params))
    return best, min(int(params // best.spec.params), len(best.errors) - 1)


def _root(curve: Curve, params: float) -> float | None:
    squared = curve.at(params)
    return None if squared == float("inf") else float(f"{squared**0.5:.4g}")


def sweep(
    model: nn.Module | SourceModel,
    targets: Sequence[Target | str],
    settings: Settings | None = None,
    *,
    calibrate: Data | None = None,
    evaluate: Data | None = None,
    metric: str | None = None,
    beside: bool = True,
    files: Mapping[Target, Path] | None = None,
    trust: Sequence[str] = (),
    force: bool = False,
    progress: Progress | bool | None = None,
) -> Sweep:
    """Convert ``model`` to each target in turn, with truncated SVD beside, and compare.

    It is a recipe made in memory: each point is a job of its own, checked and written as any.

    Args:
        model: itself, or with words on where it came from and how it is made.
        targets: one point each, such as ``"params=0.25"``.
        settings: everything else that is asked; its own targets hold for every point.
        calibrate, evaluate, metric: as for ``convert``.
        beside: meet each target with truncated SVD too.
        files: where each point's model is written.
        trust, force: as for ``save``.
        progress: called with words, steps done and their number.

    Raises:
        PlanError: no target is within reach.
    """
    start = time.perf_counter()
    settings = settings or Settings()
    source = model if isinstance(model, SourceModel) else SourceModel(model)
    split = split_for(source.model, Uses(calibrate, evaluate=evaluate, scored=SCORED), settings)
    examples = None if split.calibrate is None else split.calibrate.examples
    scorer = None
    if split.evaluate is not None:
        scorer = Scorer(source.model, split.evaluate.examples, metric)
    own = settled(settings.method, data=examples is not None)
    methods = [own, *(["svd"] if beside and own != "svd" else [])]
    parsed = [Target.parse(one) if isinstance(one, str) else one for one in targets]
    points: list[Point] = []
    with told(progress) as tell:
        for number, target in enumerate(parsed):
            for method in methods:
                tell(f"{target} by {method}", number, len(parsed))
                asked = {"target": (*settings.target, target), "method": method}
                given: dict[str, Any] = {**settings.model_dump(by_alias=True), **asked}
                # A comparison of many is to be quick, unless it is asked to be good.
                given["reconstruct"] = settings.reconstruct or "off"
                job = Job(
                    name="point",
                    model=source.words or "model",
                    trust=tuple(trust),
                    settings=Settings.model_validate(given),
                )
                path = None if files is None or method != own else files[target]
                data = split if method.endswith("-data") else replace(split, calibrate=None)
                try:
                    with draws_kept(source.model):
                        done = run(
                            job,
                            Outputs(model=path, force=force, unconverted=True),
                            given=Given(source, data, scorer),
                        )
                except PlanError as problem:
                    why = f"{problem.found}; {problem.allowed}"
                    points.append(Point(target=str(target), method=method, out_of_reach=why))
                    continue
                points.append(_point(target, method, done))
    if all(point.out_of_reach for point in points):
        raise PlanError(
            where=f"target {parsed[0]}" if parsed else "target",
            found="no target is within reach",
            allowed=points[0].out_of_reach if points else "at least one target",
            fix="ask for larger targets",
        )
    place, verdict = recommended(points, own)
    return Sweep(
        model=f"{type(source.model).__module__}.{type(source.model).__qualname__}",
        source=source.words,
        params=count_params(source.model).before,
        calibration="" if examples is None else examples.source,
        points=tuple(points),
        verdict=verdict,
        recommended=place,
        seconds=time.perf_counter() - start,
        settings=settings,
        versions=versions(),
        machine=machine(),
    )


def _point(target: Target, method: str, done: Result) -> Point:
    outcome = done.outcome
    assert outcome is not None
    assert outcome.params is not None
    return Point(
        target=str(target),
        method=method,
        params=outcome.params.after,
        share=outcome.params.ratio,
        macs_share=outcome.macs.ratio if outcome.macs else None,
        error=outcome.error,
        score=outcome.score,
        file=str(done.files[0]) if done.files else "",
        notes=done.remarks,
    )


def recommended(points: Sequence[Point], method: str) -> tuple[int | None, str]:
    """Return the smallest point that loses little, and words that say so."""
    own = [
        (place, point)
        for place, point in enumerate(points)
        if point.method == method and not point.out_of_reach
    ]
    if not own:
        return None, "No target is within reach."
    good = [(place, point) for place, point in own if _good(point)]
    if good:
        place, point = min(good, key=lambda one: one[1].params)
        why = f"is expected to change outputs by at most {100 * CLOSE:.0f} %"
        if point.score is not None:
            why = f"loses at most {100 * GOOD:.0f} % of the source's {point.score.metric}"
        return place, f"Take {point.target}: the smallest that {why}."
    place, point = max(own, key=lambda one: one[1].params)
    limit = f"the outputs within {100 * CLOSE:.0f} %"
    if point.score is not None:
        limit = f"{100 * (1 - GOOD):.0f} % of the source's {point.score.metric}"
    kept = f"None of these keeps {limit}"
    return place, f"{kept}; the nearest is {point.target}. Ask for more, or train the result."


def _good(point: Point) -> bool:
    if point.score is None:
        return point.error is not None and point.error <= CLOSE
    return point.score.lost <= GOOD * abs(point.score.before)
