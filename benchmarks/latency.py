"""Targets of latency asked, predicted and measured, and what a preference for speed buys.

    python benchmarks/latency.py [--only MODEL ...] [--batch 1 ...] [--share 0.25] [--tune]

For each model and batch: ``latency=0.5`` asked, predicted and measured, and by how much the first
prediction was off; how much faster ``params=0.25`` is under each ``--prefer``, with its estimated
error. Medians of passes that take turns in one run, on one thread by its own clock; above 1 the
converted model is faster. Weights are drawn with spectra that fall as trained ones do (singular
values as their place to the power -0.7): none of these models' trained weights are needed, and
errors are estimates by the weights alone. With --tune the machine's prices are measured afresh.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torchvision
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent.parent))
import bp_convert
from benchmarks.clock import interleaved, machine
from bp_convert.graph.example import make_inputs
from bp_convert.graph.running import quiet_forward

VOCABULARY = 10_000
STEPS = 35


class LanguageModel(nn.Module):
    """Two LSTM layers between an embedding and a head, as in Zaremba et al. (2014)."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, hidden)
        self.lstm = nn.LSTM(hidden, hidden, 2, batch_first=True)
        self.head = nn.Linear(hidden, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        found: Tensor = self.head(self.lstm(self.words(tokens))[0])
        return found


def digit_cnn() -> nn.Module:
    """Return the digit CNN of the README."""
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 64, 3), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(1600, 512), nn.ReLU(), nn.Linear(512, 10)),
    )


IMAGE, TOKENS = ["3x224x224"], [f"tokens=int64:1x{STEPS}<{VOCABULARY}"]
MODELS: dict[str, tuple[Callable[[], nn.Module], list[str]]] = {
    "digit CNN": (digit_cnn, ["1x28x28"]),
    "LSTM LM 200": (lambda: LanguageModel(200), TOKENS),
    "LSTM LM 650": (lambda: LanguageModel(650), TOKENS),
    "LSTM LM 1500": (lambda: LanguageModel(1500), TOKENS),
    "MobileNet v2": (torchvision.models.mobilenet_v2, IMAGE),
    "ResNet-50": (torchvision.models.resnet50, IMAGE),
    "VGG-16": (torchvision.models.vgg16, IMAGE),
    "ViT-B/16": (torchvision.models.vit_b_16, IMAGE),
}


@torch.no_grad()
def falling_(model: nn.Module) -> nn.Module:
    """Draw every weight matrix with a falling spectrum, at the size that it has."""
    for parameter in model.parameters():
        if parameter.dim() > 1:
            rows, columns = parameter.flatten(1).shape
            inner = min(rows, columns)
            fall = torch.arange(1, inner + 1) ** -0.7
            made = (torch.randn(rows, inner) * fall) @ torch.randn(inner, columns)
            parameter.copy_((made * parameter.norm() / made.norm()).view_as(parameter))
    return model.eval()


def ratio(model: nn.Module, plan: bp_convert.Plan, batch: int) -> tuple[float, float]:
    """Return how much faster a plan's model is, with random weights, and its milliseconds."""
    cold = plan.model_copy(
        update={
            "layers": tuple(
                one.model_copy(update={"init": "random"}) if one.factors else one
                for one in plan.layers
            )
        }
    )
    small = bp_convert.apply(model, cold)
    args, kwargs = make_inputs(model, plan.inputs, batch=batch)
    with torch.no_grad(), quiet_forward():
        before, after = interleaved([partial(one, *args, **kwargs) for one in (model, small)])
    return before / after, 1e-3 * after


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=MODELS, action="append")
    parser.add_argument("--batch", type=int, action="append")
    parser.add_argument("--share", type=float, default=0.25)
    parser.add_argument("--tune", action="store_true")
    asked = parser.parse_args()
    print(machine())
    if asked.tune:
        table = bp_convert.tune()
        print(f"tuned in {table.seconds:.0f} s; times are off by {100 * table.off:.0f} % (median)")
    print("\n| model | batch | asked | result |\n| --- | ---: | --- | --- |", flush=True)
    for name in asked.only or MODELS:
        make, inputs = MODELS[name]
        torch.manual_seed(0)
        model = falling_(make())
        for batch in asked.batch or (1,):
            row = f"| {name} | {batch} |"
            start = time.perf_counter()
            at = {"batch": batch}
            try:
                plan = bp_convert.plan(model, target="latency=0.5", inputs=inputs, latency_at=at)
                note = next(one for one in plan.notes if one.startswith("latency="))
                said, first = re.split(r" on random| in its form", note)[0], note.split("; ")[-1]
                faster, _ = ratio(model, plan, batch)
                took = time.perf_counter() - start
                print(
                    f"{row} latency=0.5 | {said}; {first}; {faster:.2f} times as fast; error "
                    f"{plan.error}; {plan.params.ratio:.2f} of the parameters; {took:.0f} s |"
                )
            except bp_convert.PlanError as problem:
                print(f"{row} latency=0.5 | out of reach: {problem.allowed} |")
            for prefer in ("quality", "balanced", "speed"):
                target = f"params={asked.share}"
                plan = bp_convert.plan(model, target=target, inputs=inputs, prefer=prefer)
                faster, _ = ratio(model, plan, batch)
                print(
                    f"{row} {target}, {prefer} | {faster:.2f} times as fast; error {plan.error} |"
                )
            sys.stdout.flush()


if __name__ == "__main__":
    main()
