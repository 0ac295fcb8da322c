"""Speed of bilinear layers against the dense ones, in one interleaved run on the CPU.

    python benchmarks/layers.py

Above 1 the bilinear layer is faster. Factors are those of the ``fast`` policy.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent.parent))
from benchmarks.timing import interleaved, machine
from bp_convert.kinds import Ask, kind_of

LINEAR = ((512, 512), (768, 3072), (4096, 4096), (25088, 4096))
CONV = ((64, 56), (128, 28), (256, 14), (512, 7))
LSTM = ((256, 256, 20), (256, 1000, 20))


def ratio(dense: nn.Module, x: torch.Tensor, rank: int = 1) -> tuple[float, float, str]:
    """Return the dense time in microseconds, the ratio, and the factors."""
    kind = kind_of(dense)
    assert kind is not None
    widths = kind.widths(dense)
    factors = kind.factor(dense, widths, Ask(rank=rank))
    twin = kind.build(dense, widths, factors, "cpu").eval()
    with torch.no_grad():
        slow, fast = interleaved([lambda: dense(x), lambda: twin(x)], 21)
    return slow, slow / fast, str(next(iter(factors.values())))


def main() -> None:
    torch.manual_seed(0)
    print(machine())
    print(f"{'layer':34s} {'batch':>5s} {'rank':>4s} {'dense us':>9s} {'ratio':>7s}  factors")
    rows: list[tuple[str, nn.Module, list[tuple[int, torch.Tensor]]]] = []
    for inputs, outputs in LINEAR:
        xs = [(n, torch.randn(n, inputs)) for n in (1, 32)]
        rows.append((f"Linear {inputs} -> {outputs}", nn.Linear(inputs, outputs), xs))
    for channels, size in CONV:
        xs = [(n, torch.randn(n, channels, size, size)) for n in (1, 16)]
        conv = nn.Conv2d(channels, channels, 3, padding=1)
        rows.append((f"Conv2d {channels} 3x3 at {size}x{size}", conv, xs))
    for inputs, hidden, steps in LSTM:
        xs = [(n, torch.randn(steps, n, inputs)) for n in (1, 32)]
        rows.append((f"LSTM {inputs} -> {hidden}, {steps} steps", nn.LSTM(inputs, hidden), xs))
    tokens = [(n, torch.randint(0, 30522, (n, 128))) for n in (1, 32)]
    rows.append(("Embedding 30522 x 384, 128 words", nn.Embedding(30522, 384), tokens))
    for name, dense, xs in rows:
        for rank in (1, 4):
            for batch, x in xs:
                slow, gain, spec = ratio(dense.eval(), x, rank)
                print(f"{name:34s} {batch:5d} {rank:4d} {slow:9.0f} {gain:6.2f}x  {spec}")


if __name__ == "__main__":
    main()
