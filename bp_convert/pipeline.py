"""The order of the steps. The command line and the public functions call these and no others."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torchvision
from pydantic import ValidationError
from torch import nn

from bp_convert._version import __version__
from bp_convert.costs import measure as measure_latency
from bp_convert.counting import recount
from bp_convert.errors import PlanError, VerificationError
from bp_convert.files import Loaded, is_converted, load_model
from bp_convert.files import check_output as _check_output
from bp_convert.graph.channel_map import ChannelMaps, measure_maps
from bp_convert.graph.clone import clone
from bp_convert.graph.example import make_inputs
from bp_convert.planner import MAP_BATCH, NOISE, make_plan
from bp_convert.render.summary import verdict
from bp_convert.storage import (
    PLAN_ATTRIBUTE,
    load,
    plan_in,
    read_plan,
    save,
    save_dense,
    to_dense,
    write_plan,
)
from bp_convert.surgery import Converted, apply_plan
from bp_convert.values.plan import Plan
from bp_convert.values.report import Report, ReportTotals, Verification, rows
from bp_convert.values.settings import Settings
from bp_convert.values.tensors import TensorSpec
from bp_convert.verify import fingerprint_of_data, verify

Progress = Callable[[str, int, int], None]
CHECK_BATCH = 2  # batch norm in train mode needs more than one


def open_model(
    path: str | Path,
    *,
    arch: str | None = None,
    trust: Sequence[str] = (),
    allow_missing: bool = False,
) -> Loaded:
    """Load a model file onto the CPU without running anything that stands in it.

    Args:
        arch: how to make the model where the file holds weights only, such as
            ``torchvision:resnet18`` or ``file.py:factory``.
        trust: packages whose classes may be loaded; their code runs.
        allow_missing: accept weights that the file lacks.

    Raises:
        CheckpointError: the file is no model, is not trusted, or does not fit ``arch``.
    """
    return load_model(path, arch=arch, trust=trust, allow_missing=allow_missing)


def check_output(path: str | Path, force: bool = False) -> None:
    """Refuse a file that could not be written, before any work is done.

    Raises:
        CheckpointError: it exists, or its folder does not or cannot be written to.
    """
    _check_output(Path(path), force=force)


def moved(model: nn.Module, device: str | None) -> nn.Module:
    """Return the model on ``device``.

    Raises:
        PlanError: there is no such device.
    """
    if device is None:
        return model
    try:
        return model.to(device)
    except (RuntimeError, AssertionError) as problem:
        raise PlanError(
            where=f"device {device}",
            found=str(problem).strip().splitlines()[0],
            allowed="cpu, or a device that torch sees here",
            fix="leave --device out, or install a torch build for this device",
        ) from None


def plan(
    model: nn.Module,
    settings: Settings | None = None,
    inputs: Sequence[TensorSpec | str] | None = None,
    *,
    progress: Progress | None = None,
    **asked: Any,
) -> Plan:
    """Decide what becomes of every layer of ``model``; change nothing.

    Args:
        settings: the request; its fields may also be given as keywords, such as ``alpha=2``.
        inputs: example inputs, as TensorSpec or text such as ``"3x224x224"``.
        progress: called with words, steps done and their number.

    Raises:
        PlanError: the request does not fit the model.
        TraceError: the model does not run on the input.
    """
    return make_plan(model, _settings(settings, inputs, asked), progress=progress)


def apply(model: nn.Module, plan: Plan, *, progress: Progress | None = None) -> nn.Module:
    """Return a converted copy of ``model``; the source stays bit-identical.

    Raises:
        PlanError: the plan was made for another model, or edited into something impossible.
    """
    return _apply(model, recount(model, plan), progress).model


def convert(
    model: nn.Module,
    settings: Settings | None = None,
    inputs: Sequence[TensorSpec | str] | None = None,
    *,
    plan: Plan | None = None,
    device: str | None = None,
    dtype: str | None = None,
    measure: Sequence[int] = (),
    progress: Progress | None = None,
    source: str = "",
    **asked: Any,
) -> tuple[nn.Module, Report]:
    """Plan, convert a copy, run it against the source, and report.

    Args:
        settings: the request; its fields may also be given as keywords, such as ``alpha=2``.
        inputs: example inputs, as TensorSpec or text such as ``"3x224x224"``.
        plan: a plan to apply instead of making one.
        device: where the result goes; None leaves it where the source is.
        dtype: floating dtype of the result, such as ``bfloat16``; None keeps the source's.
        measure: batch sizes at which latency is measured.
        progress: called with words, steps done and their number.
        source: words for the report about where the model came from.

    Returns:
        The converted model, of the user's own class, and the report. Where nothing could be
        converted the model is a plain copy and the report says so.

    Raises:
        PlanError, TraceError: as ``plan``.
        VerificationError: the result does not behave as planned.
    """
    start = time.perf_counter()
    before = fingerprint_of_data(model)
    if plan is None:
        plan = make_plan(model, _settings(settings, inputs, asked), progress=progress)
    else:
        plan = recount(model, plan)
    done = _apply(model, plan, progress)
    _check_counts(done.model, plan)
    checked = _verified(model, plan, done, before, progress)
    result = done.model
    if dtype is not None or device is not None:
        result = result.to(device=device, dtype=_dtype(dtype))
    latency = tuple(
        measure_latency(
            clone(model), result, plan.inputs, batch=batch, device=device or _device(model)
        )
        for batch in measure
        if plan.inputs
    )
    report = report_of(plan, done, source=source).model_copy(
        update={
            "verification": checked,
            "latency": latency,
            "seconds": time.perf_counter() - start,
        }
    )
    return result, report.model_copy(update={"verdict": verdict(report)})


def report_of(plan: Plan, done: Converted | None = None, *, source: str = "") -> Report:
    """Put a plan, and what its conversion gave, into a report."""
    errors: dict[str, float | None] = dict(done.errors) if done else {}
    random = done.random if done else {}
    layers = tuple(
        row.model_copy(update={"notes": (*row.notes, NOISE + random[row.name])})
        if row.name in random and not any(note.startswith(NOISE) for note in row.notes)
        else row
        for row in rows(plan, errors)
    )
    report = Report(
        totals=ReportTotals(params=plan.params, macs=plan.macs, bytes=plan.bytes),
        layers=layers,
        verdict="",
        model=plan.model,
        source=source,
        inputs=tuple(str(spec) for spec in plan.inputs),
        assumed=plan.assumed,
        notes=plan.notes,
        versions={
            "bp-convert": __version__,
            "torch": torch.__version__,
            "torchvision": torchvision.__version__,
        },
    )
    return report.model_copy(update={"verdict": verdict(report)})


def inspect(
    model: nn.Module | str | Path,
    settings: Settings | None = None,
    inputs: Sequence[TensorSpec | str] | None = None,
    *,
    arch: str | None = None,
    trust: Sequence[str] = (),
    progress: Progress | None = None,
    **asked: Any,
) -> Plan:
    """Return what would happen to each layer of a model or a model file."""
    if not isinstance(model, nn.Module):
        model = open_model(model, arch=arch, trust=trust).model
    return plan(model, settings, inputs, progress=progress, **asked)


__all__ = [
    "Loaded",
    "apply",
    "check_output",
    "convert",
    "inspect",
    "is_converted",
    "load",
    "moved",
    "open_model",
    "plan",
    "plan_in",
    "read_plan",
    "report_of",
    "save",
    "save_dense",
    "to_dense",
    "write_plan",
]


def _settings(
    settings: Settings | None, inputs: Sequence[TensorSpec | str] | None, asked: dict[str, Any]
) -> Settings:
    given = dict((settings or Settings()).model_dump(by_alias=True), **asked)
    if inputs is not None:
        given["inputs"] = [
            one if isinstance(one, TensorSpec) else TensorSpec.parse(one) for one in inputs
        ]
    try:
        return Settings.model_validate(given)
    except ValidationError as problem:
        first = problem.errors()[0]
        raise PlanError(
            where=f"setting {'.'.join(str(part) for part in first['loc']) or 'alpha'}",
            found=f"{first['msg']} (got {first.get('input')})"[:200],
            allowed=f"one of: {', '.join(Settings.model_fields)}",
            fix="correct the setting",
        ) from None


def _apply(model: nn.Module, plan: Plan, progress: Progress | None) -> Converted:
    maps = _maps(model, plan, progress)
    done = apply_plan(model, plan, maps, progress=progress)
    setattr(done.model, PLAN_ATTRIBUTE, plan.model_dump_json(by_alias=True))
    return done


def _maps(model: nn.Module, plan: Plan, progress: Progress | None) -> ChannelMaps | None:
    """Measure channel maps where a widened layer starts warm."""
    if not plan.resizes or all(layer.init == "random" for layer in plan.layers):
        return None
    if progress is not None:
        progress("finding which channel is which", 0, 1)
    args, kwargs = make_inputs(model, plan.inputs, batch=MAP_BATCH, device=_device(model))
    return measure_maps(model, plan, args, kwargs)


def _verified(
    model: nn.Module,
    plan: Plan,
    done: Converted,
    before: Any,
    progress: Progress | None,
) -> Verification | None:
    if not plan.inputs:
        return None
    if progress is not None:
        progress("running it against the source", 0, 1)
    args, kwargs = make_inputs(
        model, plan.inputs, batch=CHECK_BATCH, seed=plan.settings.seed, device=_device(model)
    )
    return verify(model, done.model, args, kwargs, new=done.new, before=before)


def _check_counts(model: nn.Module, plan: Plan) -> None:
    """Compare the plan's numbers with the model's."""
    for layer in plan.layers:
        found = sum(p.numel() for p in model.get_submodule(layer.name).parameters())
        if found != layer.params[1]:
            raise _miscounted(layer.name, found, layer.params[1])
    total = sum(p.numel() for p in model.parameters())
    if total != plan.params.after:
        raise _miscounted("the whole model", total, plan.params.after)


def _miscounted(where: str, found: int, planned: int) -> VerificationError:
    return VerificationError(
        where=where,
        found=f"{found} parameters",
        allowed=f"{planned}, as planned",
        fix="plan again; if the plan is fresh, please report this model",
    )


def _device(model: nn.Module) -> torch.device:
    return next((p.device for p in model.parameters()), torch.device("cpu"))


def _dtype(name: str | None) -> torch.dtype | None:
    if name is None:
        return None
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise PlanError(
            where=f"dtype {name}",
            found=repr(name),
            allowed="float32, bfloat16, float16 or float64",
            fix="give one of these",
        )
    return found
