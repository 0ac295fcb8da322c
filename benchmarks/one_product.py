"""Whether layers that read one input gain from one product for all, as queries, keys and values.

    python benchmarks/one_product.py [--batch 1 16 128 1024]

Three low-rank layers of one input run as six products, and as one product for all three first
factors and three for the second ones; then three dense layers as three products, and as one. Above
1 one product is faster. Medians of passes that take turns in one run, on one thread by its own
clock. Answers why bp-convert leaves such layers apart: on a processor there is nothing to gain.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent.parent))
from benchmarks.clock import interleaved, machine

SIZES = ((384, 384, 48), (768, 768, 32), (768, 768, 96), (1024, 1024, 128))  # D, K, R
LAYERS = 3
TIMES = 20  # products a pass, so that the clock's own step is small


def repeated(run: Callable[[], object]) -> Callable[[], None]:
    """Return several runs as one pass."""

    def several() -> None:
        for _ in range(TIMES):
            run()

    return several


def apart(x: Tensor, downs: list[Tensor], ups: list[Tensor]) -> list[Tensor]:
    """Run layers one by one."""
    return [F.linear(F.linear(x, down), up) for down, up in zip(downs, ups, strict=True)]


def together(x: Tensor, downs: Tensor, ups: list[Tensor]) -> list[Tensor]:
    """Run all first factors, stacked, as one product."""
    parts = F.linear(x, downs).split(ups[0].shape[1], -1)
    return [F.linear(part, up) for part, up in zip(parts, ups, strict=True)]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16, 128, 1024])
    asked = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print(f"{machine()}\n")
    heads = [f"low rank, {one} | dense, {one}" for one in asked.batch]
    print(f"| sizes | {' | '.join(heads)} |")
    print("| --- |" + " ---: |" * (2 * len(asked.batch)))
    for d, k, r in SIZES:
        downs, ups = [torch.randn(r, d) for _ in range(LAYERS)], [torch.randn(k, r)] * LAYERS
        whole = [torch.randn(k, d) for _ in range(LAYERS)]
        stacked, wide = torch.cat(downs), torch.cat(whole)
        cells = []
        for batch in asked.batch:
            x = torch.randn(batch, d)
            runs: list[Callable[[], object]] = [
                lambda: apart(x, downs, ups),  # noqa: B023
                lambda: together(x, stacked, ups),  # noqa: B023
                lambda: [F.linear(x, one) for one in whole],  # noqa: B023
                lambda: F.linear(x, wide).split(k, -1),  # noqa: B023
            ]
            with torch.inference_mode():
                found = interleaved([repeated(one) for one in runs], 11)
            cells += [f"{found[0] / found[1]:.2f}", f"{found[2] / found[3]:.2f}"]
        print(f"| {d} to {LAYERS} of {k}, rank {r} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
