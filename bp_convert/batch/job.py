"""One job: open, train the full model, convert, score, train, score, write."""

from __future__ import annotations

import contextlib
import os
import sys
import time
import traceback
from pathlib import Path

import torch
import yaml
from torch import nn

from bp_convert import pipeline
from bp_convert.batch.build import Made, build
from bp_convert.batch.examples import split_of
from bp_convert.batch.folders import LOG, Results
from bp_convert.batch.models import Source, trained_source
from bp_convert.batch.outcomes import failure, keys_of, words_of
from bp_convert.batch.train import finetune, seeded
from bp_convert.data import Split
from bp_convert.errors import BpConvertError
from bp_convert.evaluation import Scorer
from bp_convert.faults import Trail, of_the_machine
from bp_convert.files import check_writable, save_weights, write_text
from bp_convert.graph.running import evaluating
from bp_convert.proof.result import result_at
from bp_convert.render.documents import document
from bp_convert.reporting import scored, trained
from bp_convert.values.outcome import Outcome
from bp_convert.values.progress import Progress
from bp_convert.values.recipe import Job
from bp_convert.values.report import Report
from bp_convert.values.score import Score
from bp_convert.values.training import Trained, Training


def run_job(
    job: Job, identity: str, full: str, results: Results, progress: Progress
) -> tuple[Outcome, bool]:
    """Run a job and put its folder into place. Its faults become its outcome, and nobody else's.

    Args:
        identity: hash of the job.
        full: hash of the trained model that it starts from.
        progress: called with words, steps done and their number.

    Returns:
        The outcome, and whether its folder is new: False where the job was finished before.
    """
    with results.drafted(job.name) as draft:
        outcome = run_in(draft, job, identity, full, results, progress)
        return outcome, results.land(draft, outcome)


def run_in(
    draft: Path, job: Job, identity: str, full: str, results: Results, progress: Progress
) -> Outcome:
    """Run a job in a folder, without putting the folder into place; see ``run_job``."""
    start = time.perf_counter()
    trail = Trail()
    with (
        (draft / LOG).open("a", encoding="utf-8", buffering=1) as log,
        contextlib.redirect_stdout(log),
        contextlib.redirect_stderr(log),
    ):
        try:
            _write_recipe(draft, job)
            print(f"job {job.name}, {identity}, process {os.getpid()}")
            told = trail.told(_logged(progress))
            outcome = _Run(draft, job, identity, full, results, told).run()
        except BpConvertError as problem:
            traceback.print_exc(file=sys.stderr)
            outcome = failure(job, identity, problem)
        except Exception as problem:
            fault = trail.looked_into(problem)
            print(fault.report(["bp-convert", "recipe", "run", "recipe.yaml"]), file=sys.stderr)
            outcome = failure(job, identity, of_the_machine(problem) or fault)
        seconds = time.perf_counter() - start
        print(f"{outcome.state} after {seconds:.1f} s")
    return outcome.model_copy(update={"seconds": seconds})


def _logged(progress: Progress) -> Progress:
    """Write each new step into the log too."""
    last = ""

    def tell(words: str, done: int, total: int) -> None:
        nonlocal last
        if words != last:
            last = words
            print(f"{time.strftime('%H:%M:%S')} {words}")
        progress(words, done, total)

    return tell


def _write_recipe(draft: Path, job: Job) -> None:
    """Write the job as a recipe of one job, which gives the same result again."""
    keys = job.model_dump(mode="json", by_alias=True, exclude_unset=True)
    if "input" in keys:
        keys["input"] = [str(one) for one in job.input]
    if "target" in keys:
        keys["target"] = [str(one) for one in job.target]
    text = yaml.safe_dump(keys, sort_keys=False, allow_unicode=True)
    write_text(draft / "recipe.yaml", text, force=True)


class _Run:
    def __init__(
        self,
        draft: Path,
        job: Job,
        identity: str,
        full: str,
        results: Results,
        progress: Progress,
    ) -> None:
        self.draft = draft
        self.job = job
        self.identity = identity
        self.full = full
        self.results = results
        self.progress = progress

    def run(self) -> Outcome:
        job = self.job
        torch.manual_seed(job.seed)
        self.progress("opening the model", 0, 1)
        source = trained_source(job, self.full, self.results, self.progress)
        if job.weights != "none":
            arch = None if job.counterpart == "full" else source.arch
            check_writable(source.model, f"model.{job.weights}", arch=arch, trust=job.trust)
        self.progress("reading the examples", 0, 1)
        learns = not (job.counterpart == "full" and job.train is not None)
        settings = seeded(job, job.finetune) if learns else None
        split = split_of(job, source.model, settings)
        examples = None if split.calibrate is None else split.calibrate.examples
        scorer = None
        if split.evaluate is not None:
            scored = split.evaluate.examples
            self.progress("scoring the full model", 0, 1)
            scorer = Scorer(source.model, scored, job.metric)
        made = build(job, source, examples, self.progress)
        converted = self._score(scorer, made.model)
        model, trained = self._train(made, source, settings, split)
        score = converted if trained is None else self._score(scorer, model)
        report = _reported(made.report, converted, trained, score)
        self._write(made, model, source, trained, report)
        return Outcome(
            name=job.name,
            identity=self.identity,
            keys=keys_of(job),
            model=words_of(job),
            params=made.params,
            macs=None if made.plan is None else made.plan.macs,
            bytes=made.bytes,
            error=None if report is None else report.plan.error,
            converted=converted,
            score=score,
            full=source.full,
            trained=trained,
            paper=job.paper,
            notes=(*source.notes, *made.notes),
        )

    def _score(self, scorer: Scorer | None, model: nn.Module) -> Score | None:
        if scorer is None:
            return None
        self.progress("scoring", 0, 1)
        return scorer.score(evaluating(model))

    def _train(
        self, made: Made, source: Source, settings: Training | None, split: Split
    ) -> tuple[nn.Module, Trained | None]:
        job = self.job
        if settings is None:
            return made.model, None
        learn = job.teacher == "source" or (
            job.teacher == "auto" and source.trained and job.request.init == "warm"
        )
        model, trained = finetune(
            made.model,
            source.model if learn else None,
            job,
            settings,
            folder=self.results.training(self.identity),
            split=split,
            progress=self.progress,
        )
        return evaluating(model), trained

    def _write(
        self,
        made: Made,
        model: nn.Module,
        source: Source,
        trained: Trained | None,
        report: Report | None,
    ) -> None:
        self.progress("writing", 0, 1)
        if made.plan is not None:
            pipeline.write_plan(made.plan, self.draft / "plan.json")
        if trained is not None:
            write_text(self.draft / "training.json", trained.model_dump_json(indent=1) + "\n")
        if report is not None:
            for form in self.job.report:
                path = self.draft / f"report.{form}"
                write_text(path, document(report, path))
        if self.job.weights == "none":
            return
        path = self.draft / f"model.{self.job.weights}"
        if made.plan is None and path.suffix != ".pt":
            save_weights(path, model)
            return
        start = None if self.job.model is None else Path(self.job.model)
        with result_at(path, trust=self.job.trust, force=False) as file:
            assert file is not None
            _, notes = file.write(model, source.arch if made.plan is not None else None, start)
            for note in notes:
                print(note)  # into the log


def _reported(
    report: Report | None, converted: Score | None, done: Trained | None, score: Score | None
) -> Report | None:
    """Put what scoring and training gave into the report of the conversion."""
    if report is None:
        return None
    report = scored(report, [converted] if converted is not None else [])
    if done is None:
        return report
    return trained(report, done, [score] if score is not None else [])
