"""Layers that compute their weight, or have a forward of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune, spectral_norm, weight_norm

import bp_convert
from bp_convert.graph.probing import differs
from bp_convert.kinds import kind_of
from bp_convert.values.plan import LayerPlan

FULL: dict[str, Any] = {"rank": 10**6, "convert_anyway": True, "convert_head": True}


class Upper(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.triu() * 2


class Dropped(nn.Module):
    """A weight that is another at each call, in eval mode too."""

    def forward(self, weight: Tensor) -> Tensor:
        return F.dropout(weight, 0.5, training=True)


def _pruned(layer: nn.Module) -> nn.Module:
    prune.l1_unstructured(layer, "weight", 0.5)
    return prune.random_unstructured(layer, "weight", 0.2)


def _upper(layer: nn.Module) -> nn.Module:
    parametrize.register_parametrization(layer, "weight", Upper())
    return layer


def _old_weight_norm(layer: nn.Module) -> nn.Module:
    with pytest.warns(FutureWarning):
        return weight_norm(layer)


COMPUTED: dict[str, tuple[Callable[[nn.Module], nn.Module], str]] = {
    "old weight norm": (_old_weight_norm, "weight norm"),
    "weight norm": (parametrizations.weight_norm, "weight norm"),
    "old spectral norm": (spectral_norm, "spectral norm"),
    "spectral norm": (parametrizations.spectral_norm, "spectral norm"),
    "orthogonal": (parametrizations.orthogonal, "kept orthogonal"),
    "pruned": (_pruned, "pruned"),
    "the user's own": (_upper, "Upper"),
}


class Turned(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.t() + self.bias


class Equalised(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight * 0.3, self.bias * 2)


class Shifted(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * 2) / 3 + 1


class Standardised(nn.Conv2d):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.gain = nn.Parameter(torch.rand(self.out_channels, 1, 1, 1) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        flat = self.weight.flatten(1)
        scaled = (flat - flat.mean(1, keepdim=True)) / flat.std(1, keepdim=True)
        weight = scaled.view_as(self.weight) * self.gain
        return F.conv2d(x, weight, self.bias, self.stride, self.padding, self.dilation, self.groups)


class ScaledAfter(nn.Conv1d):
    def forward(self, x: Tensor) -> Tensor:
        return 3 * super().forward(x)


class Words(nn.Embedding):
    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) * 8


AFFINE: dict[str, tuple[Callable[[], nn.Module], Tensor, str]] = {
    "the same": (lambda: Turned(12, 12), torch.randn(3, 12), "computes as nn.Linear (probed)"),
    "scaled inside": (lambda: Equalised(12, 12), torch.randn(3, 12), "of another weight"),
    "scaled around": (lambda: Shifted(12, 12), torch.randn(3, 12), "of another weight"),
    "standardised": (
        lambda: Standardised(6, 12, 3, stride=2, padding=1, bias=False),
        torch.randn(2, 6, 9, 8),
        "computes as nn.Conv2d of another weight",
    ),
    "scaled after": (lambda: ScaledAfter(6, 12, 3), torch.randn(2, 6, 9), "of another weight"),
    "a scaled table": (lambda: Words(20, 12), torch.randint(20, (2, 5)), "of another weight"),
}


class Square(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) ** 2


class Clamped(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.clamp(-50, 50))


class Noisy(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y + torch.randn_like(y) if self.training else y


class Counting(nn.Linear):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.training
        return super().forward(x)


class Further(nn.Linear):
    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return super().forward(x) * scale


class Detached(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.detach())


class Same(nn.Conv2d):
    """Pads as TensorFlow does, by what the input's size asks for."""

    def forward(self, x: Tensor) -> Tensor:
        sides = []
        for size in (x.shape[-1], x.shape[-2]):
            more = max((-(-size // 2) - 1) * 2 + 3 - size, 0)
            sides += [more // 2, more - more // 2]
        return F.conv2d(F.pad(x, sides), self.weight, self.bias, self.stride)


OTHER: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "square": (lambda: Square(12, 12), "Square does not compute what nn.Linear"),
    "clamped": (lambda: Clamped(12, 12), "something else in eval mode"),
    "noisy": (lambda: Noisy(12, 12), "something else in train mode"),
    "counting": (lambda: Counting(12, 12), "it changes its calls in train mode"),
    "further": (lambda: Further(12, 12), "its forward takes further inputs (scale)"),
    "detached": (lambda: Detached(12, 12), "its gradient is another"),
    "padded by size": (lambda: Same(4, 8, 3, stride=2), "Same does not compute what nn.Conv2d"),
}


class Around(nn.Module):
    """A layer with one before it where it takes numbers, and one behind."""

    def __init__(self, layer: nn.Module, x: Tensor) -> None:
        super().__init__()
        self.layer = layer
        self.behind = nn.Linear(layer(x).numel() // len(x), 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.behind(self.layer(x).flatten(1))


def _layer(plan: bp_convert.Plan) -> LayerPlan:
    found = plan.layer("layer")
    assert found is not None
    return found


def _inputs(x: Tensor) -> list[str]:
    shape = "x".join(map(str, x.shape[1:]))
    return [shape if x.is_floating_point() else f"int64:1x{shape}"]


def _converted_in_full(model: nn.Module, x: Tensor) -> tuple[nn.Module, LayerPlan]:
    before = {name: one.clone() for name, one in model.state_dict().items()}
    small, report = bp_convert.convert(model, inputs=_inputs(x), **FULL)
    assert all(torch.equal(one, before[name]) for name, one in model.state_dict().items())
    with torch.no_grad():
        torch.testing.assert_close(small.eval()(x), model.eval()(x), rtol=1e-4, atol=1e-5)
    return small, _layer(report.plan)


@pytest.mark.parametrize("name", COMPUTED)
def test_a_computed_weight_is_taken_as_it_is_in_eval_mode(name: str) -> None:
    wrap, words = COMPUTED[name]
    x = torch.randn(3, 12)
    layer = wrap(nn.Linear(12, 12)).train()
    layer(x)  # a step of the power iteration
    model = Around(layer, x).train()
    small, found = _converted_in_full(model, x)
    assert found.action == "replaced"
    assert f"{words}: its weight in eval mode is factored, the computation dropped" in found.notes
    assert isinstance(small.layer, bp_convert.BPLinear)
    assert found.params[0] == sum(p.numel() for p in layer.parameters())
    kept = _layer(bp_convert.plan(model, inputs=["12"], keep_parametrized=True, **FULL))
    assert kept.reason == f"its weight is computed ({words}), and that is to be kept"


def test_a_computed_weight_of_an_lstm_and_what_is_trained() -> None:
    lstm = parametrizations.weight_norm(nn.LSTM(8, 12), "weight_hh_l0")
    lstm.bias_ih_l0.requires_grad_(False)

    class Steps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.behind = lstm, nn.Linear(12, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.behind(self.layer(x)[0])

    _, found = _converted_in_full(Steps(), torch.randn(4, 5, 8))
    assert "weight_hh_l0: weight norm: " in str(found.notes)


@pytest.mark.parametrize("name", AFFINE)
def test_a_subclass_that_computes_an_affine_map_is_converted(name: str) -> None:
    make, x, words = AFFINE[name]
    torch.manual_seed(0)
    model = Around(make(), x)
    small, found = _converted_in_full(model, x)
    assert found.action == "replaced"
    assert any(words in note for note in found.notes)
    assert type(small.layer).__module__.startswith("bp_convert.layers")
    kept = _layer(bp_convert.plan(model, inputs=_inputs(x), keep_parametrized=True, **FULL))
    assert kept.action == ("replaced" if name == "the same" else "kept")


@pytest.mark.parametrize("name", OTHER)
def test_a_subclass_that_computes_something_else_stays(name: str) -> None:
    make, words = OTHER[name]
    x = torch.randn(2, 4, 9, 8) if name == "padded by size" else torch.randn(3, 12)
    found = _layer(bp_convert.plan(Around(make(), x), inputs=_inputs(x), **FULL))
    assert found.action == "kept"
    assert words in found.reason


class ByPosition(nn.Embedding):
    """Looks up positions that it counts from a mask."""

    def forward(self, mask: Tensor) -> Tensor:
        places = mask.cumsum(1) - 1
        return super().forward(places[:, -mask.shape[1] :])


def test_a_subclass_that_takes_other_inputs_stays_and_the_reason_says_so() -> None:
    model = nn.Sequential(ByPosition(12, 8), nn.Linear(8, 8), nn.Linear(8, 8))
    plan = bp_convert.plan(model, inputs=["int64:1x6<2"], **FULL)
    assert plan.layer("0").reason == (
        "the forward of ByPosition does not run on what nn.Embedding takes (probed: IndexError)"
    )


def test_a_weight_that_is_drawn_at_each_call_stays() -> None:
    layer = nn.Linear(12, 12)
    parametrize.register_parametrization(layer, "weight", Dropped())
    found = _layer(bp_convert.plan(Around(layer, torch.ones(1, 12)), inputs=["12"], **FULL))
    assert found.reason == "its weight (Dropped) is another at each call"


def test_a_tied_weight_behind_a_parametrisation_stays() -> None:
    model = Around(parametrizations.spectral_norm(nn.Linear(12, 12)), torch.ones(1, 12))
    original: Any = model.layer.parametrizations
    model.behind = nn.Linear(12, 12, bias=False)
    model.behind.weight = original.weight.original
    found = _layer(bp_convert.plan(model, inputs=["12"], **FULL))
    assert found.reason == "its parametrizations.weight.original is tied to behind.weight"


def test_another_layer_of_the_same_fields_is_told_apart() -> None:
    one, two = nn.Linear(6, 6), nn.Linear(6, 6)
    kind = kind_of(one)
    assert kind is not None
    assert differs(kind, one, two) == "it computes something else in eval mode"
    two.load_state_dict(one.state_dict())
    assert differs(kind, one, two, exact=True) == ""


def test_a_target_on_data_reaches_computed_weights() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        parametrizations.weight_norm(nn.Linear(32, 48)),
        nn.ReLU(),
        Equalised(48, 48),
        nn.Linear(48, 4),
    )
    data = torch.randn(64, 32)
    asked: dict[str, Any] = {"target": "params=0.5", "calibrate": data, "convert_anyway": True}
    small, report = bp_convert.convert(model, inputs=["32"], **asked)
    held = sum(p.numel() for p in model.parameters())
    assert sum(p.numel() for p in small.parameters()) <= 0.5 * held
    assert any(one.action == "replaced" for one in report.plan.layers[:2])


def test_widths_of_computed_weights_stay_and_the_rest_widens() -> None:
    model = nn.Sequential(
        nn.Linear(8, 12), nn.Linear(12, 12), Equalised(12, 12), nn.Linear(12, 12), nn.Linear(12, 3)
    )
    plan = bp_convert.plan(model, inputs=["8"], alpha=2)
    after = [one.after for one in plan.layers]
    assert after == [(8, 24), (24, 12), (12, 12), (12, 24), (24, 3)]
