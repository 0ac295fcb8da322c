"""The order of the steps. The command line and the public functions call these and no others."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import hypot
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from bp_convert.costs import measure as measure_latency
from bp_convert.counting import recount
from bp_convert.data import Data, Examples, Uses, examples_for, split_for
from bp_convert.errors import PlanError
from bp_convert.evaluation import Scorer
from bp_convert.fakes.inputs import settle_values
from bp_convert.files.read_model import Loaded, load_model
from bp_convert.fitting import fit_to_data, foretold_examples, round_stored
from bp_convert.graph.clone import clone
from bp_convert.graph.example import SampleInputs, device_of, given_sample
from bp_convert.graph.merging import merged
from bp_convert.graph.reshape import CASTS, cast
from bp_convert.hub.marked import mark, text_of
from bp_convert.planner import Planned, maps_for, prepare
from bp_convert.pruning import prune as pruned
from bp_convert.ready import check_ready
from bp_convert.reconstruction import foretold, learnt_of, reconstruct
from bp_convert.reporting import report_of
from bp_convert.surgery import Converted, apply_plan, carried_out
from bp_convert.values.explain import validated
from bp_convert.values.literals import Start
from bp_convert.values.plan import Plan
from bp_convert.values.progress import Progress, told
from bp_convert.values.recipe import BATCHES
from bp_convert.values.report import Report
from bp_convert.values.settings import Settings, SettingsKeywords
from bp_convert.values.tensors import TensorSpec
from bp_convert.verify import fingerprint_of_data, in_plain_bits, verify
from bp_convert.verify.fingerprint import check_untouched
from bp_convert.widths.channel_map import ChannelMaps

# What forward takes: described, or values with the examples on their first axis.
Inputs = Sequence[TensorSpec | str] | Sequence[Any] | Mapping[str, Any] | Tensor
# What the functions below take beside settings.
KEYWORDS = ("calibrate", "evaluate", "metric", "device", "dtype", "measure", "plan", "progress")


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


def plan(
    model: nn.Module,
    settings: Settings | None = None,
    inputs: Inputs | None = None,
    *,
    calibrate: Data | None = None,
    progress: Progress | bool | None = None,
    **asked: Unpack[SettingsKeywords],
) -> Plan:
    """Decide what becomes of every layer of ``model``; change nothing.

    Args:
        settings: the request; its fields may also be given as keywords, such as ``alpha=2`` or
            ``target="params=0.25"``.
        inputs: example inputs: described, as TensorSpec or text such as ``"3x224x224"``; or
            values, a list of the positional ones or a mapping by forward's keywords, of whatever
            structure forward takes, with the examples on the first axis of each tensor.
        calibrate: data by which a target is spent: Examples, tensors, a loader, or a source as
            the command line takes it. Labels are not needed.
        progress: called with words, steps done and their number; True draws a bar.

    Raises:
        PlanError: the request does not fit the model, or a target is out of reach.
        DataError: the data does not fit the model.
        TraceError: the model does not run on the input.
    """
    return prepared(model, settings, inputs, calibrate=calibrate, progress=progress, **asked).plan


def prepared(
    model: nn.Module,
    settings: Settings | None = None,
    inputs: Inputs | None = None,
    *,
    calibrate: Data | None = None,
    progress: Progress | bool | None = None,
    **asked: Unpack[SettingsKeywords],
) -> Planned:
    """Do as ``plan``, and keep what was found out for a ``convert`` of this model."""
    check_ready(model, values=False)
    given, sample = _request(model, settings, inputs, asked)
    model, notes = _merged(model, given)
    examples = None if calibrate is None else examples_for(model, calibrate, given)
    with told(progress) as tell:
        ready = prepare(model, given, examples=examples, given=sample, progress=tell, notes=notes)
    return _foretold(model, ready, examples)


def apply(
    model: nn.Module,
    plan: Plan,
    *,
    calibrate: Data | None = None,
    progress: Progress | bool | None = None,
) -> nn.Module:
    """Return a converted copy of ``model``; the source stays bit-identical.

    Args:
        calibrate: data that the factors are fitted to, as for ``plan``; None fits the weights.
        progress: as for ``plan``.

    Raises:
        PlanError: the plan was made for another model, or edited into something impossible.
        DataError: the data does not fit the model.
    """
    check_ready(model)
    model, _ = _merged(model, plan.settings)
    with carried_out(model):
        plan = recount(model, plan)
    examples = None if calibrate is None else examples_for(model, calibrate, plan.settings)
    with carried_out(model), told(progress) as tell:
        maps = maps_for(model, plan, _sample(plan, examples), tell)
        return _apply(model, plan, maps, tell, examples).model


def convert(
    model: nn.Module,
    settings: Settings | None = None,
    inputs: Inputs | None = None,
    *,
    plan: Plan | Planned | None = None,
    calibrate: Data | None = None,
    evaluate: Data | Scorer | None = None,
    metric: str | None = None,
    device: str | None = None,
    dtype: str | None = None,
    measure: Sequence[int] | int = (),
    progress: Progress | bool | None = None,
    source: str = "",
    **asked: Unpack[SettingsKeywords],
) -> tuple[nn.Module, Report]:
    """Plan, convert a copy, run it against the source, and report.

    Args:
        settings: the request; its fields may also be given as keywords, such as ``alpha=2``.
        inputs: example inputs: described, as TensorSpec or text such as ``"3x224x224"``; or
            values, a list of the positional ones or a mapping by forward's keywords, of whatever
            structure forward takes, with the examples on the first axis of each tensor.
        plan: a plan to apply instead of making one; ``prepared`` gives one that need not be
            checked again.
        calibrate: data by which a target is spent and to which the factors are fitted, as for
            ``plan``; some 256 to 1,024 examples are enough, and labels are not needed.
        evaluate: data to score on, before and after; none of it is calibrated on where it comes
            from the same source. Or a Scorer that has scored the source already.
        metric: what to score, as ``bp_convert.evaluation.Scorer`` knows it; None takes the
            accuracy where there are labels, else the cosine similarity to the source's output.
        device: where the result goes; None leaves it where the source is.
        dtype: floating dtype of the result, such as ``bfloat16``; None keeps the source's.
        measure: batch sizes at which latency is measured; True takes 1 and 32.
        progress: called with words, steps done and their number; True draws a bar.
        source: words for the report about where the model came from.

    Returns:
        The converted model, of the user's own class, and the report. Where nothing could be
        converted the model is a plain copy and the report says so.

    Raises:
        PlanError, TraceError, DataError: as ``plan``.
        VerificationError: the result does not behave as planned.
    """
    start = time.perf_counter()
    check_ready(model)
    floating, sizes = _dtype(dtype), _batches(measure)
    given, sample = _request(model, settings, inputs, asked)
    ready = plan if isinstance(plan, Planned) else None
    plan = plan.plan if isinstance(plan, Planned) else plan
    given = given if plan is None else plan.settings
    model, notes = _merged(model, given)
    before = fingerprint_of_data(model)
    scorer = evaluate if isinstance(evaluate, Scorer) else None
    uses = Uses(calibrate, evaluate=None if scorer is not None else evaluate)
    split = split_for(model, uses, given)
    examples = None if split.calibrate is None else split.calibrate.examples
    if split.evaluate is not None:
        scorer = Scorer(model, split.evaluate.examples, metric)
    with told(progress) as tell:
        if plan is None:
            ready = prepare(
                model, given, examples=examples, given=sample, progress=tell, notes=notes
            )
            ready = _foretold(model, ready, examples)
            plan = ready.plan
        elif ready is None:
            plan = recount(model, plan)
        if sample is None or examples is not None:
            sample = _sample(plan, examples)
        maps = maps_for(model, plan, sample, tell) if ready is None else ready.maps
        fitted_to = "" if examples is None or not plan.settings.fits_data else examples.words
        done = _apply(model, plan, maps, tell, examples)
        if examples is not None and scorer is None:
            batch = None if examples.fresh is None else examples.fresh()
            if batch is not None:
                sample = replace(sample, given=batch, origin="data that nothing was fitted to")
        checked = plain = None
        if sample:
            tell("running it beside the same weights in plain layers", 0, 1)
            checked = verify(model, done.model, plan, sample, new=done.new, before=before)
            plain = in_plain_bits(model, plan, sample)
    result = done.model
    if floating is not None:
        cast(result, floating)
    if device is not None:
        result.to(device)
    latency = tuple(
        measure_latency(
            clone(model, apart=True),
            clone(result, apart=True),
            plan.inputs,
            batch=size,
            device=device or device_of(model),
        )
        for size in sizes
        if plan.inputs
    )
    report = report_of(
        plan,
        done,
        source=source,
        fitted_to=fitted_to,
        verification=checked,
        plain_int8=plain,
        scores=(scorer.score(result),) if scorer is not None else (),
        latency=latency,
        seconds=time.perf_counter() - start,
    )
    return result, report


def prune(
    model: nn.Module,
    params: int,
    *,
    inputs: Sequence[TensorSpec | str] = (),
    init: Start = "warm",
    seed: int = 0,
) -> tuple[nn.Module, Plan]:
    """Return a copy of ``model`` with fewer channels, to compare with, and its plan.

    Every free layer keeps one share of its outputs, those whose weights have the largest norm
    (Li et al., 2017: Pruning filters for efficient ConvNets). The output keeps its shape.

    Args:
        params: parameters at most.
        inputs: example inputs, as TensorSpec or text; inferred where there are none.
        init: ``warm`` keeps the weights of what stays, ``random`` starts afresh.
        seed: of random starts.

    Raises:
        PlanError: the model's widths cannot be followed, or the size is out of reach.
    """
    check_ready(model)
    specs = [TensorSpec.parse(one) for one in inputs]
    done, plan = pruned(model, params, inputs=specs, init=init, seed=seed)
    if init == "warm":
        lost = tuple(f"{name} starts from noise: {why}" for name, why in done.random.items())
        plan = plan.model_copy(update={"notes": (*plan.notes, *lost)})
    mark(done.model, text_of(plan))
    return done.model, plan


def inspect(
    model: nn.Module | str | Path,
    settings: Settings | None = None,
    inputs: Inputs | None = None,
    *,
    arch: str | None = None,
    trust: Sequence[str] = (),
    progress: Progress | bool | None = None,
    **asked: Unpack[SettingsKeywords],
) -> Plan:
    """Return what would happen to each layer of a model or a model file."""
    if not isinstance(model, nn.Module):
        model = open_model(model, arch=arch, trust=trust).model
    return plan(model, settings, inputs, progress=progress, **asked)


def _request(
    model: nn.Module, settings: Settings | None, inputs: Inputs | None, asked: Mapping[str, Any]
) -> tuple[Settings, SampleInputs | None]:
    """Return what is asked for, and the example inputs that are values."""
    described = [inputs] if isinstance(inputs, str | TensorSpec) else inputs
    if described is None:
        return _settings(settings, None, asked), None
    if isinstance(described, list | tuple) and all(
        isinstance(one, str | TensorSpec) for one in described
    ):
        return _settings(settings, described, asked), None
    sample = settle_values(model, given_sample(described))
    return _settings(settings, sample.specs or None, asked), sample


def _merged(model: nn.Module, settings: Settings) -> tuple[nn.Module, Sequence[str]]:
    """Return a copy with its adapters merged where that is asked for, and words on it.

    Raises:
        PlanError: an adapter cannot be merged.
    """
    if not settings.merge_adapters:
        return model, ()
    before = fingerprint_of_data(model)
    made, count = merged(model)
    check_untouched(model, before)
    return made, [f"{count or 'no'} adapter{'' if count == 1 else 's'} merged first"]


def _settings(
    settings: Settings | None, inputs: Sequence[TensorSpec | str] | None, asked: Mapping[str, Any]
) -> Settings:
    if settings is not None and not isinstance(settings, Settings):
        raise PlanError(
            where="settings",
            found=f"{settings!r}"[:120],
            allowed="a bp_convert.Settings, or its fields as keywords, such as alpha=2",
            fix="example inputs go into inputs=[...], everything else into keywords of its name",
        )
    given = dict((settings or Settings()).model_dump(by_alias=True), **asked)
    if inputs is not None:
        given["inputs"] = [TensorSpec.parse(one) for one in inputs]
    return validated(Settings, given, "setting", error=PlanError, beside=KEYWORDS)


def _batches(measure: Sequence[int] | int) -> Sequence[int]:
    """Return the batch sizes to measure at: the usual ones for True."""
    if isinstance(measure, bool):
        return BATCHES if measure else ()
    sizes = [measure] if isinstance(measure, int) else list(measure)
    if not all(isinstance(one, int) and one >= 1 for one in sizes):
        raise PlanError(
            where="measure",
            found=f"{measure!r}"[:120],
            allowed=f"batch sizes, such as [1, 32], or True for {list(BATCHES)}",
            fix="give whole numbers from 1 on",
        )
    return sizes


def _sample(plan: Plan, examples: Examples | None) -> SampleInputs:
    """Return the example inputs of a plan: real ones where there are some."""
    if examples is None:
        return SampleInputs(plan.inputs, words=plan.assumed)
    return SampleInputs(plan.inputs, examples.batches[0], plan.assumed, "calibration data")


def _apply(
    model: nn.Module,
    plan: Plan,
    maps: ChannelMaps | None,
    progress: Progress,
    examples: Examples | None,
) -> Converted:
    data = examples if plan.settings.fits_data else None
    widened = next((one for one in plan.layers if one.before != one.after), None)
    if data is not None and widened is not None:  # it has no inputs in the source to follow
        raise PlanError(
            where=f"{widened.name} ({widened.kind})",
            found="a widened layer and calibration data",
            allowed="fitting to data at alpha 1",
            fix="leave the calibration data out: a widened model starts from the weights",
        )
    # To the weights first: a layer that is called twice sees its own output while it is fitted,
    # and one that no data reaches stays so.
    done = apply_plan(model, plan, maps, checked=True, progress=progress)
    if data is not None:
        learnt = learnt_of(model, plan, data.batches)
        errors, missed = fit_to_data(model, done.model, plan, learnt, progress)
        done.errors.update(errors)
        done.missed.update(missed)
        done.reconstruction = reconstruct(
            model, done.model, plan, data.batches, digest=data.digest, progress=progress
        )
    rounded = round_stored(model, done.model, plan, () if data is None else data.batches, progress)
    for name, error in rounded.items():
        done.errors[name] = hypot(done.errors.get(name, 0.0), error)
    mark(done.model, text_of(plan))
    return done


def _foretold(model: nn.Module, ready: Planned, examples: Examples | None) -> Planned:
    """Return a plan that says what the fit will look at, and which blocks will be tuned."""
    if examples is None or not ready.plan.settings.fits_data:
        return ready
    words = [
        *foretold_examples(model, ready.plan, examples.batches),
        *foretold(model, ready.plan, examples.count),
    ]
    plan = ready.plan.model_copy(update={"notes": (*ready.plan.notes, *words)})
    return replace(ready, plan=plan)


def _dtype(name: str | None) -> torch.dtype | None:
    if name is None:
        return None
    found: torch.dtype | None = getattr(torch, name, None)
    if found not in CASTS:
        raise PlanError(
            where=f"dtype {name}",
            found=repr(name),
            allowed="float32, bfloat16, float16 or float64",
            fix="give one of these",
        )
    return found
