"""Lazy layers that have seen nothing, and weights that were never loaded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import bp_convert
from bp_convert.errors import CheckpointError, PlanError

pytestmark = pytest.mark.filterwarnings("ignore:Lazy modules:UserWarning")
BY_SHAPE = ("plan", "plan without input", "inspect")  # weights without values do
CALLS = {
    "plan": lambda model: bp_convert.plan(model, inputs=["64"]),
    "plan without input": lambda model: bp_convert.plan(model),
    "inspect": lambda model: bp_convert.inspect(model),
    "convert": lambda model: bp_convert.convert(model, inputs=["64"]),
    "convert by target": lambda model: bp_convert.convert(
        model, inputs=["64"], target="params=0.5"
    ),
    "apply": lambda model: bp_convert.apply(model, bp_convert.plan(_plain(), inputs=["64"])),
}


def _plain() -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Linear(64, 4))


@pytest.mark.parametrize("call", CALLS)
def test_a_lazy_layer_that_never_ran_is_named(call: str) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.LazyBatchNorm1d(), nn.LazyLinear(4))
    with pytest.raises(PlanError) as caught:
        CALLS[call](model)
    assert caught.value.where == "1 (LazyBatchNorm1d)"
    assert "1 more" in caught.value.found
    assert "run it once" in caught.value.fix


@pytest.mark.parametrize("call", [name for name in CALLS if name not in BY_SHAPE])
@pytest.mark.parametrize(
    ("part", "where"), [("2", "2.weight (Linear)"), ("1", "1.weight (BatchNorm1d)")]
)
def test_a_tensor_without_values_is_named(call: str, part: str, where: str) -> None:
    model = _plain().eval()
    model.get_submodule(part).to("meta")
    with pytest.raises(PlanError) as caught:
        CALLS[call](model)
    assert caught.value.where == where
    assert "meta device" in caught.value.found
    assert "load" in caught.value.fix


def test_a_buffer_counts_too() -> None:
    model = _plain()
    model[1].running_var = model[1].running_var.to("meta")
    with pytest.raises(PlanError, match=r"1.running_var \(BatchNorm1d\)(.|\n)*1 of 9"):
        bp_convert.convert(model)


def test_a_lazy_layer_that_has_run_converts() -> None:
    model = nn.Sequential(nn.LazyLinear(64), nn.ReLU(), nn.LazyLinear(8)).eval()
    x = torch.randn(4, 64)
    expected = model(x)
    small, _ = bp_convert.convert(model, inputs=["64"], rank=10**6, convert_anyway=True)
    assert type(small[0]).__name__ == "BPLinear"
    torch.testing.assert_close(small(x), expected, rtol=1e-3, atol=1e-4)


def test_a_pickled_lazy_model_is_refused_in_a_line(tmp_path: Path) -> None:
    path = tmp_path / "lazy.pt"
    torch.save(nn.Sequential(nn.LazyLinear(4)), path)
    with pytest.raises(CheckpointError) as caught:
        bp_convert.open_model(path)
    assert "lazy layer that has not seen an input" in caught.value.found
    assert "run it once" in caught.value.fix
    trusted = ["torch.nn", "torch.utils", "torch.nn.parameter", "torch.utils.hooks"]
    with pytest.raises(CheckpointError, match="lazy layer"):
        bp_convert.open_model(path, trust=trusted)
