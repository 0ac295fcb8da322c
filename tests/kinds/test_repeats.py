"""Widened layers fitted from the weight whose channels they repeat, against the weight built."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from bp_convert.kinds import Ask, Spread, kind_of
from bp_convert.layers import common
from tests.tolerances import assert_near

INPUTS = torch.arange(6).repeat_interleave(4)
OUTPUTS = torch.arange(8).repeat(3)
LAYERS = {
    "linear": lambda: nn.Linear(6, 8),
    "conv1d": lambda: nn.Conv1d(6, 8, 3),
    "conv2d": lambda: nn.Conv2d(6, 8, (3, 5), bias=False),
    "conv3d": lambda: nn.Conv3d(6, 8, 2),
    "turned": lambda: Conv1D(8, 6),
    "transposed": lambda: nn.ConvTranspose2d(6, 8, 3, stride=2),
}


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("rank", [1, 2])
@pytest.mark.parametrize(
    "spread",
    [Spread(INPUTS, OUTPUTS), Spread(None, OUTPUTS), Spread(INPUTS.flip(0), None)],
    ids=["both", "outputs", "inputs"],
)
def test_the_same_factors(
    name: str, rank: int, spread: Spread, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    layer: Any = LAYERS[name]().double()
    kind = kind_of(layer)
    assert kind is not None
    after = 6 if spread.inputs is None else 24, 8 if spread.outputs is None else 24
    factors = kind.factor(layer, after, Ask(rank=rank))
    twins = [kind.build(layer, after, factors, "cpu") for _ in range(2)]
    assert kind.only_repeats(layer, factors)
    due = kind.fill(layer, twins[0], spread)
    monkeypatch.setattr(common, "SMALL", 0)
    monkeypatch.setattr(common, "nearest_kronecker_sum", None)
    assert kind.fill(layer, twins[1], spread) == pytest.approx(due, rel=1e-6)
    for one, other in zip(twins[0].parameters(), twins[1].parameters(), strict=True):
        assert one.shape == other.shape
    assert_near(twins[1].to_dense().weight, twins[0].to_dense().weight, torch.float32)
    wide = kind.spread(layer, spread)["weight"]
    gap = torch.linalg.vector_norm((wide - twins[1].to_dense().weight).detach())
    assert float(gap / torch.linalg.vector_norm(wide.detach())) == pytest.approx(due, rel=1e-6)


def test_what_repeats_nothing_or_is_exact_is_built() -> None:
    layer = nn.Conv2d(6, 8, 3, groups=2)
    kind = kind_of(layer)
    assert kind is not None
    assert not kind.only_repeats(layer, kind.factor(layer, (24, 24), Ask(rank=1)))
    line = nn.Linear(6, 8)
    kind = kind_of(line)
    assert kind is not None
    assert not kind.only_repeats(line, kind.factor(line, (24, 24), Ask(rank=10**6)))
