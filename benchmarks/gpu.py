"""Layers and models on a GPU: latency, throughput, and the share of what the card can do.

    python benchmarks/gpu.py [--dtype bfloat16] [--batch 1 8 64] [--only Linear] [--minutes 9]

Dense, low rank, int8 and ours (one term, on factors and fused, and a quarter in the pair of low
rank) take turns in one process, launched one by one and as a CUDA graph. Beside each time stands
the larger of two shares: bytes of weights, inputs and outputs a second over what copying reaches on
this card, and multiply-adds over what a large product of matrices reaches. TF32 is as torch is set.
Ends after the minutes that are given; what was not reached is named. Without a GPU it says so;
``--device cpu`` runs the same to see that it works.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

sys.path.insert(0, str(Path(__file__).parent.parent))
from benchmarks import peers
from benchmarks.clock import interleaved, machine
from bp_convert.ways.fused import fits

SIDE = 4096  # of the product that the rate is taken from
COPIED = 2**28  # bytes of the copy that the bandwidth is taken from


def fused(layer: nn.Module, params: int) -> nn.Module | None:
    """Return our layer as it runs in one kernel; None where that is not made for it."""
    twin: Any = peers.ours(layer, params, square=True) if isinstance(layer, nn.Linear) else None
    if twin is None or not (twin.w1.is_cuda and fits(twin.factors)):
        return None
    twin.way = "fused"
    return cast("nn.Module", twin)


WAYS: dict[str, tuple[str, peers.Contender]] = {
    "ours, one term": ("one", partial(peers.ours, square=True)),
    "ours, one term, fused": ("one", fused),
    "ours, a quarter": ("0.25", partial(peers.ours, square=False)),
    "low rank, a quarter": ("0.25", peers.low_rank),
    "dense int8": ("0.25", peers.int8),
}


class Ceilings:
    """What the device reaches: bytes copied a second, and multiply-adds a second."""

    def __init__(self, device: str, dtype: torch.dtype) -> None:
        big = torch.empty(COPIED, dtype=torch.uint8, device=device)
        other = torch.empty_like(big)
        square = torch.randn(SIDE, SIDE, device=device).to(dtype)
        copy, product = interleaved(
            [lambda: other.copy_(big), lambda: square @ square], 5, 2, device=device
        )
        self.bandwidth, self.macs = 2e6 * COPIED / copy, 1e6 * SIDE**3 / product

    def share(self, microseconds: float, moved: int, macs: int) -> float:
        """Return the larger share of what binds."""
        seconds = 1e-6 * microseconds
        return max(moved / seconds / self.bandwidth, macs / seconds / self.macs)


def graphed(model: nn.Module, x: Tensor) -> Callable[[], Any]:
    """Return a pass as one CUDA graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            model(x)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        model(x)
    return graph.replay


def moved_by(model: nn.Module, x: Tensor) -> int:
    """Return the bytes of the weights, of the input and of the output."""
    out = model(x)
    y = out if isinstance(out, Tensor) else out[0]
    tensors = (*model.parameters(), *model.buffers(), x, y)
    return sum(one.numel() * one.element_size() for one in tensors)


def macs_of(model: nn.Module, x: Tensor) -> int:
    """Return the multiply-adds that torch counts."""
    with FlopCounterMode(display=False) as counter:
        model(x)
    return counter.get_total_flops() // 2


def rows(
    case: peers.Case, batches: list[int], device: str, dtype: torch.dtype, limits: Ceilings
) -> Iterator[str]:
    """Yield the rows of a table."""
    dense = case.make().eval().to(device, dtype)
    made: dict[str, nn.Module] = {"dense": dense}
    for who, (share, make) in WAYS.items():
        try:
            found = peers.contender(case, dense, share, make)
        except ImportError:
            continue
        if found is not None:
            # What torchao made lies where the dense layer does, and does not move.
            made[who] = found if who == "dense int8" else found.to(device, dtype)
    for batch in batches:
        x = case.example(batch).to(device)
        x = x.to(dtype) if x.is_floating_point() else x
        passes = [partial(model, x) for model in made.values()]
        times = interleaved(passes, 11, 3, device=device)
        graphs = [0.0] * len(times)
        if device.startswith("cuda"):
            graphs = interleaved([graphed(m, x) for m in made.values()], 11, 3, device=device)
        for (who, model), taken, again in zip(made.items(), times, graphs, strict=True):
            share = limits.share(again or taken, moved_by(model, x), macs_of(model, x))
            graph = f"{again:.0f}" if again else ""
            ratio = f"{graphs[0] / again:.2f}" if again else ""
            yield (
                f"| {case.name} | {batch} | {who} | {taken:.0f} | {times[0] / taken:.2f} | "
                f"{graph} | {ratio} | {1e6 * batch / taken:,.0f} | {share:.0%} |"
            )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", help="a part of the case's name")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--minutes", type=float, default=9)
    asked = parser.parse_args()
    if asked.device.startswith("cuda") and not torch.cuda.is_available():
        sys.exit("no CUDA device is here; --device cpu runs the same on the processor")
    start, left = time.monotonic(), []
    dtype = getattr(torch, asked.dtype)
    torch.manual_seed(0)
    with torch.inference_mode():
        limits = Ceilings(asked.device, dtype)
        print(f"{machine(asked.device)}, {asked.dtype}, ", end="")
        print(f"copies {limits.bandwidth / 1e9:,.0f} GB/s, {limits.macs / 1e12:,.2f} TMAC/s")
        print("\n| case | batch | layers | us | ratio | graph, us | ratio | examples/s | share |")
        print("| --- | ---: | --- |" + " ---: |" * 6, flush=True)
        for case in peers.cases():
            if asked.only not in case.name:
                continue
            if time.monotonic() - start > 60 * asked.minutes:
                left.append(case.name)
                continue
            for line in rows(case, asked.batch, asked.device, dtype, limits):
                print(line, flush=True)
    if left:
        print(f"\nnot reached in {asked.minutes:g} minutes: {', '.join(left)}")


if __name__ == "__main__":
    main()
