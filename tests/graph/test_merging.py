"""LoRA adapters beside converted layers, and merged before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bp_convert
from bp_convert.errors import PlanError
from bp_convert.graph.merging import merged

FULL: dict[str, Any] = {"rank": 10**6, "convert_anyway": True, "convert_head": True}


class Wrapper(nn.Module):
    """Built as peft builds its own."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base_layer = base
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base.in_features, rank, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(rank, base.out_features, bias=False)})
        self.scaling = 2.0

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + self.scaling * self.lora_B["default"](self.lora_A["default"](x))


class Merging(Wrapper):
    """Has a merge of its own, which writes on its base layer."""

    merged = False

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) if self.merged else super().forward(x)

    def merge(self) -> None:
        change = self.lora_B["default"].weight @ self.lora_A["default"].weight
        self.base_layer.weight.data += self.scaling * change
        self.merged = True


class Within(nn.Linear):
    """Holds its adapter itself, and merges it where it is switched to eval mode."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.lora_A = nn.Parameter(torch.randn(2, inputs))
        self.lora_B = nn.Parameter(torch.randn(outputs, 2))
        self.is_merged = False

    def train(self, mode: bool = True) -> Any:
        super().train(mode)
        if mode == self.is_merged:
            change = self.lora_B @ self.lora_A
            self.weight.data += -change if mode else change
            self.is_merged = not mode
        return self

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y if self.is_merged else y + x @ self.lora_A.t() @ self.lora_B.t()


class Wrong(Merging):
    def merge(self) -> None:
        self.merged = True


def _model(wrapper: type[Wrapper] = Wrapper) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(wrapper(nn.Linear(12, 12)), nn.ReLU(), wrapper(nn.Linear(12, 4)))
    return model.eval()


def test_the_base_is_converted_and_the_adapter_kept() -> None:
    model, x = _model(), torch.randn(3, 12)
    small, report = bp_convert.convert(model, inputs=["12"], **FULL)
    assert isinstance(small[0].base_layer, bp_convert.BPLinear)
    base = report.plan.layer("0.base_layer")
    part = report.plan.layer("0.lora_A.default")
    assert base is not None
    assert part is not None
    assert any("its adapter stays beside it" in note for note in base.notes)
    assert (part.action, part.reason) == ("kept", "it is a part of the adapter 0")
    torch.testing.assert_close(small(x), model(x), rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        small[0].lora_B["default"].weight.zero_()
    assert not torch.allclose(small(x), model(x))


@pytest.mark.parametrize("wrapper", [Wrapper, Merging])
def test_adapters_are_merged_first(wrapper: type[Wrapper], tmp_path: Path) -> None:
    model, x = _model(wrapper), torch.randn(3, 12)
    before = {name: one.clone() for name, one in model.state_dict().items()}
    small, report = bp_convert.convert(model, inputs=["12"], merge_adapters=True, **FULL)
    assert all(torch.equal(one, before[name]) for name, one in model.state_dict().items())
    assert isinstance(small[0], bp_convert.BPLinear)
    assert "2 adapters merged first" in report.plan.notes
    torch.testing.assert_close(small(x), model(x), rtol=1e-4, atol=1e-5)
    bp_convert.save(small, tmp_path / "small.safetensors")
    again = bp_convert.load(tmp_path / "small.safetensors", model=lambda: _model(wrapper))
    torch.testing.assert_close(again(x), small(x))


def test_an_adapter_within_a_layer_stays_or_is_merged() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(Within(12, 12), nn.Linear(12, 4)), torch.randn(3, 12)
    found = bp_convert.plan(model, inputs=["12"], **FULL).layer("0")
    assert found is not None
    assert found.reason == "it holds an adapter of its own (--merge-adapters merges it first)"
    small, _ = bp_convert.convert(model, inputs=["12"], merge_adapters=True, **FULL)
    assert isinstance(small[0], bp_convert.BPLinear)
    torch.testing.assert_close(small(x), model(x), rtol=1e-4, atol=1e-5)


def test_an_adapter_that_cannot_be_merged_is_named() -> None:
    with pytest.raises(PlanError, match=r"0 \(Wrong\)(.|\n)*merged, it computes something else"):
        bp_convert.plan(_model(Wrong), inputs=["12"], merge_adapters=True)
    tied: Any = _model()
    tied[2].base_layer.weight = nn.Parameter(torch.randn(12, 12))
    tied[2].base_layer.weight = tied[0].base_layer.weight
    with pytest.raises(PlanError, match=r"is also that of 2\.base_layer"):
        merged(tied)


def test_a_model_without_adapters_is_itself() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    assert merged(model) == (model, 0)
    plan = bp_convert.plan(model, inputs=["4"], merge_adapters=True)
    assert "no adapters merged first" in plan.notes
