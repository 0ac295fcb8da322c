"""Steps until a converted model is as good: from its conversion with its teacher, and from scratch.

    python benchmarks/recovery.py [--only digits|fashion] [--target params=0.03] [--steps N]
                                  [--full-epochs N] [--seeds N]

Both runs train the same structure on the same examples, optimiser, rate and batch. From
scratch, every layer starts from noise and learns from labels alone, as in the paper; the other
starts from the conversion and learns from labels and from the source. The line says after how many
steps each first reached the accuracy that the run from scratch had at its best, on examples that
neither learns from. The S-VGG for FashionMNIST is trained first, and kept in the cache folder.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent.parent))
import bp_convert
from benchmarks import fashion
from benchmarks.clock import machine
from recipes import assets


@dataclass
class Task:
    """A trained model, and what to learn from and to score on."""

    model: nn.Module
    data: Any
    validation: Any
    steps: int
    every: int


def digits(full_epochs: float) -> Task:
    """The digit CNN; 8,000 digits to learn from, 2,000 to score on."""
    images, labels = assets.digits()
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    images, labels = images[order], labels[order]
    return Task(
        assets.digit_cnn(), (images[:8000], labels[:8000]), (images[8000:], labels[8000:]), 600, 20
    )


def svgg(full_epochs: float) -> Task:
    """The paper's S-VGG in its form for one channel; scored on the test images."""
    return Task(fashion.trained("svgg", full_epochs), fashion.source(), fashion.source(), 1800, 50)


TASKS: dict[str, Callable[[float], Task]] = {"digits": digits, "fashion": svgg}


def curve(task: Task, model: nn.Module, steps: int, seed: int, **asked: Any) -> dict[int, float]:
    """Train; return the accuracy by step."""
    with tempfile.TemporaryDirectory() as folder:
        bp_convert.finetune(
            model,
            task.data,
            validation=task.validation,
            steps=steps,
            validate_every=task.every,
            folder=folder,
            seed=seed,
            schedule="constant",
            checkpoint_every=10**9,
            **asked,
        )
        lines = (Path(folder) / "log.jsonl").read_text().splitlines()
    entries = [json.loads(line) for line in lines]
    return {one["step"]: one["validation"]["accuracy"] for one in entries if "validation" in one}


def from_noise(model: nn.Module, seed: int) -> nn.Module:
    """Return a copy in which every layer starts afresh."""
    torch.manual_seed(seed)
    fresh = copy.deepcopy(model)
    for module in fresh.modules():
        reset = getattr(module, "reset_parameters", None)
        if callable(reset):
            reset()
    return fresh


def first(found: dict[int, float], goal: float) -> int | None:
    """Return the first step at which an accuracy was reached."""
    return next((step for step, value in sorted(found.items()) if value >= goal), None)


def main() -> None:
    """Print a line for each model and seed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=TASKS, action="append")
    parser.add_argument("--target", default="params=0.03")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--full-epochs", type=float, default=6)
    parser.add_argument("--seeds", type=int, default=1)
    asked = parser.parse_args()
    print(f"{machine()}; {asked.target}, batch 64, Adam 1e-3\n")
    print("| model | converted | scratch, best | steps | distilled | steps | ratio |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: |", flush=True)
    for name in asked.only or list(TASKS):
        task = TASKS[name](asked.full_epochs)
        small, report = bp_convert.convert(task.model, target=asked.target, convert_anyway=True)
        steps = asked.steps or task.steps
        for seed in range(asked.seeds):
            scratch = curve(task, from_noise(small, seed), steps, seed)
            taught = curve(task, small, steps, seed, teacher=task.model)
            goal = max(scratch.values())
            one, two = first(scratch, goal), first(taught, goal)
            ratio = f"{two / one:.2f}" if one and two is not None else "not reached"
            print(
                f"| {name}, {report.plan.params.after:,} parameters "
                f"| {100 * taught[0]:.2f} % | {100 * goal:.2f} % | {one} "
                f"| {100 * max(taught.values()):.2f} % | {two} | {ratio} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
