"""Factors that are drawn at the size of the weights that they stand for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import bp_convert
from bp_convert.mixing import started
from bp_convert.values.factors import FactorSpec

ONE, MORE = FactorSpec(out=(4, 4), inp=(4, 4)), FactorSpec(out=(4, 4), inp=(4, 4), rank=2)
WHOLE = FactorSpec(out=(1, 16), inp=(1, 16))  # exact as one term


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        *[nn.Conv2d(3, 36, 3), nn.BatchNorm2d(36), nn.ReLU(), nn.Conv2d(36, 36, 3)],
        *[nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(36, 5)],
    )


def _trained() -> nn.Sequential:
    model = _model()
    with torch.no_grad():
        for one in model.parameters():
            one.add_(0.1 * torch.randn_like(one))
    return model


@pytest.mark.parametrize(
    ("init", "alpha", "specs", "start"),
    [
        ("auto", 2.0, {"weight": ONE}, "mixed"),
        ("auto", 1.0, {"weight": ONE}, "warm"),
        ("auto", 2.0, {"weight": MORE}, "warm"),
        ("auto", 2.0, {"q": WHOLE, "k": WHOLE}, "warm"),
        ("auto", 2.0, {"q": WHOLE, "k": ONE}, "mixed"),
        ("warm", 2.0, {"weight": ONE}, "warm"),
        ("mixed", 1.0, {"weight": MORE}, "mixed"),
    ],
)
def test_single_terms_of_widened_models_are_drawn(
    init: Any, alpha: float, specs: dict[str, FactorSpec], start: str
) -> None:
    assert started(init, alpha, specs) == start


def test_what_is_drawn_has_the_norm_of_the_widened_weight_and_the_rest_is_trained() -> None:
    model = _trained()
    asked: dict[str, Any] = {"alpha": 2, "inputs": ["3x12x12"], "convert_anyway": True}
    mixed, report = bp_convert.convert(model, **asked)
    exact, _ = bp_convert.convert(model, rank=10**6, **asked)
    for name in ("0", "3"):
        drawn: Any = mixed.get_submodule(name)
        whole: Any = exact.get_submodule(name)
        sizes = (one.dense_weight().detach().norm() for one in (drawn, whole))
        ratio = float(next(sizes)) / float(next(sizes))
        assert ratio == pytest.approx(1, rel=0.15)
        assert torch.equal(drawn.bias, whole.bias)
    assert torch.equal(mixed.get_parameter("1.weight"), exact.get_parameter("1.weight"))
    assert torch.equal(mixed.get_parameter("6.bias"), model.get_parameter("6.bias"))
    notes = [note for layer in report.layers for note in layer.notes]
    assert notes.count("starts from noise: drawn at the size of its weight") == 2
    assert "train it" in report.verdict


def test_a_seed_draws_the_same_and_another_another() -> None:
    ones = [
        bp_convert.convert(_model(), alpha=2, inputs=["3x12x12"], convert_anyway=True, seed=seed)[0]
        for seed in (1, 1, 2)
    ]
    states = [one.state_dict()["0.w1"] for one in ones]
    assert torch.equal(states[0], states[1])
    assert not torch.equal(states[0], states[2])


@pytest.mark.parametrize("layer", [nn.LSTM(8, 12), nn.GRU(8, 12), nn.MultiheadAttention(12, 2)])
def test_layers_of_several_weights_are_drawn_at_their_sizes(layer: nn.Module) -> None:
    count = 3 if isinstance(layer, nn.MultiheadAttention) else 1

    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.layer(*[x] * count)[0]
            return out

    width = 12 if count == 3 else 8
    small, _ = bp_convert.convert(
        Around(), init="mixed", inputs=[f"5x{width}"], convert_anyway=True, convert_head=True
    )
    before = dict(layer.named_parameters())
    dense = dict(bp_convert.to_dense(small).layer.named_parameters())
    for name, one in dense.items():
        if "bias" in name:
            assert torch.allclose(one, before[name]) or "ih" in name or "hh" in name
        else:
            size = float(before[name].detach().norm())
            assert float(one.detach().norm()) == pytest.approx(size, rel=0.5)
