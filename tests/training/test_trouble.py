"""Losses that are no number stop a run, and say where they come from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bp_convert
from bp_convert.errors import TrainingError
from bp_convert.training import settings_for
from bp_convert.training.trouble import Watchdog
from tests.training import runs


class Brittle(nn.Module):
    """Takes a logarithm that becomes infinite once its weight has moved far enough."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 8)
        self.bad = Logarithm()
        self.last = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.bad(self.first(x)))
        return out


class Logarithm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
        return x * (float("nan") if self.calls > 4 else 1.0)


def test_the_step_and_the_first_layer_are_named(tmp_path: Path) -> None:
    with pytest.raises(TrainingError) as caught:
        bp_convert.finetune(
            Brittle(), runs.data(), epochs=4, folder=tmp_path, checkpoint_every=2, validation=0.0
        )
    assert caught.value.where == "step 5"
    assert "bad (Logarithm)" in caught.value.found
    assert "lower lr" in caught.value.fix
    assert len(list(tmp_path.glob("step-*.pt"))) == 2
    assert "bad (Logarithm)" in (tmp_path / "log.jsonl").read_text().splitlines()[-1]


def test_weights_that_overflow_are_named() -> None:
    with pytest.raises(TrainingError, match=r"(NaN|not a number|infinite|run away)"):
        bp_convert.finetune(
            runs.plain(), (runs.data()[0], 1e18 * torch.randn(200, 4)), optimizer="SGD", lr=1e12,
            clip=None, steps=40, schedule="constant",
        )  # fmt: skip


def test_a_loss_that_runs_away_is_noticed_and_an_ordinary_one_is_not() -> None:
    dog = Watchdog()
    assert all(dog.healthy(1.0 + i) for i in range(10))
    assert dog.healthy(9_000.0)
    assert not dog.healthy(11_000.0)
    assert not dog.healthy(float("inf"))


def test_a_forward_that_fails_on_the_data_is_explained() -> None:
    class Picky(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Any:
            return self.inner(x)

    with pytest.raises(TrainingError, match="Picky on the training data"):
        bp_convert.finetune(Picky(), runs.data(), inputs=["16"])


@pytest.mark.parametrize("wrong", [{"lr": "fast"}, {"lr": -1}, {"dropout": "some"}])
def test_a_wrong_value_is_told_all_that_may_stand_there(wrong: dict[str, object]) -> None:
    with pytest.raises(TrainingError) as caught:
        settings_for(None, wrong)
    assert caught.value.allowed.startswith("Input should be ")
    assert caught.value.allowed.endswith(", or 'auto'")
