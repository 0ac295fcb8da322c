"""The model that a job starts from, opened or made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from bp_convert import pipeline
from bp_convert.errors import PlanError
from bp_convert.files.arch import arch_factory
from bp_convert.files.converted import is_converted, read_converted
from bp_convert.graph.running import same_draws
from bp_convert.run.written import is_architecture
from bp_convert.storage import load
from bp_convert.values.architecture import Architecture
from bp_convert.values.recipe import Job
from bp_convert.values.training import Trained

TOKENIZER = ("tokenizer.json", "tokenizer_config.json")  # files that show one


@dataclass(frozen=True)
class SourceModel:
    """The model before conversion.

    Attributes:
        model: on the CPU, or where the job says.
        words: where it came from.
        arch: how to make it again; None where its file holds the class.
        trained: whether it is worth learning from: a file, a trained model, not a fresh start.
        full: what training it gave, where the recipe trains it.
        notes: remarks.
    """

    model: nn.Module
    words: str = ""
    arch: str | None = None
    trained: bool = True
    full: Trained | None = None
    notes: tuple[str, ...] = ()


def opened(job: Job) -> SourceModel:
    """Load or make the model of a job, untrained where it comes from an architecture alone.

    Raises:
        CheckpointError: it cannot be loaded or made.
        PlanError: there is no such device.
    """
    with same_draws(job.request.seed):  # of weights that a file lacks, or that start afresh
        if job.model is not None:
            path = Path(job.model).expanduser()
            loaded = pipeline.open_model(
                path, arch=job.arch, trust=job.trust, allow_missing=job.allow_missing
            )
            model = _moved(loaded.model, job.device)
            return SourceModel(model, loaded.source, loaded.arch, notes=loaded.notes)
        assert job.arch is not None
        model = _moved(arch_factory(job.arch, trust=job.trust)(), job.device)
    # A user's own factory may return a trained model; a library's architecture is a fresh start.
    own = Architecture.parse(job.arch).script is not None
    return SourceModel(model, f"made by {job.arch}", job.arch, trained=own)


def _moved(model: nn.Module, device: str | None) -> nn.Module:
    if device is None:
        return model
    try:
        return model.to(device)
    except (RuntimeError, AssertionError) as problem:
        raise PlanError(
            where=f"device {device}",
            found=str(problem).strip().splitlines()[0],
            allowed="cpu, or a device that torch sees here",
            fix="leave --device out, or install a torch build for this device",
        ) from None


def any_model(
    text: str, arch: str | None = None, trust: Sequence[str] = ()
) -> tuple[nn.Module, str | None]:
    """Open a converted file or any other model file, or make an untrained architecture.

    Args:
        text: a path, or one of the forms of ``arch``, which the user typed.

    Returns:
        The model, and how its source's class is made, where a file should say so.

    Raises:
        CheckpointError: it cannot be loaded or made.
    """
    path = Path(text)
    if is_architecture(text):
        return arch_factory(text, trust=trust, typed=True)(), None
    if path.is_dir() and is_converted(path):
        return load(path), None
    if path.exists() and not path.is_dir() and is_converted(path):
        found = read_converted(path, trust=trust).arch if arch is None else arch
        make = None if arch is None else arch_factory(arch, trust=trust, typed=True)
        return load(path, model=make, trust=trust), found
    loaded = pipeline.open_model(path, arch=arch, trust=trust)
    return loaded.model, loaded.arch


def tokenizer_of(job: Job) -> str | None:
    """Return the folder of a job's tokenizer: the one it names, or its model's own."""
    if job.tokenizer is not None:
        return job.tokenizer
    folder = tokenizer_in(job.model, job.arch)
    return None if folder is None else str(folder)


def tokenizer_in(model: str | Path | None, arch: str | None) -> Path | None:
    """Return the folder beside a model, or of its architecture, that holds its tokenizer."""
    places = [] if model is None else [Path(model)]
    asked = Architecture.parse(arch or "")
    if asked.source == "transformers":
        places.append(Path(asked.name))
    for place in places:
        folder = place if place.is_dir() else place.parent
        if any((folder / name).is_file() for name in TOKENIZER):
            return folder
    return None
