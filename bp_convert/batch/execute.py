"""A recipe run: which jobs are left, where they run, and what is written about them."""

from __future__ import annotations

import fnmatch
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from bp_convert.batch.book import Book, Stated
from bp_convert.batch.cluster import Cluster
from bp_convert.batch.folders import Results
from bp_convert.batch.identity import Identities, Task
from bp_convert.batch.local import Local
from bp_convert.batch.sources import check_files, check_scores
from bp_convert.errors import RecipeError
from bp_convert.files.atomic import write_text
from bp_convert.pages.batch import document
from bp_convert.provenance import machine, versions
from bp_convert.values.outcome import Outcome, Summary
from bp_convert.values.progress import Onlooker

FORMS = ("json", "csv", "html", "md")


def selected(book: Book, only: Sequence[str]) -> list[Stated]:
    """Return the jobs whose names match one of the patterns.

    Raises:
        RecipeError: a pattern that matches nothing.
    """
    names = [one.job.name for one in book.jobs]
    for pattern in only:
        if not fnmatch.filter(names, pattern):
            raise RecipeError(
                where=f"--only {pattern}",
                found="no job of this name",
                allowed=", ".join(names[:12]) + (", ..." if len(names) > 12 else ""),
                fix="name a job, or a pattern such as '*alpha=2*'",
            )
    return [
        one
        for one in book.jobs
        if not only or any(fnmatch.fnmatchcase(one.job.name, pattern) for pattern in only)
    ]


def run_recipe(
    book: Book,
    chosen: Sequence[Stated],
    folder: Path,
    watch: Onlooker,
    *,
    jobs: int = 1,
    executor: Literal["local", "ray"] = "local",
    resume: bool = False,
    force: bool = False,
    keep_going: bool = False,
) -> Summary:
    """Run those jobs of a recipe that are not finished, and write the summary of all.

    Args:
        chosen: the jobs that are to run.
        folder: of results.
        jobs: at a time.
        executor: worker processes of this machine, or a Ray cluster.
        resume: go on with what an earlier run left.
        force: do finished jobs again.
        keep_going: start further jobs after one has failed.

    Raises:
        RecipeError: files are missing, the folder holds another run's results, or is in use.
        KeyboardInterrupt: passed on, once the workers have ended and the summary is written.
    """
    for one in chosen:
        check_files(one)
        check_scores(one)
    results = Results(folder)
    identities = Identities()
    tasks = [identities.task(one.job) for one in chosen]
    with results.held():
        results.sweep()
        left = _left(book, tasks, results, watch, resume=resume, force=force)
        known = {task.job.name: task.identity for task in tasks}
        try:
            if left:
                kind = Cluster if executor == "ray" else Local
                kind(results, jobs).run(left, watch, keep_going=keep_going)
        finally:
            results.sweep()
            for one in book.jobs:
                if one.job.name not in known:
                    known[one.job.name] = identities.of(one.job)
            summary = summarised(book, results, known)
            for form in FORMS:
                path = results.folder / f"summary.{form}"
                write_text(path, document(summary, form), force=True)
    return summary


def _left(
    book: Book,
    tasks: Sequence[Task],
    results: Results,
    watch: Onlooker,
    *,
    resume: bool,
    force: bool,
) -> list[Task]:
    """Return the tasks that have to run; tell of those that are finished."""
    finished = [t for t in tasks if results.identity(t.job.name) == t.identity]
    there = results.names()
    if there and not (resume or force):
        raise RecipeError(
            where=str(results.folder),
            found=f"results of an earlier run: {len(there)} jobs, {len(finished)} of them as "
            f"{book.path.name} states them now",
            allowed="--resume to go on, --force to do them again, or another folder",
            fix="add --resume: finished jobs that nothing has changed for are kept",
        )
    if force:
        for task in finished:
            shutil.rmtree(results.home(task.job.name))
        return list(tasks)
    for task in finished:
        outcome = results.outcome(task.job.name, task.identity)
        if outcome is not None:
            watch.ended(outcome)
    return [task for task in tasks if task not in finished]


def summarised(book: Book, results: Results, identities: dict[str, str]) -> Summary:
    """Collect what became of every job of a recipe."""
    outcomes = []
    for job in (one.job for one in book.jobs):
        found = results.outcome(job.name, identities[job.name])
        found = found or Outcome(name=job.name, state="waiting")
        # The paper's figures are no part of a job's identity: the recipe's are the ones meant.
        outcomes.append(found.model_copy(update={"paper": job.paper}))
    return Summary(
        name=book.name,
        about=book.about,
        recipe=book.path.name,
        jobs=tuple(outcomes),
        versions=versions(),
        machine=machine(),
    )
