"""Where a widened model had better start from: its trained weights, drawn factors, or noise.

    python benchmarks/alpha_start.py [--only digits|fashion|resnet11] [--alpha 2] [--rank 1]
                                     [--steps 160] [--seeds 1] [--full-epochs N]
                                     [--starts warm mixed random]

Every start is trained for the same steps on the same 5,000 images and what the source names them
(Adam, 1e-3, batches of 32); the table says the accuracy on others before, half-way and after.
``--alpha 1`` shows single terms of a model that is not widened.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent.parent))
import bp_convert
from benchmarks.alpha_or_rank import TASKS, Task
from benchmarks.clock import machine

STARTS = ("warm", "mixed", "random")
BATCH = 32


def train(model: nn.Module, task: Task, labels: Tensor, steps: int, seed: int) -> None:
    """Train on labels, in place."""
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    model.train()
    for _ in range(steps):
        at = torch.randint(len(task.examples), (BATCH,), generator=generator)
        loss = F.cross_entropy(model(task.examples[at]), labels[at])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def main() -> None:
    """Print a line for each start."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", choices=TASKS, action="append")
    parser.add_argument("--alpha", type=float, default=2)
    parser.add_argument("--rank", type=int, default=1)
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--full-epochs", type=float, default=6)
    parser.add_argument("--starts", nargs="+", choices=STARTS, default=STARTS)
    asked = parser.parse_args()
    print(
        f"{machine()}; alpha {asked.alpha:g}, rank {asked.rank}, {asked.steps} steps of {BATCH}\n"
    )
    print("| model | parameters | start | before | half-way | after |")
    print("| --- | ---: | --- | ---: | ---: | ---: |", flush=True)
    for name in asked.only or list(TASKS):
        task = TASKS[name](asked.full_epochs)
        # The source names nearly all of them right; what is compared learns from what it says.
        with torch.no_grad():
            labels = torch.cat([task.model(part).argmax(1) for part in task.examples.split(500)])
        for start in asked.starts:
            for seed in range(asked.seeds):
                small, report = bp_convert.convert(
                    task.model,
                    alpha=asked.alpha,
                    rank=asked.rank,
                    init=start,
                    inputs=[task.inputs],
                    convert_anyway=True,
                    seed=seed,
                )
                scores = [task.score(small)]
                for part in range(2):
                    train(small, task, labels, asked.steps // 2, 10 * seed + part)
                    scores.append(task.score(small))
                cells = " | ".join(f"{one:.2f} %" for one in scores)
                print(f"| {name} | {report.plan.params.after:,} | {start} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
