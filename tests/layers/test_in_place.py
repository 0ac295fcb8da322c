"""What is done in place to a layer's output costs backward no copy of the gradient."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from bp_convert import BPConv2d, BPLinear
from bp_convert.values.factors import FactorSpec


def copies(y: torch.Tensor) -> bool:
    """Return whether backward from here copies a gradient for what was done in place."""
    return any("CopySlices" in name for name in nodes(y.grad_fn))


def nodes(node: Any) -> Iterator[str]:
    """Return the names of a graph's functions, from the last one back."""
    yield node.name()
    for before, _ in node.next_functions:
        if before is not None:
            yield from nodes(before)


CASES = {
    "linear": (BPLinear(24, 36), (5, 24)),
    "linear, terms": (BPLinear(24, 36, rank=3), (5, 24)),
    "convolution": (BPConv2d(8, 12, 3, padding=1), (2, 8, 6, 6)),
    "convolution, terms": (BPConv2d(8, 12, 3, rank=2), (2, 8, 6, 6)),
    "convolution, mixed last": (
        BPConv2d(8, 12, 3, factors=FactorSpec(out=(12, 1), inp=(1, 72), rank=3)),
        (2, 8, 6, 6),
    ),
    "pointwise": (BPConv2d(8, 12, 1), (2, 8, 6, 6)),
}


@pytest.mark.parametrize("case", CASES)
def test_a_bias_and_a_relu_in_place_copy_no_gradient(case: str) -> None:
    layer, shape = CASES[case]
    y = nn.ReLU(inplace=True)(layer(torch.randn(shape)))
    assert not copies(y)


def test_the_same_in_place_on_a_view_would() -> None:
    y = nn.ReLU(inplace=True)((torch.ones(4, requires_grad=True) * 2).view(2, 2))
    assert copies(y)
