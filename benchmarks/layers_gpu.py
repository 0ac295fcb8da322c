"""Speed of bilinear layers against the dense ones on a CUDA device, in one interleaved run.

python benchmarks/layers_gpu.py
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent.parent))
from bp_convert.kinds import Ask, kind_of


def milliseconds(passes: list[object], repeats: int = 30) -> list[float]:
    """Return each pass's median between device events, the passes taking turns."""
    times: list[list[float]] = [[] for _ in passes]
    for step in range(repeats + 5):
        for one, taken in zip(passes, times, strict=True):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(5):
                one()  # type: ignore[operator]
            end.record()
            torch.cuda.synchronize()
            if step >= 5:
                taken.append(start.elapsed_time(end) / 5)
    return [sorted(taken)[len(taken) // 2] for taken in times]


def main() -> None:
    torch.manual_seed(0)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    cases: list[tuple[str, nn.Module, torch.Tensor]] = []
    for n in (32, 4096):
        for d, k in ((768, 3072), (4096, 4096), (25088, 4096)):
            cases.append((f"Linear {d}->{k} batch {n}", nn.Linear(d, k), torch.randn(n, d)))
    for channels, size in ((64, 56), (128, 28), (256, 14), (512, 7)):
        conv = nn.Conv2d(channels, channels, 3, padding=1)
        x = torch.randn(64, channels, size, size)
        cases.append((f"Conv2d {channels} 3x3 at {size} batch 64", conv, x))
    cases.append(("LSTM 256->1000 20 steps batch 32", nn.LSTM(256, 1000), torch.randn(20, 32, 256)))
    for dtype in (torch.float32, torch.bfloat16):
        for name, dense, x in cases:
            dense, x = dense.to("cuda", dtype).eval(), x.to("cuda", dtype)
            kind = kind_of(dense)
            assert kind is not None
            widths = kind.widths(dense)
            for rank in (1, 4):
                factors = kind.factor(dense, widths, Ask(rank=rank))
                twin = kind.build(dense, widths, factors, "cuda").eval()
                with torch.no_grad():
                    slow, fast = milliseconds([partial(dense, x), partial(twin, x)])
                print(f"{str(dtype)[6:]:9s} {name:36s} R{rank} {slow:8.3f} ms {slow / fast:6.2f}x")


if __name__ == "__main__":
    main()
