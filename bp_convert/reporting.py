"""A plan, and what its conversion gave, put into a report."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import bp_convert.pages  # noqa: F401 - gives what is reported its looks
from bp_convert.planner import NOISE
from bp_convert.provenance import machine, versions
from bp_convert.render.summary import verdict
from bp_convert.render.words import value_of
from bp_convert.surgery import Converted
from bp_convert.values.plan import Plan
from bp_convert.values.report import Report, Score
from bp_convert.values.training import Trained

MISSED = "fitted to its weight alone: "
UNFITTED = "fitted to the weights alone, though planned on data: give it again ({})"


def report_of(
    plan: Plan,
    done: Converted | None = None,
    *,
    source: str = "",
    fitted_to: str = "",
    **measured: Any,
) -> Report:
    """Put a plan, and what its conversion gave, into a report.

    Args:
        source: words on where the model came from.
        fitted_to: words on the data that the factors were fitted to.
        measured: further fields of the report, by name.
    """
    remarks = {name: NOISE + why for name, why in (done.random if done else {}).items()}
    remarks |= {name: MISSED + why for name, why in (done.missed if done else {}).items()}
    layers = tuple(
        layer.model_copy(update={"notes": (*layer.notes, remarks[layer.name])})
        if layer.name in remarks and remarks[layer.name] not in layer.notes
        else layer
        for layer in plan.layers
    )
    unfitted = done is not None and plan.calibration and not fitted_to
    report = Report(
        plan=plan.model_copy(update={"layers": layers}),
        fit_errors=done.errors if done else {},
        source=source,
        calibration=fitted_to or (plan.calibration if done is None else ""),
        reconstruction=None if done is None else done.reconstruction,
        notes=(UNFITTED.format(plan.calibration),) if unfitted else (),
        versions=versions(),
        machine=machine(),
        **measured,
    )
    return report.model_copy(update={"verdict": verdict(report)})


def trained(report: Report, done: Trained, scores: Sequence[Score] = ()) -> Report:
    """Return the report of a conversion that was trained afterwards, with its verdict.

    Args:
        report: of the conversion, with its own scores where it was scored.
        done: what training did.
        scores: of the trained model; empty where it was not scored.
    """
    notes = tuple(
        f"{one.metric} after the conversion, before training: {value_of(one, one.after)}"
        for one in report.scores[:1]
        if scores
    )
    seconds = (report.seconds or 0.0) + done.seconds
    report = report.model_copy(
        update={
            "training": done,
            "seconds": seconds,
            "notes": (*report.notes, *notes),
            "scores": tuple(scores or report.scores),
        }
    )
    return report.model_copy(update={"verdict": verdict(report)})
