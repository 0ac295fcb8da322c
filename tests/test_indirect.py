"""Layers that are read, not called: ``F.linear(x, layer.weight)``."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bp_convert
from tests.tolerances import assert_near


class Reads(nn.Module):
    """Calls one layer, reads the weights of two, and has one that it never uses."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.mixed = nn.Linear(16, 32), nn.Linear(32, 32)
        self.conv, self.spare = nn.Conv1d(32, 32, 3, padding=1), nn.Linear(32, 32)
        self.out = nn.Linear(32, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.linear(self.stem(x).relu(), self.mixed.weight, self.mixed.bias)  # (N, T, 32)
        y = F.conv1d(x.mT, self.conv.weight, self.conv.bias, padding=1).relu()
        return self.out(y.mean(2))


INPUT = ["5x16"]


def test_their_weight_is_built_for_whoever_reads_it() -> None:
    torch.manual_seed(0)
    model = Reads().eval()
    small, report = bp_convert.convert(model, rank=10**6, convert_anyway=True, inputs=INPUT)
    layers = {layer.name: layer for layer in report.layers}
    assert {name for name, one in layers.items() if one.action == "replaced"} == {
        *("stem", "mixed", "conv"),
    }
    assert any("reads its weight" in note for note in layers["mixed"].notes)
    assert layers["spare"].reason == "never called on the example input"
    x = torch.randn(3, 5, 16)
    assert_near(small(x), model(x))
    small(x).sum().backward()
    assert small.mixed.w1.grad is not None  # type: ignore[union-attr]


def test_they_would_be_slower_and_stay_unless_that_is_asked_for() -> None:
    plan = bp_convert.plan(Reads(), rank=0.25, inputs=INPUT)
    layer = plan.layer("mixed")
    assert layer is not None
    assert layer.reason.startswith(
        "would be slower than the dense layer: the model reads its weight"
    )
    chosen = bp_convert.plan(Reads(), target="params=0.4", inputs=INPUT).layer("mixed")
    assert chosen is not None
    assert chosen.action == "replaced"


def test_data_does_not_reach_them_which_is_said() -> None:
    torch.manual_seed(0)
    _, report = bp_convert.convert(
        Reads(), target="params=0.4", inputs=INPUT, calibrate=torch.randn(64, 5, 16)
    )
    notes = {layer.name: layer.notes for layer in report.layers}
    assert any("data never reached it" in note for note in notes["mixed"])
