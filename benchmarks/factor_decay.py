"""Why factors are trained without weight decay: what decay does to their accuracy.

    python benchmarks/factor_decay.py [--target params=0.03] [--steps N] [--seeds N] [DECAY ...]

The digit CNN, converted and trained on labels and on its source, with weight decay on its factors
alone; then the same structure from noise, on labels. Decay pulls each factor to zero, and their
product, which is the layer's weight, twice. Accuracy on 2,000 images that are not trained on.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from statistics import mean, stdev

sys.path.insert(0, str(Path(__file__).parent.parent))
import bp_convert
from benchmarks.clock import machine
from benchmarks.recovery import digits, from_noise

DECAYS = (0.0, 1e-4, 1e-3, 1e-2)


def main() -> None:
    """Print a row for each decay."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("decays", nargs="*", type=float, default=list(DECAYS))
    parser.add_argument("--target", default="params=0.03")
    parser.add_argument("--optimizer", default="Adam")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seeds", type=int, default=3)
    asked = parser.parse_args()
    task = digits(0)
    small, report = bp_convert.convert(task.model, target=asked.target, convert_anyway=True)
    print(
        f"{machine()}; digit CNN, {report.plan.params.after:,} parameters, "
        f"{asked.optimizer} 1e-3, {asked.steps} steps of 64, {asked.seeds} seeds\n"
    )
    print("| decay of factors | from the conversion | from noise |")
    print("| ---: | ---: | ---: |", flush=True)
    for decay in asked.decays:
        warm, cold = [], []
        for seed in range(asked.seeds):
            for scores, start, teacher in (
                (warm, small, task.model),
                (cold, from_noise(small, seed), None),
            ):
                _, done = bp_convert.finetune(
                    start,
                    task.data,
                    teacher=teacher,
                    validation=task.validation,
                    steps=asked.steps,
                    optimizer=asked.optimizer,
                    factor_decay=decay,
                    seed=seed,
                )
                scores.append(100 * done.after["accuracy"])
        print(f"| {decay:g} | {_words(warm)} | {_words(cold)} |", flush=True)


def _words(scores: list[float]) -> str:
    spread = f" ± {stdev(scores):.2f}" if len(scores) > 1 else ""
    return f"{mean(scores):.2f}{spread} %"


if __name__ == "__main__":
    main()
