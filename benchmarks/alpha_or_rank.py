"""Which dial to turn on a trained model: alpha or rank, at equal parameters.

    python benchmarks/alpha_or_rank.py [--steps N] [--seeds N] [SHARE ...]

The digit CNN at a share of its parameters: as the planner spends them at alpha 1 (the rank dial),
and widened with ``--alpha 2`` and ``--alpha 3`` from the trained weights, with as many terms as the
same parameters allow. Accuracy on 5,000 images right after the conversion, and after a short
training on the source's logits of 5,000 others (Adam, 1e-3, batches of 64).
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from statistics import mean, stdev

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent.parent))
import bp_convert
from benchmarks import assets
from benchmarks.quality import shuffled
from benchmarks.timing import machine
from bp_convert.values.plan import Plan

HALVINGS = 12
INPUT = ["1x28x28"]


def widened(model: nn.Module, alpha: float, share: float) -> Plan | None:
    """Return the plan of most terms at this alpha within a share of the parameters."""
    low, high, best = 1e-4, 1.0, None
    for _ in range(HALVINGS):
        middle = (low * high) ** 0.5
        plan = bp_convert.plan(
            model, alpha=alpha, rank=middle, init="warm", inputs=INPUT, convert_anyway=True
        )
        if plan.params.ratio <= share:
            low, best = middle, plan
        else:
            high = middle
    return best


def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Return the share of images that the model names right, in percent."""
    with torch.no_grad():
        guess = torch.cat([model(part).argmax(1) for part in images.split(500)])
    return 100 * float((guess == labels).float().mean())


def trained(model: nn.Module, images: Tensor, wanted: Tensor, steps: int, seed: int) -> nn.Module:
    """Train on the source's logits."""
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    model.train()
    for _ in range(steps):
        at = torch.randint(len(images), (64,), generator=generator)
        goal = F.log_softmax(wanted[at], 1)
        loss = F.kl_div(F.log_softmax(model(images[at]), 1), goal, log_target=True, reduction="sum")
        optimizer.zero_grad()
        (loss / 64).backward()
        optimizer.step()
        schedule.step()
    return model.eval()


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shares", nargs="*", type=float, default=[0.25, 0.1, 0.05, 0.02])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=3)
    asked = parser.parse_args()
    source = assets.digit_cnn()
    images, labels = assets.digits()
    order = shuffled(len(images))
    here, there = order[:5000], order[5000:]
    with torch.no_grad():
        wanted = torch.cat([source(part) for part in images[here].split(500)])
    print(f"{machine()}; {asked.steps} steps, {asked.seeds} seeds")
    print(f"source: {accuracy(source, images[there], labels[there]):.2f} %\n")
    print("| parameters | dial | multiply-adds | converted | trained | seconds |")
    print("| ---: | --- | ---: | ---: | ---: | ---: |", flush=True)
    for share in asked.shares:
        for alpha in (1, 2, 3):
            if alpha == 1:
                target = f"params={share}"
                plan = bp_convert.plan(source, target=target, inputs=INPUT, convert_anyway=True)
            else:
                found = widened(source, alpha, share)
                if found is None:
                    print(f"| {100 * share:g} % | alpha {alpha} | | out of reach | | |", flush=True)
                    continue
                plan = found
            small = bp_convert.apply(source, plan).eval()
            before = accuracy(small, images[there], labels[there])
            start = time.perf_counter()
            after = []
            for seed in range(asked.seeds):
                one = trained(
                    bp_convert.apply(source, plan), images[here], wanted, asked.steps, seed
                )
                after.append(accuracy(one, images[there], labels[there]))
            spread = stdev(after) if len(after) > 1 else 0.0
            seconds = (time.perf_counter() - start) / asked.seeds
            assert plan.macs is not None
            print(
                f"| {100 * plan.params.ratio:.2f} % | alpha {alpha}{', planned' * (alpha == 1)} | "
                f"{plan.macs.after / plan.macs.before:.2f} x | {before:.2f} % | "
                f"{mean(after):.2f} ± {spread:.2f} % | {seconds:.0f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
