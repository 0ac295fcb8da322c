"""A job's model made from its source: converted, or one of the counterparts it is compared with."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from bp_convert import pipeline
from bp_convert.data import Examples
from bp_convert.errors import PlanError
from bp_convert.evaluation import Scorer
from bp_convert.graph.clone import clone
from bp_convert.planner import Planned
from bp_convert.run.opening import SourceModel
from bp_convert.values.literals import Start
from bp_convert.values.plan import Plan, Totals
from bp_convert.values.progress import Progress
from bp_convert.values.recipe import Job
from bp_convert.values.report import Report
from bp_convert.values.settings import Settings
from bp_convert.values.target import Target

# What a low-rank counterpart is asked for as its conversion is.
LAYERS = (
    *("include", "exclude", "convert_head", "convert_anyway", "ways", "keep_parametrized"),
    *("merge_adapters", "sides", "allocation", "shrink", "groups", "store", "reconstruct"),
    *("prefer", "inputs", "seed"),
)


def planned(job: Job, model: nn.Module, examples: Examples | None, progress: Progress) -> Planned:
    """Plan a job's conversion or its low-rank counterpart; for the others, the size they match.

    Raises:
        PlanError: the request does not fit the model.
    """
    request = job.request
    if job.counterpart != "low-rank":
        given = examples if job.counterpart is None else None
        return pipeline.prepared(model, request, calibrate=given, progress=progress)
    size = pipeline.plan(model, request, progress=progress).params
    # Which terms are worth their numbers is read off the weights, also where they are then
    # started afresh.
    asked = Settings(
        target=(Target(quantity="params", value=_within(job, size)),),
        method="svd-data" if examples is not None and request.init != "random" else "svd",
        **{name: getattr(request, name) for name in LAYERS},
    )
    given = examples if asked.method == "svd-data" else None
    ready = pipeline.prepared(model, asked, calibrate=given, progress=progress)
    if request.init == "random":
        cold = tuple(one.model_copy(update={"init": "random"}) for one in ready.plan.layers)
        ready = replace(ready, plan=ready.plan.model_copy(update={"layers": cold}))
    return ready


def _within(job: Job, size: Totals) -> float:
    """Return the parameters that a counterpart may have; it has to be smaller than its source."""
    if size.after >= size.before:
        raise PlanError(
            where=f"job {job.name}, counterpart {job.counterpart}",
            found=f"a conversion of {size.after:,} parameters, its source has {size.before:,}",
            allowed="a conversion that is smaller than its source",
            fix="leave the counterpart out here, or ask for a smaller conversion",
        )
    return float(size.after)


def build(
    job: Job,
    source: SourceModel,
    ready: Plan | Planned | None,
    examples: Examples | None,
    scorer: Scorer | None,
    progress: Progress,
) -> tuple[nn.Module, Plan | None, Report | None]:
    """Make a job's model as planned; None stands for the full model.

    Returns:
        A copy, the source being untouched; what was done, None for the full model; and the report
        of the conversion, None for the full model and a pruned one.

    Raises:
        BpConvertError: as ``pipeline.convert``.
    """
    plan = ready.plan if isinstance(ready, Planned) else ready
    if ready is None or plan is None:
        return clone(source.model), None, None
    if job.counterpart == "pruned":
        progress("pruning", 0, 1)
        size, request = int(_within(job, plan.params)), job.request
        init: Start = "random" if request.init == "random" else "warm"
        small, pruned = pipeline.prune(
            source.model, size, inputs=plan.inputs, init=init, seed=request.seed
        )
        return small, pruned, None
    fitted = job.counterpart is None or plan.settings.fits_data
    small, report = pipeline.convert(
        source.model,
        plan=ready,
        calibrate=examples if fitted else None,
        evaluate=scorer,
        device=job.device,
        dtype=job.dtype,
        measure=job.measure,
        progress=progress,
        source=source.words,
    )
    return small, plan, report
