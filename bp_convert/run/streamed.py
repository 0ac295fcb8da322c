"""A job on a model that is too large for memory: planned by its shapes, written layer by layer."""

from __future__ import annotations

from pathlib import Path

from bp_convert.errors import CheckpointError, PlanError
from bp_convert.files.atomic import is_folder
from bp_convert.free_memory import free_memory
from bp_convert.hub.layout import CONFIG, holds_plan, weight_files
from bp_convert.values.recipe import Job

# In memory a conversion holds the model, its copy, and another pair while it is checked.
SHARE = 0.25  # of the free memory that a checkpoint may have, before it is read layer by layer
WHOLE = "converted layer by layer from disk: nothing was run, errors are those of the weights"


def by_layer(job: Job, output: Path | None, *, dry: bool = False) -> bool:
    """Tell whether a job is done layer by layer: as it says, or where its model is large for the
    free memory and what it asks for can be had so.

    Args:
        output: the model's; None where it has the default name.
    """
    if job.layerwise is not None:
        return job.layerwise
    folder = None if job.model is None else Path(job.model).expanduser()
    if folder is None or not (folder / CONFIG).is_file() or holds_plan(folder):
        return False
    if _wants(job) or not (dry or output is None or is_folder(output)):
        return False
    try:
        files = weight_files(folder)
        size = sum(one.stat().st_size for one in files)
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return False
    safe = all(one.suffix == ".safetensors" for one in files)
    return safe and size > SHARE * free_memory()


def _wants(job: Job) -> list[tuple[str, str]]:
    """Return what a job asks for that takes the whole model at once, and what to ask for."""
    rank = "--rank 0.25 gives each layer its share, and rules in --settings some of them another"
    run = "convert first; the result is small enough for it"
    found = {
        ("--target", rank): bool(job.settings.target or job.target),
        ("--alpha", "widths are followed through the whole model"): job.request.alpha != 1,
        ("--calibrate", "leave it out, and train the result"): job.calibrate is not None,
        ("--evaluate", run): job.evaluate is not None,
        ("--finetune", "bp-convert finetune trains the result"): job.finetune is not None,
        ("--measure", run): bool(job.measure),
        ("--dtype", "layers keep the type that they have"): job.dtype is not None,
        ("--arch", "it reads a folder with its config.json"): job.arch is not None,
        ("a counterpart", "make it in memory"): job.counterpart is not None,
    }
    return [key for key, asked in found.items() if asked]


def check_by_layer(job: Job, output: Path | None) -> None:
    """Refuse, before any work, what cannot be had layer by layer.

    Raises:
        PlanError: the job asks for something that takes the whole model.
        CheckpointError: the model is no folder, or the result would be none.
    """
    for name, fix in _wants(job):
        raise PlanError(
            where=f"{name}, layer by layer",
            found="a model that is not to be in memory at once",
            allowed="--rank, --pairs, --init, --include, --exclude, --settings, --plan",
            fix=f"{fix}; or convert in memory: --in-memory",
        )
    folder = Path(job.model or "").expanduser()
    if job.model is None or not (folder / CONFIG).is_file() or holds_plan(folder):
        raise CheckpointError(
            where=str(job.model or job.arch),
            found="no folder of a transformers model to read layer by layer",
            allowed="a folder with config.json and .safetensors",
            fix="give such a folder, or convert in memory: --in-memory",
        )
    if output is not None and not is_folder(output):
        raise CheckpointError(
            where=str(output),
            found="one file for a model that is written layer by layer",
            allowed="a folder, as the model has",
            fix=f"-o {output.with_suffix('')}/",
        )


def default_output(job: Job) -> Path:
    """Return where a job's model goes if nobody says so."""
    model = Path(job.model or "model")
    return Path(f"{model.name}-bp" if by_layer(job, None) else f"{model.stem}-bp.pt")
