"""A job of a recipe: run in a folder of its own, logged, and put into place, failed or not."""

from __future__ import annotations

import contextlib
import os
import sys
import time
import traceback
from pathlib import Path

import yaml

from bp_convert.batch.folders import LOG, Results
from bp_convert.batch.full import trained_source
from bp_convert.batch.identity import Task
from bp_convert.errors import BpConvertError
from bp_convert.faults import Fault, Trail, of_the_machine
from bp_convert.files.atomic import write_text
from bp_convert.run.job import Given, run
from bp_convert.run.streamed import by_layer
from bp_convert.run.written import Outputs
from bp_convert.values.outcome import Outcome
from bp_convert.values.progress import Progress
from bp_convert.values.recipe import Job


def run_job(task: Task, results: Results, progress: Progress) -> tuple[Outcome, bool]:
    """Run a job and put its folder into place. Its faults become its outcome, and nobody else's.

    Returns:
        The outcome, and whether its folder is new: False where the job was finished before.
    """
    with results.drafted(task.job.name) as draft:
        outcome = run_in(draft, task, results, progress)
        return outcome, results.land(draft, outcome)


def run_in(draft: Path, task: Task, results: Results, progress: Progress) -> Outcome:
    """Run a job in a folder, without putting the folder into place; see ``run_job``."""
    start = time.perf_counter()
    job, identity = task.job, task.identity
    trail = Trail()
    with (
        (draft / LOG).open("a", encoding="utf-8", buffering=1) as log,
        contextlib.redirect_stdout(log),
        contextlib.redirect_stderr(log),
    ):
        try:
            _write_recipe(draft, job)
            print(f"job {job.name}, {identity}, process {os.getpid()}")
            tell = trail.told(_logged(progress))
            name = "model" if job.weights == "folder" else f"model.{job.weights}"
            outputs = Outputs(
                model=None if job.weights == "none" else draft / name,
                plan=draft / "plan.json",
                training=draft / "training.json",
                reports=tuple(draft / f"report.{form}" for form in job.report),
                unconverted=True,
                checkpoints=results.training(identity),
                resume=True,
            )
            large = job.train is None and job.weights == "folder" and by_layer(job, outputs.model)
            given = None if large else Given(trained_source(job, task.full, results, tell))
            done = run(job, outputs, given=given, progress=tell)
            assert done.outcome is not None
            outcome = done.outcome.model_copy(update={"identity": identity})
            for remark in done.remarks:
                print(remark)
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


def failure(job: Job, identity: str, problem: BpConvertError | Fault | str) -> Outcome:
    """Return the outcome of a job that failed."""
    words = problem if isinstance(problem, str) else told(problem)
    return Outcome(
        name=job.name,
        state="failed",
        identity=identity,
        keys=job.keys,
        model=job.words,
        paper=job.paper,
        problem=words[:500],
    )


def told(problem: BpConvertError | Fault) -> str:
    """Say what went wrong in a line."""
    if isinstance(problem, Fault):
        return f"{problem.where}: {problem.words}; a fault that bp-convert did not foresee"
    return f"{problem.where}: {problem.found}. To do: {problem.fix}"
