"""Converted models under ``torch.compile``: graph breaks, compilations, and time.

    python benchmarks/compiled.py [--only MODEL ...] [--batch 1 8]

For each model, converted to a quarter of its parameters and to one square term: graph breaks; how
often it is compiled when the batch goes 1, 8, 32, 5, the dense model beside it; and how much faster
it is compiled than the dense model compiled, and than itself uncompiled. Times are medians of
passes that take turns in one run, on one thread by its own clock; above 1 the converted model,
compiled, is faster. Compiled layers run on their factors, also those that the plan expands.
LSTMs are left out: torch does not compile its own.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torchvision
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from transformers import BertConfig, BertModel

sys.path.insert(0, str(Path(__file__).parent.parent))
import bp_convert
from benchmarks.clock import interleaved, machine
from benchmarks.latency import IMAGE, STEPS, VOCABULARY, digit_cnn, falling_

BATCHES = (1, 8, 32, 5)


def encoder() -> nn.Module:
    """Return BERT of the width of MiniLM, four layers of it."""
    return BertModel(
        BertConfig(
            vocab_size=VOCABULARY,
            hidden_size=384,
            num_hidden_layers=4,
            num_attention_heads=12,
            intermediate_size=1536,
        )
    )


def words(batch: int) -> Tensor:
    """Draw token ids."""
    return torch.randint(VOCABULARY, (batch, STEPS))


MODELS: dict[str, tuple[Callable[[], nn.Module], list[str], Callable[[int], Tensor]]] = {
    "digit CNN": (digit_cnn, ["1x28x28"], lambda batch: torch.randn(batch, 1, 28, 28)),
    "BERT, 4 layers": (encoder, [f"input_ids=int64:1x{STEPS}<{VOCABULARY}"], words),
    "ResNet-18": (torchvision.models.resnet18, IMAGE, lambda n: torch.randn(n, 3, 224, 224)),
}
SIZES: dict[str, dict[str, Any]] = {
    "a quarter": {"target": "params=0.25"},
    "one term": {"rank": 1},
}


def compilations(model: nn.Module, draw: Callable[[int], Any]) -> int:
    """Return how often a model is compiled while its batch changes."""
    torch._dynamo.reset()
    count = CompileCounter()
    compiled = torch.compile(model, backend=count)
    for batch in BATCHES:
        compiled(draw(batch))
    return count.frame_count


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", choices=MODELS, action="append")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    asked = parser.parse_args()
    print(machine())
    print(f"compiled: times in which the batch goes {', '.join(map(str, BATCHES))}; dense, ours\n")
    print("| model | converted to | graph breaks | compiled | batch | to dense | to uncompiled |")
    print("| --- | --- | ---: | ---: | ---: | ---: | ---: |", flush=True)
    for name in asked.only or MODELS:
        make, inputs, draw = MODELS[name]
        torch.manual_seed(0)
        dense = falling_(make())
        for size, settings in SIZES.items():
            ours = bp_convert.apply(dense, bp_convert.plan(dense, inputs=inputs, **settings))
            with torch.no_grad():
                breaks = torch._dynamo.explain(ours)(draw(2)).graph_break_count
                counts = [compilations(one, draw) for one in (dense, ours)]
                for batch in asked.batch:
                    x = draw(batch)
                    torch._dynamo.reset()
                    fast = [torch.compile(one, dynamic=False) for one in (dense, ours)]
                    first, second, plain = interleaved([partial(m, x) for m in (*fast, ours)])
                    print(
                        f"| {name} | {size} | {breaks} | {counts[0]}, {counts[1]} | {batch} | "
                        f"{first / second:.2f} | {plain / second:.2f} |",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
