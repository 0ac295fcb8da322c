"""Which dial to turn on a trained model: alpha or rank, at equal parameters.

    python benchmarks/alpha_or_rank.py [--only digits|fashion|resnet11] [--steps N]
                                       [--seeds N] [--full-epochs N] [SHARE ...]

Two models at a share of their parameters: as the planner spends them at alpha 1 (the rank dial),
and widened with ``--alpha 2`` and ``--alpha 3`` from the trained weights, with as many terms as the
same parameters allow. Accuracy on 5,000 images right after the conversion, and after a short
training on the source's logits of 5,000 others (Adam, 1e-3, batches of 64).
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import mean, stdev

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent.parent))
import bp_convert
from benchmarks import fashion
from benchmarks.clock import machine
from benchmarks.quality import outputs, shuffled
from bp_convert.values.plan import Plan
from recipes import assets

HALVINGS = 12


@dataclass
class Task:
    """A trained model, images to learn from, and others to score on."""

    model: nn.Module
    inputs: str
    examples: Tensor
    held: tuple[Tensor, Tensor]

    def score(self, model: nn.Module) -> float:
        """Return the share of images that a model names right, in percent."""
        images, labels = self.held
        guess = outputs(model.eval(), images, 500).argmax(1)
        return 100 * float((guess == labels).float().mean())


def digits(full_epochs: float) -> Task:
    """The digit CNN, 390,410 parameters."""
    images, labels = assets.digits()
    order = shuffled(len(images))
    here, there = order[:5000], order[5000:]
    return Task(assets.digit_cnn(), "1x28x28", images[here], (images[there], labels[there]))


def garments(net: str, full_epochs: float) -> Task:
    """A net of ``fashion.py`` on FashionMNIST."""
    (examples, _), held = fashion.garments(train=True), fashion.garments(train=False)
    return Task(fashion.trained(net, full_epochs), "1x28x28", examples, held)


TASKS: dict[str, Callable[[float], Task]] = {
    "digits": digits,
    "fashion": partial(garments, "svgg"),
    "resnet11": partial(garments, "resnet11"),
}


def widened(model: nn.Module, inputs: str, alpha: float, share: float) -> Plan | None:
    """Return the plan of most terms at this alpha within a share of the parameters."""
    low, high, best = 1e-4, 1.0, None
    for _ in range(HALVINGS):
        middle = (low * high) ** 0.5
        plan = bp_convert.plan(
            model, alpha=alpha, rank=middle, init="warm", inputs=[inputs], convert_anyway=True
        )
        if plan.params.ratio <= share:
            low, best = middle, plan
        else:
            high = middle
    return best


def trained(model: nn.Module, task: Task, wanted: Tensor, steps: int, seed: int) -> nn.Module:
    """Train on the source's logits."""
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    model.train()
    for _ in range(steps):
        at = torch.randint(len(task.examples), (64,), generator=generator)
        goal = F.log_softmax(wanted[at], 1)
        found = F.log_softmax(model(task.examples[at]), 1)
        loss = F.kl_div(found, goal, log_target=True, reduction="batchmean")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return model.eval()


def table(task: Task, shares: list[float], steps: int, seeds: int) -> None:
    """Print the rows of one model."""
    source = task.model.eval()
    wanted = outputs(source, task.examples, 500)
    print(f"\nthe source: {task.score(source):.2f} %\n")
    print("| parameters | dial | multiply-adds | converted | trained | seconds |")
    print("| ---: | --- | ---: | ---: | ---: | ---: |", flush=True)
    for share in shares:
        for alpha in (1, 2, 3):
            if alpha == 1:
                target = f"params={share}"
                plan = bp_convert.plan(
                    source, target=target, inputs=[task.inputs], convert_anyway=True
                )
            else:
                found = widened(source, task.inputs, alpha, share)
                if found is None:
                    print(f"| {100 * share:g} % | alpha {alpha} | | out of reach | | |", flush=True)
                    continue
                plan = found
            before = task.score(bp_convert.apply(source, plan).eval())
            start = time.perf_counter()
            after = []
            for seed in range(seeds):
                small = bp_convert.apply(source, plan)
                after.append(task.score(trained(small, task, wanted, steps, seed)))
            spread = stdev(after) if len(after) > 1 else 0.0
            seconds = (time.perf_counter() - start) / seeds
            assert plan.macs is not None
            print(
                f"| {100 * plan.params.ratio:.2f} % | alpha {alpha}{', planned' * (alpha == 1)} | "
                f"{plan.macs.after / plan.macs.before:.2f} x | {before:.2f} % | "
                f"{mean(after):.2f} ± {spread:.2f} % | {seconds:.0f} |",
                flush=True,
            )


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shares", nargs="*", type=float, default=[0.25, 0.1, 0.05, 0.02])
    parser.add_argument("--only", choices=TASKS, action="append")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--full-epochs", type=float, default=6.0)
    asked = parser.parse_args()
    print(f"{machine()}; {asked.steps} steps, {asked.seeds} seeds")
    for name in asked.only or TASKS:
        table(TASKS[name](asked.full_epochs), asked.shares, asked.steps, asked.seeds)


if __name__ == "__main__":
    main()
