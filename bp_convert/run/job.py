"""One job: open, read, plan, convert, score, train, score, write."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from bp_convert import pipeline
from bp_convert.counting import count_bytes, count_params, recount
from bp_convert.data import Examples, Split
from bp_convert.errors import VerificationError
from bp_convert.evaluation import Scorer
from bp_convert.files.atomic import write_text
from bp_convert.files.converted import save_weights
from bp_convert.graph.running import evaluating
from bp_convert.large.layerwise import convert_folder
from bp_convert.large.skeleton import skeleton_of
from bp_convert.planner import Planned
from bp_convert.proof import result_at
from bp_convert.reporting import report_of, trained
from bp_convert.run.few_bits import in_folder, rounded_again
from bp_convert.run.learning import learn, split_of, training_of
from bp_convert.run.making import build, planned
from bp_convert.run.opening import SourceModel, opened
from bp_convert.run.streamed import WHOLE, by_layer, check_by_layer
from bp_convert.run.written import Outputs, write_reports
from bp_convert.storage import check_savable, read_plan, write_plan
from bp_convert.values.outcome import Outcome
from bp_convert.values.plan import Plan
from bp_convert.values.progress import Progress, unheard
from bp_convert.values.recipe import Job
from bp_convert.values.report import Report, Score

UNTIMED = "nothing was timed: no example input is known (--input)"


@dataclass(frozen=True)
class Given:
    """What several jobs share, made before them.

    Attributes:
        source: the model.
        split: what each use of the data gets.
        scorer: has scored the source.
    """

    source: SourceModel
    split: Split | None = None
    scorer: Scorer | None = None


@dataclass(frozen=True)
class Result:
    """What a run gave.

    Attributes:
        model: None after a dry run.
        plan: what was done; None for the full model.
        report: of the conversion; None for the full model and a pruned one.
        outcome: in short; None after a dry run.
        files: those written.
        remarks: what proving the model's file has to say; they stand in the report too.
    """

    model: nn.Module | None
    plan: Plan | None
    report: Report | None
    outcome: Outcome | None
    files: tuple[Path, ...] = ()
    remarks: tuple[str, ...] = ()

    @property
    def changed(self) -> bool:
        """Whether there is anything but a copy."""
        return _changes(self.plan)


def run(
    job: Job,
    outputs: Outputs | None = None,
    *,
    given: Given | None = None,
    dry: bool = False,
    progress: Progress = unheard,
) -> Result:
    """Run a job.

    Args:
        outputs: where its results go; None writes nothing.
        given: what is there already; None opens the model and reads the data.
        dry: stop at the plan.
        progress: called with words, steps done and their number.

    Raises:
        BpConvertError: it cannot be done as asked, or does not hold what it promises.
    """
    outputs = outputs or Outputs()
    if given is None and by_layer(job, outputs.model, dry=dry):
        return stream(
            in_folder(job, outputs.model, layerwise=True), outputs, dry=dry, progress=progress
        )
    job = in_folder(job, outputs.model)
    goal = None if dry else outputs.model
    # The full model has no plan: as .safetensors it is weights alone, which need no proof.
    bare = job.counterpart == "full" and goal is not None and goal.suffix == ".safetensors"
    with result_at(None if bare else goal, trust=job.trust, force=outputs.force) as file:
        torch.manual_seed(job.request.seed)
        plan = None if job.plan is None else read_plan(job.plan)
        progress("opening the model", 0, 1)
        given = given or Given(opened(job))
        source = given.source
        arch = None if job.counterpart == "full" else source.arch
        if goal is not None:
            check_savable(source.model, goal, arch=arch, trust=job.trust)
        progress("reading the examples", 0, 1)
        training = None if dry else training_of(job)
        split = given.split or split_of(
            job, source.model, training, plan=plan, download=outputs.download
        )
        examples = None if split.calibrate is None else split.calibrate.examples
        held = None if split.evaluate is None or dry else split.evaluate.examples
        ready: Plan | Planned | None = plan
        if plan is None and job.counterpart != "full":
            ready = planned(job, source.model, examples, progress)
            plan = ready.plan
        files = [] if job.counterpart == "pruned" else _write_plan(plan, outputs)
        if dry:
            assert plan is not None
            shown = _noted(report_of(plan, source=source.words), source.notes)
            files += write_reports(shown, outputs)
            return Result(None, plan, shown, None, tuple(files))
        if not job.unchecked:
            _check_checkable(plan, examples)
        scorer = given.scorer
        if scorer is None and held is not None:
            progress("scoring the full model", 0, 1)
            scorer = Scorer(source.model, held, job.metric)
        model, plan, report = build(job, source, ready, examples, scorer, progress)
        if job.counterpart == "pruned":
            files += _write_plan(plan, outputs)
        notes = [note for one in (source, report, plan) if one is not None for note in one.notes]
        if report is not None and report.scores:
            converted: Score | None = report.scores[0]
        else:
            converted = None if scorer is None else scorer.score(evaluating(model))
        score, done = converted, None
        goes_on = _changes(plan) or outputs.unconverted
        if training is not None and goes_on:
            model, done = learn(model, source, job, training, split, outputs, progress)
            rounded_again(model, source.model, plan, examples)
            score = None if scorer is None else scorer.score(evaluating(model))
            if report is not None:
                report = trained(report, done, [score] if score is not None else [])
        progress("writing", 0, 1)
        remarks: list[str] = []
        if file is not None and goes_on:
            start = None if job.model is None else Path(job.model)
            written, remarks = file.write(model, arch, start)
            files += written
        elif bare and goal is not None:
            files.append(save_weights(goal, model, force=outputs.force))
    if done is not None and outputs.training is not None:
        files.append(write_text(outputs.training, done.model_dump_json(indent=1) + "\n"))
    if report is not None:
        untimed = [UNTIMED] if job.measure and plan is not None and not plan.inputs else []
        report = _noted(report, source.notes, untimed, remarks)
        files += write_reports(report, outputs)
    outcome = Outcome(
        name=job.name,
        keys=job.keys,
        model=job.words,
        params=count_params(source.model) if plan is None else plan.params,
        macs=None if plan is None else plan.macs,
        bytes=count_bytes(source.model) if plan is None else plan.bytes,
        error=None if report is None else report.plan.error,
        converted=converted,
        score=score,
        full=source.full,
        trained=done,
        paper=job.paper,
        notes=tuple(notes),
    )
    return Result(model, plan, report, outcome, tuple(files), tuple(remarks))


def stream(job: Job, outputs: Outputs, *, dry: bool, progress: Progress) -> Result:
    """Run a job whose model is too large for memory.

    Raises:
        BpConvertError: as ``run``.
    """
    start = time.perf_counter()
    check_by_layer(job, None if dry else outputs.model)
    folder = Path(job.model or "").expanduser()
    progress("reading the shapes", 0, 1)
    skeleton = skeleton_of(folder)
    if job.plan is not None:
        plan = recount(skeleton.model, read_plan(job.plan))
    else:
        plan = pipeline.plan(skeleton.model, job.request, progress=progress)
    files = _write_plan(plan, outputs)
    words = f"{folder}, {skeleton.checkpoint.bytes / 1e9:.1f} GB in safetensors"
    done, notes = None, [*skeleton.notes, WHOLE]
    if not dry and outputs.model is not None and _changes(plan):
        done, resumed = convert_folder(
            skeleton, folder, plan, outputs.model, force=outputs.force, progress=progress
        )
        notes += [f"{resumed} of its files were there from an earlier run"] if resumed else []
        files.append(outputs.model)
    seconds = time.perf_counter() - start
    report = _noted(report_of(plan, done, source=words, seconds=seconds), notes)
    files += write_reports(report, outputs)
    outcome = (
        None
        if dry
        else Outcome(
            name=job.name,
            keys=job.keys,
            model=job.words,
            params=plan.params,
            macs=plan.macs,
            bytes=plan.bytes,
            paper=job.paper,
            notes=(*report.notes, *plan.notes),
        )
    )
    return Result(None, plan, report, outcome, tuple(files))


def _changes(plan: Plan | None) -> bool:
    """Tell whether a plan gives anything but a copy; the full model has none."""
    return plan is not None and plan.changes


def _noted(report: Report, before: Sequence[str], *after: Sequence[str]) -> Report:
    notes = (*before, *report.notes, *(one for words in after for one in words))
    return report.model_copy(update={"notes": notes})


def _write_plan(plan: Plan | None, outputs: Outputs) -> list[Path]:
    if plan is None or outputs.plan is None:
        return []
    return [write_plan(plan, outputs.plan, outputs.force)]


def _check_checkable(plan: Plan | None, examples: Examples | None) -> None:
    """Refuse to convert where nothing could be run beside its source."""
    if plan is None or plan.inputs or examples or not _changes(plan):
        return
    raise VerificationError(
        where=plan.model,
        found="no input is known on which it runs, so that nothing could be checked",
        allowed="a conversion that was run beside its source",
        fix="describe an input with --input, give examples with --calibrate, or take the result "
        "as it is with --unchecked",
    )
