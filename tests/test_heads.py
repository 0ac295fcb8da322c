"""Which layers that make a model's output stay dense."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bp_convert


def _low_rank_(layer: nn.Linear, rank: int) -> nn.Linear:
    with torch.no_grad():
        rows, columns = layer.weight.shape
        layer.weight.copy_(torch.randn(rows, rank) @ torch.randn(rank, columns) / columns**0.5)
    return layer


def _reason(model: nn.Module, inputs: str, name: str, **asked: Any) -> str:
    plan = bp_convert.plan(model, rank=0.25, convert_anyway=True, inputs=[inputs], **asked)
    layer = plan.layer(name)
    assert layer is not None
    return layer.reason


class States(nn.Module):
    """Returns every hidden state, as transformers do on request."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        states = []
        for layer in self.layers:
            x = layer(x).relu()
            states.append(x)
        return tuple(states)


def test_a_small_head_stays_and_says_how_small_it_is() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 5))
    share = 100 * 325 / (325 + 64 * 65)
    assert _reason(model, "64", "2") == (
        f"it makes the model's output and holds {share:.2g} % of the weights "
        "(--convert-head converts it)"
    )
    assert _reason(model, "64", "2", convert_head=True) == ""


@pytest.mark.parametrize(("rank", "stays"), [(4, False), (32, True)])
def test_a_large_head_goes_by_what_it_would_lose(rank: int, stays: bool) -> None:
    torch.manual_seed(0)
    body = _low_rank_(nn.Linear(64, 32), 8)
    model = nn.Sequential(body, nn.ReLU(), _low_rank_(nn.Linear(32, 64), rank))
    reason = _reason(model, "64", "2")
    assert reason.startswith("it makes the model's output and would lose") is stays
    assert ("of its weight's norm, other layers" in reason) is stays
    if stays:  # the numbers are those that conversion then finds
        _, report = bp_convert.convert(
            model, rank=0.25, convert_anyway=True, convert_head=True, inputs=["64"]
        )
        errors = [100 * report.fit_errors[name] for name in ("2", "0")]
        assert all(f"{error:.2g} %" in reason for error in errors)


def test_the_paper_keeps_every_head() -> None:
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 64))
    plan = bp_convert.plan(model, pairs="paper", convert_anyway=True, inputs=["64"])
    assert plan.layers[1].reason == "it makes the model's output (--convert-head converts it)"
    assert plan.layers[0].action == "replaced"


@pytest.mark.parametrize(
    ("model", "inputs"),
    [
        (nn.LSTM(24, 32, batch_first=True), "5x24"),
        (nn.Linear(48, 64), "48"),
        (States(), "32"),
    ],
    ids=["LSTM", "Linear", "states"],
)
def test_a_model_of_heads_only_is_converted(model: nn.Module, inputs: str) -> None:
    plan = bp_convert.plan(model, rank=0.25, convert_anyway=True, inputs=[inputs])
    assert {layer.action for layer in plan.layers} == {"replaced"}


def test_without_weights_a_head_goes_by_its_size() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 64))
    assert _reason(model, "64", "2") == ""


def test_outputs_that_hang_on_nothing_do_not_make_a_model_usable() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 5))
    nn.init.zeros_(model[2].weight)  # type: ignore[arg-type]
    asked = {"convert_anyway": True, "inputs": ["64"]}
    _, report = bp_convert.convert(model, rank=0.25, **asked)
    assert "do not depend on what was lost" in report.verdict
    _, report = bp_convert.convert(model, rank=10**6, **asked)
    assert "the same function" in report.verdict
