"""How fast a converted Linear is whose two ``nn.Linear`` are quantised by torchao, beside the dense
one in the same bits.

    python benchmarks/quantized.py [--inputs 768] [--outputs 3072] [--share 0.25] [--compile]

One thread; medians of passes that take turns in one run, as ratios to the dense layer in float32:
above 1 is faster. Pairs are low rank, and one of a few terms; weights are random, since time does
not ask for them.
"""

from __future__ import annotations

import argparse
import copy
import functools
import sys
from pathlib import Path

import torch
from torch import nn
from torchao.quantization import (
    Int8DynamicActivationInt8WeightConfig,
    Int8WeightOnlyConfig,
    quantize_,
)

sys.path.insert(0, str(Path(__file__).parent.parent))
import bp_convert
from benchmarks.clock import interleaved, machine
from bp_convert.values.factors import FactorSpec

BATCHES = (1, 128)
CONFIGS = {
    "float32": None,
    "int8 weights": Int8WeightOnlyConfig,
    "int8 weights and inputs": Int8DynamicActivationInt8WeightConfig,
}


def main() -> None:
    """Print a row for each layer in each of the bits."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--inputs", type=int, default=768)
    parser.add_argument("--outputs", type=int, default=3072)
    parser.add_argument("--share", type=float, default=0.25, help="of the parameters")
    parser.add_argument("--compile", action="store_true", help="through torch.compile")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    d, k = asked.inputs, asked.outputs
    layers: dict[str, nn.Module] = {f"dense {d} -> {k}": nn.Linear(d, k)}
    for out, inp in (((k, 1), (1, d)), ((k // 16, 16), (8, d // 8))):
        one = out[0] * inp[0] + out[1] * inp[1]
        spec = FactorSpec(out=out, inp=inp, rank=max(1, int(asked.share * d * k / one)))
        layers[str(spec).replace("|", ", ")] = bp_convert.BPLinear(d, k, factors=spec)
    forms: dict[tuple[str, str], nn.Module] = {}
    for name, layer in layers.items():
        if isinstance(layer, bp_convert.BPLinear):
            forms[name, "float32, BPLinear"] = layer
        linears = bp_convert.to_linears(layer)
        for bits, config in CONFIGS.items():
            forms[name, bits] = copy.deepcopy(linears)
            if config is not None:
                quantize_(forms[name, bits], config())
    if asked.compile:
        torch._dynamo.config.recompile_limit = len(forms) * len(BATCHES)  # one forward, many layers
        for one in forms.values():
            one.compile()
    print(f"{machine()}\n\n| layer | bits | {' | '.join(f'batch {n}' for n in BATCHES)} |")
    print("| --- | --- | ---: | ---: |")
    with torch.inference_mode():
        found = [
            interleaved([functools.partial(one, torch.randn(n, d)) for one in forms.values()], 21)
            for n in BATCHES
        ]
    for (name, bits), *times in zip(forms, *found, strict=True):
        ratios = (f"{taken[0] / one:.2f}x" for taken, one in zip(found, times, strict=True))
        print(f"| {name} | {bits} | {' | '.join(ratios)} |")


if __name__ == "__main__":
    main()
