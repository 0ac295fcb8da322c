"""The model that a job starts from, trained first where the recipe says so."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from filelock import FileLock
from torch import nn

from bp_convert.batch.examples import split_of
from bp_convert.batch.folders import Results
from bp_convert.batch.train import finetune, seeded
from bp_convert.errors import CheckpointError
from bp_convert.files import arch_factory, load_model, write_text
from bp_convert.files.atomic import write_all
from bp_convert.graph.running import same_draws
from bp_convert.values.progress import Progress
from bp_convert.values.recipe import Job
from bp_convert.values.training import Trained

WEIGHTS, TRAINED = "weights.pt", "trained.json"  # of a full model


@dataclass(frozen=True)
class Source:
    """The model before conversion.

    Attributes:
        model: on the CPU.
        words: where it came from.
        arch: how to make it again; None where its file holds the class.
        trained: whether it is worth learning from: a file, a trained model, not a fresh start.
        full: what training it gave, where the recipe trains it.
        notes: remarks.
    """

    model: nn.Module
    words: str
    arch: str | None
    trained: bool
    full: Trained | None = None
    notes: tuple[str, ...] = ()


def open_source(job: Job) -> Source:
    """Load or make the model of a job, untrained where it comes from an architecture alone.

    Raises:
        CheckpointError: it cannot be loaded or made.
    """
    if job.model is not None:
        loaded = load_model(
            Path(job.model).expanduser(),
            arch=job.arch,
            trust=job.trust,
            allow_missing=job.allow_missing,
        )
        return Source(loaded.model, loaded.source, loaded.arch, True, None, loaded.notes)
    assert job.arch is not None
    factory = arch_factory(job.arch, trust=job.trust)
    with same_draws(job.seed):
        model = factory()
    # A user's own factory may return a trained model; a library's architecture is a fresh start.
    own = job.arch.partition("?")[0].rpartition(":")[0].endswith(".py")
    return Source(model, f"made by {job.arch}", job.arch, own)


def trained_source(job: Job, identity: str, results: Results, progress: Progress) -> Source:
    """Return the model of a job, trained as the recipe says; once for all jobs that share it.

    Args:
        identity: hash of the model and its training; names the cached file.

    Raises:
        CheckpointError: the model cannot be loaded or made.
        BpConvertError: training fails.
    """
    source = open_source(job)
    if job.train is None:
        return source
    home = results.folder / "full" / identity
    home.parent.mkdir(parents=True, exist_ok=True)
    found = _cached(home, source)
    if found is not None:
        return found
    progress("waiting for the full model", 0, 1)
    # The system lets the lock go when the process dies, whatever kills it.
    with FileLock(home.with_suffix(".lock")):
        found = _cached(home, source)
        if found is not None:
            return found
        folder = results.training(f"full-{identity}")

        def tell(words: str, done: int, total: int) -> None:
            progress(f"full model: {words}", done, total)

        settings = seeded(job, job.train)
        assert settings is not None
        split = split_of(job, source.model, settings, full=True)
        model, trained = finetune(
            source.model, None, job, settings, folder=folder, split=split, progress=tell
        )
        with results.drafted(f"full-{identity}") as draft:
            state = {name: one.detach().cpu() for name, one in model.state_dict().items()}
            write_all([(draft / WEIGHTS, lambda path: torch.save(state, path))])
            write_text(draft / TRAINED, trained.model_dump_json(indent=1) + "\n")
            shutil.rmtree(home, ignore_errors=True)  # what somebody has taken a file out of
            draft.rename(home)
        shutil.rmtree(folder, ignore_errors=True)
    done = _cached(home, source)
    assert done is not None
    return done


def _cached(home: Path, source: Source) -> Source | None:
    if not all((home / name).is_file() for name in (WEIGHTS, TRAINED)):
        return None
    try:
        state = torch.load(home / WEIGHTS, weights_only=True, map_location="cpu")
        source.model.load_state_dict(state)
        trained = Trained.model_validate(json.loads((home / TRAINED).read_text("utf-8")))
    except (OSError, RuntimeError, ValueError) as problem:
        raise CheckpointError(
            where=str(home),
            found=f"a full model that cannot be read: {str(problem).splitlines()[0][:200]}",
            allowed="what a run of this recipe wrote there",
            fix="remove the folder; it is trained again",
        ) from None
    words = f"{source.words}, trained for {trained.steps:,} steps"
    return Source(source.model, words, source.arch, True, trained, source.notes)
