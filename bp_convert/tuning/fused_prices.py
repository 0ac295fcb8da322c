"""What the fused kernel costs on a device, where it runs there and gives the right numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from typing import Any

import torch

from bp_convert.layers.linear import BPLinear
from bp_convert.prices import Counts
from bp_convert.tuning.price_fit import prices
from bp_convert.ways.fused import fits, fused, work

WIDTHS = ((256, 256), (512, 512), (768, 768), (768, 3072), (3072, 768), (1024, 4096), (4096, 4096))
ROWS, RANKS = (1, 16, 197, 2048), (1, 4)
OFF = {torch.float32: 5e-3, torch.bfloat16: 2e-2, torch.float16: 5e-3}  # from two products

Clock = Callable[[Sequence[Callable[[], Any]], torch.device], list[float]]


def fused_prices(
    device: torch.device,
    dtype: torch.dtype,
    clock: Clock,
    widths: Sequence[tuple[int, int]] = WIDTHS,
) -> dict[str, Counts]:
    """Time the fused kernel on linear layers.

    Args:
        clock: times calls in turn, in microseconds.
        widths: inputs and outputs of the layers.

    Returns:
        Its prices; nothing where the kernel does not run on this device in this type, or where any
        of its results is not that of the two products.
    """
    samples: list[tuple[Counts, float]] = []
    for (inputs, outputs), rank, rows in product(widths, RANKS, ROWS):
        layer = BPLinear(inputs, outputs, rank=rank, device=device, dtype=dtype).eval()
        if not fits(layer.factors):
            continue
        x = torch.randn(rows, inputs, device=device, dtype=dtype)
        expected = layer(x)
        made = fused(x, layer.w1, layer.w2, layer.bias, layer.factors)
        if made is None or not _near(made, expected):
            return {}
        layer.way = "fused"
        (taken,) = clock([partial(layer, x)], device)
        samples.append((work(layer.factors, rows), taken))
    return {"Linear.fused": prices(samples)} if samples else {}


def _near(made: torch.Tensor, expected: torch.Tensor) -> bool:
    off = torch.linalg.vector_norm(made.double() - expected.double())
    return bool(off <= OFF[made.dtype] * torch.linalg.vector_norm(expected.double()))
