"""A training step of converted models beside the dense one's: time and peak memory.

    python benchmarks/training_step.py [--only VGG] [--batch 8] [--threads N]

Forward, loss and backward in train mode, in turn in one process. Ratios of dense to converted:
above 1 is faster, and needs less. Memory is what the step allocates at its peak, activations and
the gradients that are there then; the last column adds the weights and Adam's two moments of them.
Weights are random: neither time nor memory asks for them.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torchvision
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent.parent))
import bp_convert
from benchmarks.clock import interleaved, machine
from benchmarks.latency import LanguageModel
from benchmarks.timing import bert
from bp_convert.costs import peak_of_pass

REQUESTS: dict[str, dict[str, Any]] = {
    "alpha 1, one term": {"rank": 1, "init": "random", "convert_anyway": True},
    "a quarter": {"target": "params=0.25"},
}


def models() -> Iterator[tuple[str, Callable[[], nn.Module], str]]:
    """Yield names, makers, and inputs as the command line takes them."""
    yield "VGG-16", torchvision.models.vgg16, "3x224x224"
    yield "ResNet-50", torchvision.models.resnet50, "3x224x224"
    yield "BERT-base, 128 tokens", bert, "input_ids=int64:1x128<30522"
    yield "LSTM LM 650, 35 words", partial(LanguageModel, 650), "int64:1x35<10000"


def drawn(inputs: str, batch: int) -> tuple[Any, ...]:
    """Return inputs of so many examples."""
    if "<" not in inputs:
        return (torch.randn(batch, *map(int, inputs.split("x"))),)
    shape, most = inputs.rpartition(":")[2].split("<")
    return (torch.randint(int(most), (batch, int(shape.split("x")[1]))),)


def step(model: nn.Module, args: tuple[Any, ...]) -> None:
    """Run forward and backward once."""
    model.zero_grad()
    found = model(*args)
    out = found if isinstance(found, Tensor) else found[0]
    out.float().square().mean().backward()


def peak_of_step(model: nn.Module, args: tuple[Any, ...]) -> int:
    """Return the most bytes that a step allocates; no gradients are there before it."""
    model.zero_grad()
    return peak_of_pass(partial(step, model, args))


def held(model: nn.Module) -> int:
    """Return the bytes of the weights and of Adam's moments."""
    return 3 * sum(one.nbytes for one in model.parameters())


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", help="a part of the model's name")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=5)
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    torch.manual_seed(0)
    print(f"{machine()}; batch {asked.batch}\n")
    print("| model | converted | parameters | time | memory | in all |")
    print("| --- | --- | ---: | ---: | ---: | ---: |", flush=True)
    for name, make, inputs in models():
        if asked.only not in name:
            continue
        dense = make()
        args = drawn(inputs, asked.batch)
        for words, request in REQUESTS.items():
            plan = bp_convert.plan(dense.eval(), inputs=[inputs], **request)
            small = bp_convert.apply(dense, plan)
            passes = [partial(step, one.train(), args) for one in (dense, small)]
            times = interleaved(passes, asked.repeats, 1)
            peaks = [peak_of_step(one, args) for one in (dense, small)]
            every = [peak + held(one) for peak, one in zip(peaks, (dense, small), strict=True)]
            print(
                f"| {name} | {words} | {100 * plan.params.ratio:.1f} % | "
                f"{times[0] / times[1]:.2f} | {peaks[0] / peaks[1]:.2f} | "
                f"{every[0] / every[1]:.2f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
