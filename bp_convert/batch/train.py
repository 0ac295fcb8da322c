"""Where jobs meet training."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from bp_convert import training
from bp_convert.data import Split
from bp_convert.values.progress import Progress
from bp_convert.values.recipe import Job
from bp_convert.values.training import Trained, Training


def seeded(job: Job, settings: Training | None) -> Training | None:
    """Return training settings of a job with the job's seed, where they have none of their own."""
    if settings is None or "seed" in settings.model_fields_set:
        return settings
    return settings.model_copy(update={"seed": job.seed % 2**32})


def finetune(
    model: nn.Module,
    teacher: nn.Module | None,
    job: Job,
    settings: Training,
    *,
    folder: Path,
    split: Split,
    progress: Progress,
) -> tuple[nn.Module, Trained]:
    """Train a copy of ``model``; go on where a killed run was.

    Args:
        teacher: whom to learn from; None learns from labels alone.
        settings: with the seed of ``seeded``.
        folder: where checkpoints lie while the job is not finished.
        split: what each use of the job's data gets.
        progress: called with words, steps done and their number.

    Raises:
        BpConvertError: data that does not fit, or training that diverges.
    """
    folder.mkdir(parents=True, exist_ok=True)
    return training.finetune(
        model,
        teacher=teacher,
        settings=settings,
        folder=folder,
        resume=True,
        metric=job.metric,
        split=split,
        progress=progress,
    )
