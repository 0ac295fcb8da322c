"""How long planning, fitting and tuning take for a model of BERT-base's size, and what memory.

    python benchmarks/large_fit.py [--layers 12] [--width 768] [--examples 512] [--tokens 128]
        [--target params=0.5] [--threads 2] [--no-blocks]

The weights are drawn, and so are the tokens: times do not hang on them. Nothing is read from the
cache. Memory is the largest resident size of the process, libraries and model included.
"""

from __future__ import annotations

import argparse
import os
import resource
import sys
import tempfile
import time
from pathlib import Path

parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
parser.add_argument("--layers", type=int, default=12)
parser.add_argument("--width", type=int, default=768)
parser.add_argument("--examples", type=int, default=512)
parser.add_argument("--tokens", type=int, default=128)
parser.add_argument("--target", default="params=0.5")
parser.add_argument("--threads", type=int, default=2)
parser.add_argument("--no-blocks", action="store_true")
asked = parser.parse_args()
os.environ["OMP_NUM_THREADS"] = str(asked.threads)
os.environ["BP_CONVERT_CACHE"] = tempfile.mkdtemp()
sys.path.insert(0, str(Path(__file__).parent.parent))

import torch  # noqa: E402
from transformers import BertConfig, BertModel  # noqa: E402

import bp_convert  # noqa: E402
from benchmarks.clock import machine  # noqa: E402
from bp_convert.data import examples_for  # noqa: E402

BATCH = 16


class Clock:
    """Prints how long each kind of step took, as it ends."""

    def __init__(self) -> None:
        self.words, self.start = "", time.perf_counter()

    def __call__(self, words: str, done: int = 0, total: int = 0) -> None:
        """Take a step's words; layers' own names do not count."""
        kind = " ".join(one for one in words.split() if "." not in one)
        if kind == self.words:
            return
        now = time.perf_counter()
        if now - self.start > 1:
            print(f"{self.words}: {now - self.start:.0f} s, {peak():.1f} GB", flush=True)
        self.words, self.start = kind, now


def peak() -> float:
    """Return the largest resident size so far, in GB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


def main() -> None:
    """Plan and convert, and print the seconds."""
    torch.manual_seed(0)
    config = BertConfig(
        hidden_size=asked.width,
        num_hidden_layers=asked.layers,
        num_attention_heads=asked.width // 64,
        intermediate_size=4 * asked.width,
    )
    model = BertModel(config).eval()
    tokens = torch.randint(1000, config.vocab_size, (asked.examples, asked.tokens))
    parts = ({"input_ids": part} for part in tokens.split(BATCH))
    data = examples_for(model, parts, count=asked.examples)
    count = sum(one.numel() for one in model.parameters())
    print(f"{machine()}; {count / 1e6:.1f} M parameters, {asked.target}", flush=True)
    clock = Clock()
    start = time.perf_counter()
    blocks = "off" if asked.no_blocks else "on"
    plan = bp_convert.plan(
        model, target=asked.target, calibrate=data, reconstruct=blocks, progress=clock
    )
    planned = time.perf_counter() - start
    clock("")
    print(f"planned: {planned:.0f} s; {plan.params.ratio:.3f} of the parameters")
    print("\n".join(plan.notes), flush=True)
    bp_convert.apply(model, plan, calibrate=data, progress=clock)
    clock("")
    whole = time.perf_counter() - start
    print(f"converted: {whole - planned:.0f} s; together {whole:.0f} s, {peak():.1f} GB at most")


if __name__ == "__main__":
    main()
