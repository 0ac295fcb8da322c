"""Recipes' jobs on small data of the right form: what is downloaded or takes hours is replaced."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from bp_convert.batch.attempt import run_job
from bp_convert.batch.book import Book
from bp_convert.batch.folders import Results
from bp_convert.batch.identity import Identities
from bp_convert.values.outcome import Outcome
from bp_convert.values.recipe import Job
from bp_convert.values.tensors import TensorSpec
from bp_convert.values.training import Training

MODELS = "recipes/asset_models.py"
# Trained models by their classes, without the weights that a registry has; large ones smaller.
FRESH = {
    f"{MODELS}:digit_cnn": "tests/recipes/narrow.py:digit_cnn",
    f"{MODELS}:crepe": "tests/recipes/narrow.py:crepe",
    f"{MODELS}:voice_encoder": "tests/recipes/narrow.py:voice_encoder",
    f"{MODELS}:minilm": f"{MODELS}:minilm_empty",
    f"{MODELS}:reader": f"{MODELS}:Reader?width=32",
    f"{MODELS}:detector": f"{MODELS}:Detector?thin=16",
    f"{MODELS}:face_net": f"{MODELS}:FaceNet",
    "torchvision:vgg19": "tests/recipes/narrow.py:vgg",
    "bp:resnet56": "bp:resnet?depth=11&width=8",
    "bp:svgg": "tests/recipes/narrow.py:svgg",
    "bp:resnet": "bp:resnet?depth=11&width=8&in_channels=1",
    "bp:captioner": "bp:captioner?vocabulary=500",
}
# Inputs of the same form, where the recipe's own are large.
SMALLER = {
    "3x224x224": "3x64x64",
    "3x128x128": "3x32x32",
    "1x64x256": "1x64x32",
    "160x40": "12x40",
    "image=float32:1x4096": "image=float32:1x4096",
    "tokens=int64:1x34<8256": "tokens=int64:1x4<500",
    "input_ids=int64:1x48<30522": "input_ids=int64:1x8<500",
    "attention_mask=int64:1x48<2": "attention_mask=int64:1x8<2",
}
KEPT = (f"{MODELS}:FaceNet", "tests/recipes/narrow.py:svgg")  # take the recipe's options
CLASSES = 10
SEEN: set[object] = set()  # CIFAR-10 and SVHN have the same models


def representatives(book: Book) -> list[Job]:
    """Return one job of each kind that no recipe of the same model had before."""
    kinds: dict[object, Job] = {}
    for one in book.jobs:
        job = one.job
        kind = (job.counterpart, job.init, bool(job.target), job.request.method)
        if len(book.jobs) <= 12 and book.name == "faces":
            kind = (*kind, job.arch)  # its models have little in common
        kinds.setdefault(kind, job)
    first, *rest = kinds.items()
    fresh = [first, *((kind, job) for kind, job in rest if (job.arch, kind) not in SEEN)]
    SEEN.update((job.arch, kind) for kind, job in fresh)
    return [job for _, job in fresh]


def ran(job: Job, folder: Path) -> tuple[Outcome, Path]:
    """Run a job for two steps; return its outcome and its folder."""
    small = shrunk(job, folder)
    results = Results(folder / "out")
    identities = Identities()
    outcome, fresh = run_job(identities.task(small), results, lambda *_: None)
    assert fresh
    return outcome, results.home(job.name)


def shrunk(job: Job, folder: Path) -> Job:
    """Return a job with small data, a fresh model and two steps of training."""
    arch = job.arch or ""
    for trained, fresh in FRESH.items():
        if arch.partition("?")[0] == trained.partition("?")[0]:
            options = arch.partition("?")[2] if fresh in KEPT else ""
            arch = fresh + ("?" if options else "") + options
            break
    inputs = tuple(TensorSpec.parse(SMALLER.get(str(one), str(one))) for one in job.input)
    data = _data(job, inputs, folder)
    changes: dict[str, object] = {
        "arch": arch,
        "trust": (MODELS, "recipes/assets.py", "tests/recipes/narrow.py"),
    }
    if job.input:
        changes["input"] = inputs
    changes |= {key: data[key] for key in ("calibrate", "evaluate") if getattr(job, key)}
    for key in ("train", "finetune"):
        training = getattr(job, key)
        if training is not None:
            changes[key] = _two_steps(training, data["calibrate"])
    given = {key: getattr(job, key) for key in job.model_fields_set}
    return Job.model_validate({**given, **changes, "examples": 6, "scored": 4})


def _two_steps(training: Training, data: str) -> Training:
    kept = training.model_dump(
        exclude={"epochs", "steps", "data", "batch", "validation", "workers"}
    )
    return Training.model_validate(
        {**kept, "steps": 2, "data": data, "batch": 2, "validation": 0.34}
    )


def _data(job: Job, inputs: tuple[TensorSpec, ...], folder: Path) -> dict[str, str]:
    """Write two files of examples that look like what the recipe names."""
    specs = inputs or (TensorSpec.parse("3x32x32"),)
    if (not inputs and "in_channels=1" in (job.arch or "")) or (
        not inputs and "digit" in (job.arch or "")
    ):
        specs = (TensorSpec.parse("1x28x28"),)
    drawn = np.random.default_rng(0)
    found = {}
    for key, count in (("calibrate", 6), ("evaluate", 4)):
        columns: dict[str, np.ndarray] = {}
        for number, spec in enumerate(specs):
            name = spec.name or ("inputs" if number == 0 else f"input{number}")
            shape = (count, *spec.shape)
            columns[name] = (
                drawn.integers(0, spec.high or 2, shape)
                if spec.dtype.startswith("int")
                else drawn.standard_normal(shape).astype("float32")
            )
        if "mask" in columns:
            columns["mask"][:] = 1
        if job.metric is None and (job.train is not None or "digit" in (job.arch or "")):
            columns["labels"] = drawn.integers(0, CLASSES, count)
        path = folder / f"{key}-{job.name}.npz"
        np.savez(path, **columns)
        found[key] = str(path)
    return found
