"""Hooks, buffers and attributes of layers that are replaced."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bp_convert

FULL: dict[str, Any] = {"rank": 10**6, "convert_anyway": True, "convert_head": True}


class Model(nn.Module):
    """Notes what passes its layer, outside of itself and within."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.layer = nn.Linear(12, 12), nn.Linear(12, 12)
        self.behind = nn.Linear(12, 4)
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.behind(self.layer(self.before(x)))

    def note(self, module: nn.Module, args: Any, output: Tensor) -> None:
        assert module.in_features == 12
        self.seen.append(output.detach())


def _reason(model: nn.Module) -> str:
    found = bp_convert.plan(model, inputs=["12"], **FULL).layer("layer")
    assert found is not None
    return found.reason


def test_hooks_that_look_go_along_and_speak_of_the_copy() -> None:
    model, x = Model(), torch.randn(3, 12)
    slopes: list[float] = []
    model.layer.register_forward_hook(model.note)
    model.layer.register_forward_pre_hook(lambda *_, **__: None, with_kwargs=True)
    model.layer.register_full_backward_hook(lambda m, i, o: slopes.append(float(o[0].sum())))
    small, report = bp_convert.convert(model, inputs=["12"], **FULL)
    assert isinstance(small.layer, bp_convert.BPLinear)
    assert model.seen == []
    assert slopes == []
    found = report.plan.layer("layer")
    assert found is not None
    assert "its hooks go along, and are given the bilinear layer" in found.notes
    assert small.seen == []
    small(x).sum().backward()
    assert len(small.seen) == 1
    assert model.seen == []
    assert len(slopes) == 1
    expected = model.layer(model.before(x)).detach()
    torch.testing.assert_close(small.seen[0], expected, rtol=1e-4, atol=1e-5)
    dense = bp_convert.to_dense(small)
    dense(x)
    assert len(dense.seen) == 2


def _changes(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output * 2


def _writes(module: nn.Module, args: Any, output: Tensor) -> None:
    output.mul_(2)


def _reads(module: Any, args: Any) -> None:
    module.weight.data.clamp_(-1, 1)


def _hooked(where: str, hook: Any) -> Callable[[Model], object]:
    return lambda model: getattr(model.layer, where)(hook)


IN_THE_WAY: dict[str, tuple[Callable[[Model], object], str]] = {
    "changes": (
        _hooked("register_forward_hook", _changes),
        "its hook _changes changes what passes",
    ),
    "writes": (_hooked("register_forward_hook", _writes), "its hook _writes writes on what passes"),
    "reads": (_hooked("register_forward_pre_hook", _reads), "its hook _reads reads its weight"),
    "old": (_hooked("register_backward_hook", lambda *_: None), "of the old form"),
    "slopes": (
        _hooked("register_full_backward_hook", lambda m, i, o: tuple(2 * one for one in i)),
        "changes what passes",
    ),
    "state": (_hooked("register_state_dict_post_hook", lambda *_: None), "hooks on its state"),
    "further": (
        lambda model: model.layer.register_parameter("gain", nn.Parameter(torch.ones(1))),
        "it holds further parameters (gain)",
    ),
}


@pytest.mark.parametrize("name", IN_THE_WAY)
def test_what_cannot_go_along_keeps_the_layer(name: str) -> None:
    change, words = IN_THE_WAY[name]
    model = Model()
    change(model)
    assert words in _reason(model)


def test_buffers_and_attributes_go_along(tmp_path: Path) -> None:
    class Asking(Model):
        def __init__(self) -> None:
            super().__init__()
            self.layer.scale, self.layer.tags = 2.0, ["a", self.layer]
            self.layer.register_buffer("mask", torch.tensor([1.0, 0.0, 1.0, 1.0]))
            self.layer.register_buffer("unsaved", torch.ones(1), persistent=False)

        def forward(self, x: Tensor) -> Tensor:
            layer: Any = self.layer
            return self.behind(layer(x) * layer.scale) * layer.mask * layer.unsaved

    model, x = Asking(), torch.randn(3, 12)
    small, report = bp_convert.convert(model, inputs=["12"], **FULL)
    assert isinstance(small.layer, bp_convert.BPLinear)
    torch.testing.assert_close(small(x), model(x), rtol=1e-4, atol=1e-5)
    assert small.layer.tags[1] is small.layer
    assert "layer.mask" in small.state_dict()
    assert "layer.unsaved" not in small.state_dict()
    held = sum(t.numel() * 4 for t in (*small.parameters(), *small.buffers()))
    assert report.plan.bytes.after == held
    with torch.no_grad():
        small.layer.mask.zero_()
    assert model.layer.mask.any()
    bp_convert.save(small, tmp_path / "small.safetensors")
    again = bp_convert.load(tmp_path / "small.safetensors", model=Asking)
    assert not again(x).any()
    dense = bp_convert.to_dense(small)
    assert dense.layer.scale == 2.0
    assert not dense.layer.mask.any()
