"""The data of a job: what it calibrates on, learns and scores, and how text is read."""

from __future__ import annotations

from torch import nn

from bp_convert.data import Split, Uses, split_for
from bp_convert.data.text_lines import tokenizer_in
from bp_convert.values.recipe import Job
from bp_convert.values.training import Training


def split_of(job: Job, model: nn.Module, training: Training | None, *, full: bool = False) -> Split:
    """Decide what each use of a job's data gets.

    Also counterparts that read no examples are scored on those that the others leave, and the full
    model learns nothing that its conversions are scored on.

    Args:
        training: the run that learns: the job's, or that of its full model.
        full: it is the full model's, to which nothing was fitted yet.

    Raises:
        DataError: a source cannot be read or does not fit the model, or uses cannot be kept apart.
    """
    uses = Uses(
        job.calibrate,
        job.examples,
        fits=not full and job.counterpart not in ("full", "pruned"),
        evaluate=job.evaluate,
        scored=job.scored,
        beside=tuple(one.data for one in (job.train, job.finetune) if one is not None),
    )
    return split_for(model, uses.with_training(training), job.request, tokenizer=tokenizer_of(job))


def tokenizer_of(job: Job) -> str | None:
    """Return the folder of a job's tokenizer: the one it names, or its model's own."""
    if job.tokenizer is not None:
        return job.tokenizer
    folder = tokenizer_in(job.model, job.arch)
    return None if folder is None else str(folder)
