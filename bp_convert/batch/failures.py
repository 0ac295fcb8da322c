"""A job that failed, as an outcome and in a line."""

from __future__ import annotations

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
