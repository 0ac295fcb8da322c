"""The full model that a recipe trains first, once for all jobs that share it."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import torch
from filelock import FileLock

from bp_convert.batch.folders import Results
from bp_convert.errors import CheckpointError
from bp_convert.files.atomic import write_all, write_text
from bp_convert.run.learning import learn, seeded, split_of
from bp_convert.run.opening import SourceModel, opened
from bp_convert.run.written import Outputs
from bp_convert.values.progress import Progress
from bp_convert.values.recipe import Job
from bp_convert.values.training import Trained

WEIGHTS, TRAINED = "weights.pt", "trained.json"  # of a full model


def trained_source(job: Job, identity: str, results: Results, progress: Progress) -> SourceModel:
    """Return the model of a job, trained as the recipe says; once for all jobs that share it.

    Args:
        identity: hash of the model and its training; names the cached file.

    Raises:
        CheckpointError: the model cannot be loaded or made.
        BpConvertError: training fails.
    """
    source = opened(job)
    if job.train is None:
        return source
    home = results.folder / "full" / identity
    home.parent.mkdir(parents=True, exist_ok=True)
    if not _is_there(home):
        progress("waiting for the full model", 0, 1)
    # The system lets the lock go when the process dies, whatever kills it.
    with FileLock(home.with_suffix(".lock")):
        if not _is_there(home):
            _train(job, source, home, results, progress)
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
    return replace(source, words=words, trained=True, full=trained)


def _is_there(home: Path) -> bool:
    return all((home / name).is_file() for name in (WEIGHTS, TRAINED))


def _train(job: Job, source: SourceModel, home: Path, results: Results, progress: Progress) -> None:
    """Train a full model, go on where a killed run was, and put it into its folder."""
    folder = results.training(f"full-{home.name}")

    def tell(words: str, done: int, total: int) -> None:
        progress(f"full model: {words}", done, total)

    run = seeded(job, job.train)
    assert run is not None
    alone = job.model_copy(update={"teacher": "none"})
    split = split_of(job, source.model, run, full=True)
    outputs = Outputs(checkpoints=folder, resume=True)
    model, trained = learn(source.model, source, alone, run, split, outputs, tell)
    with results.drafted(f"full-{home.name}") as draft:
        state = {name: one.detach().cpu() for name, one in model.state_dict().items()}
        write_all([(draft / WEIGHTS, lambda path: torch.save(state, path))])
        write_text(draft / TRAINED, trained.model_dump_json(indent=1) + "\n")
        shutil.rmtree(home, ignore_errors=True)  # what somebody has taken a file out of
        draft.rename(home)
    shutil.rmtree(folder, ignore_errors=True)
