"""Time BPLinear on nearest-square pairs against nn.Linear: inference, and a training step.

    python benchmarks/linear.py [--threads N]

Medians of interleaved runs; above 1 the bilinear layer is faster. ``benchmarks/layers.py`` has
every layer with the factors that a conversion would choose.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent.parent))
from benchmarks.timing import interleaved, machine
from bp_convert.layers.linear import BPLinear

SIZES = ((64, 64), (512, 512), (768, 3072), (3072, 768), (4096, 4096))
BATCHES = (1, 32, 256)
RANKS = (1, 8)
REPEATS = 21


def inference(layers: tuple[nn.Module, ...], x: torch.Tensor) -> list[float]:
    """Return each layer's forward time in microseconds."""
    with torch.inference_mode():
        return interleaved([lambda layer=layer: layer(x) for layer in layers], REPEATS)


def training(layers: tuple[nn.Module, ...], x: torch.Tensor) -> list[float]:
    """Return each layer's time in microseconds, forward and backward, input gradient included."""

    def step(layer: nn.Module) -> None:
        layer.zero_grad()
        layer(x.detach().requires_grad_()).sum().backward()

    return interleaved([lambda layer=layer: step(layer) for layer in layers], REPEATS // 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    torch.set_num_threads(parser.parse_args().threads)
    torch.manual_seed(0)
    print(f"BPLinear against nn.Linear; {machine()}")
    print(f"{'size':>12s} {'batch':>5s} {'dense us':>9s} {'train us':>9s}   inference, training")
    for inputs, outputs in SIZES:
        layers = (
            nn.Linear(inputs, outputs),
            *(BPLinear(inputs, outputs, rank=rank) for rank in RANKS),
        )
        for batch in BATCHES:
            x = torch.randn(batch, inputs)
            slow, *fast = inference(layers, x)
            slow_step, *fast_step = training(layers, x)
            gains = ", ".join(
                f"R={rank} {slow / a:.1f}x {slow_step / b:.1f}x"
                for rank, a, b in zip(RANKS, fast, fast_step, strict=True)
            )
            print(f"{inputs:5d}->{outputs:<5d} {batch:5d} {slow:9.0f} {slow_step:9.0f}   {gains}")


if __name__ == "__main__":
    main()
