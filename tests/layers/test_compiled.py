"""For ``torch.compile`` a layer is one graph, whichever way it runs, and one more for any batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter

import bp_convert as bp
from bp_convert.values.factors import FactorSpec
from tests.tolerances import assert_near

# Not across 16 images in a convolution: there torch chooses another kernel, by a guard of its own.
BATCHES = (1, 16, 32, 20)
LOW = FactorSpec(out=(12, 1), inp=(1, 72), axes=(2, 2), rank=2)
APART = FactorSpec(out=(3, 4), inp=(6, 12), axes=(1, 2), rank=2)
GROUPED = FactorSpec(out=(1, 1024), inp=(2, 30), rank=1)  # looked up in groups if not compiled


def numbers(*sizes: int) -> Callable[[int], torch.Tensor]:
    return lambda batch: torch.randn(batch, *sizes)


def indices(*sizes: int) -> Callable[[int], torch.Tensor]:
    return lambda batch: torch.randint(60, (batch, *sizes))


LAYERS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], torch.Tensor], int]] = {
    "linear": (lambda: bp.BPLinear(24, 20), numbers(24), 1),
    "linear, terms": (lambda: bp.BPLinear(24, 20, rank=3), numbers(5, 24), 1),
    "linear, low": (
        lambda: bp.BPLinear(24, 20, factors=FactorSpec(out=(20, 1), inp=(1, 24), rank=3)),
        numbers(24),
        1,
    ),
    "conv": (lambda: bp.BPConv2d(8, 12, 3, padding=1, rank=2), numbers(8, 7, 7), 1),
    "conv, low": (lambda: bp.BPConv2d(8, 12, 3, factors=LOW), numbers(8, 7, 7), 1),
    "conv, apart": (lambda: bp.BPConv2d(8, 12, 3, factors=APART), numbers(8, 7, 7), 1),
    "conv, groups": (lambda: bp.BPConv2d(8, 12, 3, groups=2), numbers(8, 7, 7), 1),
    "transposed": (lambda: bp.BPConvTranspose2d(8, 12, 3, stride=2), numbers(8, 7, 7), 1),
    "embedding": (lambda: bp.BPEmbedding(60, 24, padding_idx=0, rank=2), indices(5), 1),
    "embedding, long": (lambda: bp.BPEmbedding(60, 1024, factors=GROUPED), indices(5), 1),
    "bag": (lambda: bp.BPEmbeddingBag(60, 24, rank=2), indices(5), 1),
    "attention": (
        lambda: bp.BPMultiheadAttention(24, 4, batch_first=True, rank=2),
        numbers(5, 24),
        3,
    ),
    "LSTM": (lambda: bp.BPLSTM(24, 8, batch_first=True, rank=2), numbers(4, 24), 1),
    "GRU": (lambda: bp.BPGRU(24, 8, batch_first=True), numbers(4, 24), 1),
}


@pytest.mark.parametrize("way", ["factored", "expanded"])
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_is_one_graph_and_one_more_for_other_batches(name: str, way: str) -> None:
    make, draw, times = LAYERS[name]
    layer: Any = make().eval()
    for one in layer.modules():
        if hasattr(one, "way"):
            one.way = way
    torch._dynamo.reset()
    count = CompileCounter()
    compiled = torch.compile(layer, backend=count, fullgraph=True)
    with torch.no_grad():
        for batch in BATCHES:
            inputs = (draw(batch),) * times
            found, wanted = compiled(*inputs), layer(*inputs)
            if isinstance(found, tuple):
                found, wanted = found[0], wanted[0]
            assert_near(found, wanted)
    assert count.frame_count <= 2
