"""Where jobs meet training."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from torch import nn

from bp_convert import training
from bp_convert.values.progress import Progress
from bp_convert.values.recipe import Job
from bp_convert.values.training import Trained


def finetune(
    model: nn.Module,
    teacher: nn.Module | None,
    job: Job,
    *,
    folder: Path,
    tokenizer: str | None,
    progress: Progress,
    fitted: Collection[int] = (),
) -> tuple[nn.Module, Trained]:
    """Train a copy of ``model`` as the job's ``finetune`` says; go on where a killed run was.

    Args:
        teacher: whom to learn from; None learns from labels alone.
        folder: where checkpoints lie while the job is not finished.
        fitted: rows of the training's data that were calibrated on.
        progress: called with words, steps done and their number.

    Raises:
        BpConvertError: data that does not fit, or training that diverges.
    """
    settings = job.finetune
    assert settings is not None
    if "seed" not in settings.model_fields_set:
        settings = settings.model_copy(update={"seed": job.seed % 2**32})
    folder.mkdir(parents=True, exist_ok=True)
    return training.finetune(
        model,
        settings.data,
        teacher=teacher,
        settings=settings,
        folder=folder,
        resume=True,
        metric=job.metric,
        inputs=job.request.inputs or None,
        tokenizer=tokenizer,
        fitted=fitted,
        progress=progress,
    )
