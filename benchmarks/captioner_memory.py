"""Peak memory of a training step of the paper's captioner, dense and converted with alpha 1.

    python benchmarks/captioner_memory.py [--batch 32] [--words 34] [--recompute]

Both are trained for a few steps by the same command as any model (RMSprop, cross-entropy, random
features and words of Flickr8k's sizes), and the peak of one step is what ``bp_convert.finetune``
reports: weights, gradients, optimiser states, and what the step allocates besides, counted by
torch's profiler on a CPU and by the allocator on CUDA.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))
import bp_convert
from benchmarks.clock import machine
from bp_convert.models import build

INPUTS = ("image=float32:1x4096", "tokens=int64:1x{words}<8256")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--words", type=int, default=34)
    parser.add_argument("--alpha", type=float, nargs="+", default=[1.0])
    parser.add_argument("--recompute", action="store_true")
    asked = parser.parse_args()
    torch.manual_seed(0)
    count = 3 * asked.batch
    data = {
        "image": torch.randn(count, 4096),
        "tokens": torch.randint(8256, (count, asked.words)),
        "labels": torch.randint(8256, (count,)),
    }
    inputs = [one.format(words=asked.words) for one in INPUTS]
    print(f"{machine()}; batch {asked.batch}, {asked.words} words\n")
    print("| captioner | parameters | estimated | measured | of dense |")
    print("| --- | ---: | ---: | ---: | ---: |", flush=True)
    dense = build("captioner")
    models = {"dense": dense}
    for alpha in asked.alpha:
        models[f"alpha {alpha:g}"], _ = bp_convert.convert(
            dense, alpha=alpha, pairs="paper", init="random", inputs=inputs
        )
    first = 0
    for name, model in models.items():
        _, done = bp_convert.finetune(
            model,
            data,
            inputs=inputs,
            preset="paper-captioner",
            batch=asked.batch,
            epochs=1,
            validation=0.0,
            recompute=asked.recompute,
        )
        peak, expected = done.peak_memory_bytes or 0, done.estimated_memory_bytes or 0
        first = first or peak
        size = sum(p.numel() for p in model.parameters())
        print(
            f"| {name} | {size:,} | {expected / 2**20:,.1f} MiB | {peak / 2**20:,.1f} MiB "
            f"| {peak / first:.2f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
