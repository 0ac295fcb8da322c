"""A dry run: every job planned, and what its training costs estimated."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from functools import cache
from math import ceil
from pathlib import Path

import torch
from torch import nn

from bp_convert import pipeline
from bp_convert.batch.attempt import told
from bp_convert.batch.book import Stated
from bp_convert.batch.sources import check_files, check_scores
from bp_convert.data import Examples, examples_for
from bp_convert.errors import BpConvertError, DataError
from bp_convert.faults import looked_into, of_the_machine
from bp_convert.pruning import prune
from bp_convert.run.learning import has_teacher, training_of
from bp_convert.run.making import planned
from bp_convert.run.opening import opened, tokenizer_of
from bp_convert.values.outcome import Estimate
from bp_convert.values.progress import Progress, unheard
from bp_convert.values.recipe import Job
from bp_convert.values.settings import Settings
from bp_convert.values.training import Training

PASSES = 3  # a step costs a forward pass and, with respect to inputs and weights, two more
# Examples in the training part of data sets that may be named without being here.
SIZES = {
    "CIFAR10": 50_000,
    "CIFAR100": 50_000,
    "FashionMNIST": 60_000,
    "ImageNet": 1_281_167,
    "KMNIST": 60_000,
    "MNIST": 60_000,
    "SVHN": 73_257,
}


def estimates(jobs: Sequence[Stated], progress: Progress) -> Iterator[Estimate]:
    """Plan jobs one after the other; what stops one stops none of the others.

    Jobs that differ in nothing but their seed are planned once.
    """
    known: dict[str, Estimate] = {}
    for number, one in enumerate(jobs):
        progress(one.job.name, number, len(jobs))
        key = one.job.model_dump_json(exclude={"name", "paper", "seed"})
        if key not in known:
            known[key] = _tried(one)
        yield known[key].model_copy(update={"name": one.job.name})


def _tried(one: Stated) -> Estimate:
    try:
        check_files(one)
        check_scores(one)
        return _estimate(one.job)
    except BpConvertError as problem:
        words = told(problem)
    except Exception as problem:  # of one job, which stops none of the others
        words = told(of_the_machine(problem) or looked_into(problem))
    return Estimate(name=one.job.name, what=what(one.job), problem=words)


def what(job: Job) -> str:
    """Say in a few words how a job's model is made."""
    request = job.request
    if job.counterpart == "full":
        words = "full"
    else:
        sizes = [str(target) for target in request.target]
        if not sizes:
            sizes += [f"alpha {request.alpha:g}"] if request.alpha != 1 else []
            sizes += [f"rank {request.rank:g}"] if request.rank != 1 or not sizes else []
        words = ", ".join(sizes)
        if job.counterpart:
            words = f"{job.counterpart} like {words}"
        elif request.method != "auto":
            words += f" by {request.method}"
        words += ", afresh" if request.init == "random" else ""
    return words


def _estimate(job: Job) -> Estimate:
    source = opened(job)
    notes = list(source.notes)
    if job.train is not None and job.request.target:
        notes.append(
            "planned on untrained weights, without data: another choice within the same target"
        )
        examples = None
    else:
        examples = _examples(job, source.model, notes)
    if job.counterpart == "full":
        kept = Settings(inputs=job.request.inputs, exclude=("*",))
        plan, converted = pipeline.plan(source.model, kept), (0, 0)
    else:
        plan = planned(job, source.model, examples, unheard).plan
        if job.counterpart == "pruned":
            _, plan = prune(source.model, plan.params.after, inputs=plan.inputs, init="random")
        converted = (len(plan.converted), len(plan.layers))
    macs = plan.macs
    first = _steps(job.train)
    then = _steps(training_of(job))
    cost, knows = None, source.trained or job.train is not None
    if macs is not None and first is not None and then is not None:
        teacher = macs.before if has_teacher(job, trained=knows) else 0
        cost = float(
            PASSES * macs.before * first * _batch(job.train)
            + (PASSES * macs.after + teacher) * then * _batch(job.finetune)
        )
    return Estimate(
        name=job.name,
        what=what(job),
        params=plan.params,
        macs=macs,
        converted=converted,
        steps=(first, then),
        training_macs=cost,
        seconds=None if cost is None else cost / speed(),
        notes=tuple(notes),
    )


def _examples(job: Job, model: nn.Module, notes: list[str]) -> Examples | None:
    if job.calibrate is None or job.counterpart in ("full", "pruned"):
        return None
    try:
        return examples_for(
            model,
            job.calibrate,
            job.request,
            count=job.examples,
            tokenizer=tokenizer_of(job),
        )
    except DataError as problem:
        notes.append(f"planned by the weights alone: {problem.where}: {problem.found}")
        return None


def _batch(training: Training | None) -> int:
    return 0 if training is None else training.batch * training.accumulate


def _steps(training: Training | None) -> int | None:
    """Return the optimiser's steps; None where the size of the data is not known."""
    if training is None:
        return 0
    if training.steps is not None:
        return training.steps
    size = _size(training.data or "")
    if size is None or training.epochs is None:
        return None
    if isinstance(training.validation, float):
        size = round(size * (1 - training.validation))
    return ceil(training.epochs * ceil(size / _batch(training)))


def _size(source: str) -> int | None:
    """Return how many examples a source holds, where that is known without reading it."""
    name = source.partition("?")[0]
    path = Path(name).expanduser()
    if name in SIZES:
        return SIZES[name]
    if path.is_dir():
        kinds = {".jpg", ".jpeg", ".png", ".bmp", ".webp"}
        return sum(one.suffix.lower() in kinds for one in path.rglob("*")) or None
    if path.suffix == ".npz" and path.is_file():
        import numpy as np

        with np.load(path, allow_pickle=False) as opened:
            return max((len(opened[key]) for key in opened.files), default=0) or None
    return None


@cache
def speed() -> float:
    """Return the multiply-adds in a second of a large matrix product, measured here once."""
    one = torch.randn(512, 512)
    one @ one
    start, runs = time.perf_counter(), 0
    while time.perf_counter() - start < 0.2:
        one @ one
        runs += 1
    return runs * 512**3 / (time.perf_counter() - start)
