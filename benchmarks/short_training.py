"""What some minutes of training without labels buy a converted sentence transformer.

    python benchmarks/short_training.py [SHARE ...] [--minutes M ...] [--ways WAY ...] [--texts N]

Converts MiniLM (the task of ``benchmarks/quality.py``; blocks are not tuned, to be quick), then
trains it with its source as the teacher, on verses that are neither calibrated on nor scored.
Prints the cosine to the source on those that are scored, after the conversion and after each
training. A minute is one of the wall clock, of one thread: run it on a quiet machine.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent.parent))
import bp_convert
from benchmarks.clock import machine
from benchmarks.quality import sentences
from recipes import assets

QUICK: dict[str, Any] = {
    "reconstruct": "off", "sides": "inputs", "allocation": "measured", "shrink": 0.0,
}  # fmt: skip
# What is learnt; everything else is as it is by default.
WAYS: dict[str, dict[str, Any]] = {
    "output": {"distill": {"blocks": 0.0}},
    "blocks": {"distill": {"blocks": 1.0}},
    "with dropout": {"distill": {"blocks": 1.0}, "dropout": True},
}
TASK = 1500  # verses that the task takes, to calibrate and to score


def texts(count: int) -> dict[str, Tensor]:
    """Return tokens (N, T) of verses that the task does not take, and their mask."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(assets.minilm_folder(), local_files_only=True)
    verses = assets.verses(TASK + count)[TASK:]
    found = tokenizer(verses, padding=True, truncation=True, max_length=64, return_tensors="pt")
    return {"input_ids": found["input_ids"], "attention_mask": found["attention_mask"]}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shares", nargs="*", type=float, default=[0.25])
    parser.add_argument("--minutes", nargs="+", type=float, default=[5.0])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=["output", "blocks"])
    parser.add_argument("--texts", type=int, default=4000)
    parser.add_argument("--examples", type=int, default=512)
    parser.add_argument("--batch", type=int, default=16)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    task, data = sentences(asked.examples), texts(asked.texts)
    print(f"{machine()}; one thread; {asked.texts} texts, {asked.batch} in a step\n")
    print("| parameters | minutes | learnt | cosine | steps | learning rate | seconds |")
    print("| ---: | ---: | --- | ---: | ---: | ---: | ---: |", flush=True)
    for share in asked.shares:
        small, _ = bp_convert.convert(
            task.model, target=f"params={share}", calibrate=task.calibration, **QUICK
        )
        print(f"| {share:.0%} | 0 | | {task.score(small.eval())['cosine']:.4f} | | | |", flush=True)
        for minutes in asked.minutes:
            for way in asked.ways:
                trained, done = bp_convert.finetune(
                    small,
                    data,
                    teacher=task.model,
                    minutes=minutes,
                    batch=asked.batch,
                    validation=0.05,
                    **WAYS[way],
                )
                cosine = task.score(trained.eval())["cosine"]
                print(
                    f"| {share:.0%} | {minutes:g} | {way} | {cosine:.4f} | {done.steps} | "
                    f"{done.lr:g} | {done.seconds:.0f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
