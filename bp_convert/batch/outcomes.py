"""Outcomes of jobs in words; nothing here needs torch."""

from __future__ import annotations

from pathlib import Path

from bp_convert.errors import BpConvertError
from bp_convert.faults import Fault
from bp_convert.values.outcome import Outcome
from bp_convert.values.recipe import Job


def failure(job: Job, identity: str, problem: BpConvertError | Fault | str) -> Outcome:
    """Return the outcome of a job that failed."""
    words = problem if isinstance(problem, str) else told(problem)
    return Outcome(
        name=job.name,
        state="failed",
        identity=identity,
        keys=keys_of(job),
        model=words_of(job),
        paper=job.paper,
        problem=words[:500],
    )


def told(problem: BpConvertError | Fault) -> str:
    """Say what went wrong in a line."""
    if isinstance(problem, Fault):
        return f"{problem.where}: {problem.words}; a fault that bp-convert did not foresee"
    return f"{problem.where}: {problem.found}. To do: {problem.fix}"


def keys_of(job: Job) -> dict[str, object]:
    """Return what tells a job from its neighbours, as plain values."""
    request = job.request
    return {
        "alpha": request.alpha,
        "rank": request.rank,
        "target": ", ".join(map(str, request.target)),
        "method": request.method,
        "counterpart": job.counterpart or "",
        "init": request.init,
        "seed": request.seed,
    }


def words_of(job: Job) -> str:
    """Name the model of a job in a few words."""
    text = job.model or (job.arch or "")
    return Path(text).name if job.model else text.partition("?")[0].rpartition(":")[2]
