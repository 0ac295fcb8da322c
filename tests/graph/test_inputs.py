"""Guessing an example input."""

from __future__ import annotations

import pytest
import torch
import torchvision
from torch import Tensor, nn

from bp_convert.fakes.inputs import infer_input
from tests.tiny_models import TINY


def flat(side: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3, 1, 1), nn.Flatten(), nn.Linear(4 * side * side, 5))


@pytest.mark.parametrize(
    ("model", "text", "words"),
    [
        (nn.Sequential(nn.Linear(7, 3)), "7", "7 features, from its first layer 0"),
        (flat(32), "3x32x32", "3 channels from its first layer 0"),
        (flat(64), "3x64x64", "size 64 because it runs"),
        (nn.Sequential(nn.Conv2d(1, 4, 3), nn.AdaptiveAvgPool2d(1)), "1x28x28", "1 channels"),
        (nn.Sequential(nn.Conv2d(2, 4, 3), nn.AdaptiveAvgPool2d(1)), "2x224x224", "2 channels"),
        (nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 2)), "int64:1x8<11", "ids below 11"),
        (nn.LSTM(6, 4, batch_first=True), "8x6", "8 steps of 6 features"),
        (nn.LSTM(6, 4), "8x6", "the batch on its second axis"),
        (
            nn.Sequential(nn.ConvTranspose2d(6, 4, 4), nn.ReLU(), nn.Conv2d(4, 3, 3)),
            "6x1x1",
            "6 channels from its first layer 0",
        ),
        (nn.Sequential(nn.EmbeddingBag(11, 8), nn.Linear(8, 2)), "int64:1x8<11", "ids below 11"),
        (nn.Sequential(nn.Conv1d(2, 4, 9), nn.Flatten(), nn.Linear(4 * 56, 1)), "2x64", "size 64"),
    ],
)
def test_the_first_layer_tells(model: nn.Module, text: str, words: str) -> None:
    found = infer_input(model)
    assert found is not None
    specs, said = found
    assert [str(spec) for spec in specs] == [text]
    assert words in said


def test_steps_are_added_where_the_model_wants_them() -> None:
    class Steps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Linear(6, 4)

        def forward(self, x: Tensor) -> Tensor:
            _, steps, _ = x.shape
            return self.stem(x).sum(1) / steps

    found = infer_input(Steps())
    assert found is not None
    assert str(found[0][0]) == "8x6"


@pytest.mark.slow
def test_torchvision_models_take_their_usual_size() -> None:
    with torch.device("meta"):
        model = torchvision.models.mobilenet_v2(weights=None)
    found = infer_input(model)
    assert found is not None
    assert str(found[0][0]) == "3x224x224"
    assert "torchvision's MobileNetV2" in found[1]


@pytest.mark.parametrize("name", ["two inputs", "packed", "keyword"])
def test_what_needs_more_is_not_guessed(name: str) -> None:
    assert infer_input(TINY[name].make()) is None


def test_nothing_fits() -> None:
    assert infer_input(flat(77)) is None
    assert infer_input(nn.ReLU()) is None


def test_the_model_is_not_run() -> None:
    class Counting(nn.Linear):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            assert type(x) is not Tensor
            return super().forward(x)

    model = nn.Sequential(Counting(6, 4))
    assert infer_input(model) is not None
    assert model[0].calls == 0
