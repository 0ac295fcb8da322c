"""Layers of zeros, of tiny and of huge numbers, through the whole of a conversion."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bp_convert

ASKED: dict[str, dict[str, Any]] = {
    "full rank": {"rank": 10**6, "convert_anyway": True, "convert_head": True},
    "half": {"rank": 0.5, "convert_anyway": True, "convert_head": True},
    "budget": {"target": "params=0.6"},
}


class Adapted(nn.Module):
    """A body, and branches that end in layers to be scaled: of every kind, each in its place."""

    def __init__(self, size: float) -> None:
        super().__init__()
        self.body = nn.Conv2d(4, 16, 3, padding=1)
        self.zero = nn.Conv2d(16, 16, 1)
        self.down, self.up = nn.Linear(16, 12), nn.Linear(12, 16)
        self.state = nn.LSTM(16, 16, batch_first=True)
        with torch.no_grad():
            for layer in (self.zero, self.up, self.state):
                for name, parameter in layer.named_parameters():
                    parameter.mul_(size if "weight" in name else 0.0)

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x).tanh()
        y = (x + self.zero(x)).mean(3).transpose(1, 2)
        y = y + self.up(self.down(y).tanh())
        return y + self.state(y)[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", ASKED)
@pytest.mark.parametrize("by_data", [False, True], ids=["weights", "data"])
@pytest.mark.parametrize("size", [0.0, 1e-20])
def test_layers_of_nothing_convert_exactly_and_train(name: str, by_data: bool, size: float) -> None:
    model = Adapted(size).eval()
    data = torch.randn(48, 4, 6, 6)
    asked = dict(ASKED[name])
    if by_data:
        asked["calibrate"] = data
    small, report = bp_convert.convert(model, inputs=["4x6x6"], **asked)
    text = report.model_dump_json()
    assert "NaN" not in text
    assert "Infinity" not in text
    for layer in ("zero", "up", "state"):
        twin = small.get_submodule(layer)
        if name != "budget":
            assert type(twin).__name__.startswith("BP")
        for parameter in twin.parameters():
            assert bool(parameter.isfinite().all())
    small.train()
    if size == 0:
        small(data).square().sum().backward()
        for layer in ("zero", "up"):
            weights = [
                p for n, p in small.get_submodule(layer).named_parameters() if "bias" not in n
            ]
            assert any(float(p.grad.abs().max()) > 0 for p in weights if p.grad is not None)


@pytest.mark.slow
@pytest.mark.parametrize("name", ASKED)
@pytest.mark.parametrize("inputs", [1e-20, 1e15])
def test_the_size_of_the_data_does_not_matter(name: str, inputs: float) -> None:
    """What converts well at size 1 does so at any: the model is one of homogeneous layers."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(24, 32), nn.ReLU(), nn.Linear(32, 24)).eval()
    with torch.no_grad():
        for layer in (model[0], model[2]):
            layer.bias.zero_()
    data = torch.randn(200, 24) @ torch.randn(24, 24)
    gaps = []
    for size in (1.0, inputs):
        small, report = bp_convert.convert(
            model, inputs=["24"], calibrate=size * data, **ASKED[name]
        )
        assert "NaN" not in report.model_dump_json()
        with torch.no_grad():
            want, got = model(size * data).double(), small(size * data).double()
        gaps.append(float((got - want).norm() / want.norm()))
    assert gaps[1] == pytest.approx(gaps[0], rel=0.05, abs=1e-5)
