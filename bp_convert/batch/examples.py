"""The data of a job: what it calibrates on, what it scores on, and how text is read."""

from __future__ import annotations

from torch import nn

from bp_convert.data import Examples, examples_for
from bp_convert.data.door import rows_within, same_source, spare_of
from bp_convert.data.tokenizers import tokenizer_in
from bp_convert.values.recipe import Job


def calibration(job: Job, model: nn.Module) -> Examples | None:
    """Load what a job calibrates on; None where it does not.

    Raises:
        DataError: it cannot be read or does not fit the model.
    """
    if job.calibrate is None or job.counterpart in ("full", "pruned"):
        return None
    return _calibration(job, job.calibrate, model)


def _calibration(job: Job, source: str, model: nn.Module) -> Examples:
    return examples_for(
        model,
        source,
        job.request,
        count=job.examples,
        spare=spare_of(job.finetune, source, job.evaluate),
        tokenizer=tokenizer_of(job),
    )


def evaluation(job: Job, model: nn.Module, fitted: Examples | None) -> Examples | None:
    """Load what a job scores on; None where it does not.

    Args:
        fitted: what the job calibrates on.

    Raises:
        DataError: it cannot be read, does not fit the model, or all of it was calibrated on.
    """
    if job.evaluate is None:
        return None
    taken = 0
    if job.calibrate is not None and same_source(job.calibrate, job.evaluate):
        # Also counterparts that read no examples are scored on those that the others leave.
        taken = (fitted or _calibration(job, job.calibrate, model)).count
    return examples_for(
        model,
        job.evaluate,
        job.request,
        part="evaluate",
        count=job.scored,
        held_out=taken,
        tokenizer=tokenizer_of(job),
    )


def fitted_rows(job: Job, fitted: Examples | None) -> tuple[int, ...]:
    """Return which rows of the data that a job learns from it calibrated on."""
    learnt = None if job.finetune is None else job.finetune.data
    return () if learnt is None else rows_within(learnt, job.calibrate, fitted) or ()


def tokenizer_of(job: Job) -> str | None:
    """Return the folder of a job's tokenizer: the one it names, or its model's own."""
    if job.tokenizer is not None:
        return job.tokenizer
    folder = tokenizer_in(job.model, job.arch)
    return None if folder is None else str(folder)
