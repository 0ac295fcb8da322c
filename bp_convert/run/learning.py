"""A job's data divided among its uses, and its training."""

from __future__ import annotations

from torch import nn

from bp_convert.data import Split, Uses, split_for
from bp_convert.run.opening import SourceModel, tokenizer_of
from bp_convert.run.written import Outputs
from bp_convert.values.plan import Plan
from bp_convert.values.progress import Progress
from bp_convert.values.recipe import Job
from bp_convert.values.training import Trained, Training


def split_of(
    job: Job,
    model: nn.Module,
    run: Training | None = None,
    *,
    plan: Plan | None = None,
    full: bool = False,
    download: bool = False,
) -> Split:
    """Decide what each use of a job's data gets.

    Also counterparts that read no examples are scored on those that the others leave, and the full
    model learns nothing that its conversions are scored on.

    Args:
        run: the training that learns: the job's, or that of its full model.
        plan: that is applied, where one is given.
        full: it is the full model's, to which nothing was fitted yet.
        download: let torchvision fetch what is trained on.

    Raises:
        DataError: a source cannot be read or does not fit the model, or uses cannot be kept apart.
    """
    uses = Uses(
        job.calibrate,
        job.examples,
        fits=not full and job.counterpart not in ("full", "pruned"),
        evaluate=job.evaluate,
        scored=job.scored,
        beside=tuple(one.data for one in job.trainings.values()),
    )
    return split_for(
        model,
        uses.with_training(run),
        job.request if plan is None else plan.settings,
        inputs=() if plan is None else plan.inputs,
        tokenizer=tokenizer_of(job),
        download=download,
    )


def training_of(job: Job) -> Training | None:
    """Return how a job's model is trained; None where it is not, or was as the full model."""
    if job.counterpart == "full" and job.train is not None:
        return None
    return seeded(job, job.finetune)


def seeded(job: Job, run: Training | None) -> Training | None:
    """Return training settings with the job's seed, where they have none of their own."""
    if run is None or "seed" in run.model_fields_set:
        return run
    return run.model_copy(update={"seed": job.request.seed % 2**32})


def has_teacher(job: Job, *, trained: bool) -> bool:
    """Tell whether a job's model learns from its source.

    Args:
        trained: whether the source is worth learning from.
    """
    auto = job.teacher == "auto" and trained and job.request.init != "random"
    return job.teacher == "source" or auto


def learn(
    model: nn.Module,
    source: SourceModel,
    job: Job,
    run: Training,
    split: Split,
    outputs: Outputs,
    progress: Progress,
) -> tuple[nn.Module, Trained]:
    """Train a copy of ``model``; go on where a killed run was, if ``outputs`` says so.

    Raises:
        BpConvertError: data that does not fit, or training that diverges.
    """
    from bp_convert.training import finetune  # takes seconds to import

    if outputs.checkpoints is not None:
        outputs.checkpoints.mkdir(parents=True, exist_ok=True)
    return finetune(
        model,
        teacher=source.model if has_teacher(job, trained=source.trained) else None,
        settings=run,
        folder=outputs.checkpoints,
        resume=outputs.resume,
        metric=job.metric,
        split=split,
        progress=progress,
    )
