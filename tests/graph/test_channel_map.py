"""Widening with a warm start keeps the function: repeated channels, shared weights, exact factors.

Every model here is widened, its layers fitted at full rank, and its outputs compared with the
source's, so that one shifted channel anywhere shows.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bp_convert
from bp_convert.graph.example import make_inputs
from bp_convert.planner import prepare
from bp_convert.surgery import apply_plan
from bp_convert.values.settings import Settings
from bp_convert.values.tensors import TensorSpec
from bp_convert.widths.channel_map import measure_maps
from bp_convert.widths.channel_values import fingerprint
from tests.tolerances import assert_near


class Chain(nn.Module):
    """Convolutions, batch norm, pooling, flatten with spatial places, Linears."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 4, 3, padding=1),
            nn.BatchNorm2d(4),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
            nn.Conv2d(4, 6, 3, padding=1, bias=False),
            nn.PReLU(6),
        )
        self.a, self.b = nn.Linear(6 * 16, 10), nn.Linear(10, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(self.features(x).flatten(1))))


class ChannelsLast(nn.Module):
    """A flatten whose places run faster than its channels, and one that is the other way round."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.a, self.b, self.c = nn.Linear(4 * 64, 6), nn.Linear(4 * 64, 6), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.conv(x))
        return self.c(self.a(y.permute(0, 2, 3, 1).flatten(1)) + self.b(y.flatten(1)))


class Heads(nn.Module):
    """Attention whose heads keep their size, so that there are more of them, in a residual stream;
    with ``shared`` several of them read one key, else the projections are fused."""

    def __init__(self, shared: bool) -> None:
        super().__init__()
        self.head_dim, self.shared = 4, shared
        self.part = 16
        self.stem = nn.Linear(6, 16)
        self.qkv = nn.Linear(16, 16 if shared else 48)
        self.k, self.v = (nn.Linear(16, 8), nn.Linear(16, 8)) if shared else (None, None)
        self.merge, self.out = nn.Linear(16, 16), nn.Linear(16, 5)

    def heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:-1], -1, self.head_dim).transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        if self.k is None or self.v is None:
            q, k, v = map(self.heads, self.qkv(x).split(self.part, 2))
        else:
            q, k, v = self.heads(self.qkv(x)), self.heads(self.k(x)), self.heads(self.v(x))
            k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
        y = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.out(x + self.merge(y.transpose(1, 2).flatten(2)))


class Dense(nn.Module):
    """Concatenation of groups that widen by different factors, norms over it, a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 4, 1), nn.Conv2d(3, 2, 3, padding=1)
        self.norm = nn.BatchNorm2d(9)
        self.mix, self.res = nn.Conv2d(9, 6, 1), nn.Conv2d(6, 6, 3, padding=1)
        self.last = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.norm(torch.cat([self.b(x), x, self.a(x)], 1)))
        y = self.mix(y)
        y = y + self.res(torch.relu(y))
        return self.last(y.mean((2, 3)))


class Depthwise(nn.Module):
    """Depth-wise, group norm, squeeze-and-excite."""

    def __init__(self) -> None:
        super().__init__()
        self.point, self.depth = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.norm = nn.GroupNorm(2, 8)
        self.down, self.up = nn.Conv2d(8, 4, 1), nn.Conv2d(4, 8, 1)
        self.last = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.depth(torch.relu(self.point(x))))
        gate = torch.sigmoid(self.up(torch.relu(self.down(y.mean((2, 3), keepdim=True)))))
        return self.last((y * gate).amax((2, 3)))


class Multiplied(nn.Module):
    """Depth-wise with two outputs a channel: repeats come in pairs."""

    def __init__(self) -> None:
        super().__init__()
        self.point, self.depth = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 8, 3, padding=1, groups=4)
        self.norm, self.mix = nn.BatchNorm2d(8), nn.Conv2d(8, 6, 1)
        self.last = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.norm(self.depth(torch.relu(self.point(x)))))
        return self.last(self.mix(y).amax((2, 3)))


class Grouped(nn.Module):
    """A grouped and a transposed convolution, which follow without being replaced."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.groups = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 12, 3, padding=1, groups=2)
        self.up, self.last = nn.ConvTranspose2d(12, 6, 2, 2), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.groups(torch.relu(self.first(x))))
        return self.last(self.up(y).mean((2, 3)))


class Attention(nn.Module):
    """Class token, positions, layer norm, attention, a residual stream."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(7, 8)
        self.token, self.place = (
            nn.Parameter(torch.randn(1, 1, 8)),
            nn.Parameter(torch.randn(1, 6, 8)),
        )
        self.norm, self.mix = nn.LayerNorm(8), nn.MultiheadAttention(8, 2, batch_first=True)
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)
        self.end, self.last = nn.LayerNorm(8), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.cat([self.token.expand(len(x), -1, -1), self.stem(x)], 1) + self.place
        z = self.norm(y)
        y = y + self.mix(z, z, z, need_weights=False)[0]
        y = y + self.down(nn.functional.gelu(self.up(y)))
        return self.last(self.end(y)[:, 0])


IMAGE = (TensorSpec(shape=(3, 8, 8)),)
CASES: list[tuple[type[nn.Module], tuple[TensorSpec, ...]]] = [
    (Chain, IMAGE),
    (ChannelsLast, IMAGE),
    (Dense, IMAGE),
    (Depthwise, IMAGE),
    (Multiplied, IMAGE),
    (Grouped, IMAGE),
    (Attention, (TensorSpec(shape=(5, 7)),)),
]


def _shaken(make: type[nn.Module]) -> nn.Module:
    """A model in eval mode whose norms are not at their trivial start."""
    model = make().double().eval()
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if tensor.is_floating_point() and tensor.dim() == 1:
                tensor.copy_(torch.rand_like(tensor) + (0.5 if "var" in name else 0))
    return model


def _widened(
    model: nn.Module, inputs: tuple[TensorSpec, ...], alpha: float
) -> tuple[Any, Any, Any]:
    settings = Settings(alpha=alpha, rank=10**6, inputs=inputs, convert_anyway=True)
    plan = prepare(model, settings).plan
    args, kwargs = make_inputs(model, inputs, batch=4)
    maps = measure_maps(model, plan, args, kwargs)
    return plan, maps, apply_plan(model, plan, maps)


@pytest.mark.slow
@pytest.mark.parametrize("alpha", [2, 3])
@pytest.mark.parametrize(("make", "inputs"), CASES, ids=lambda x: getattr(x, "__name__", ""))
def test_the_widened_model_computes_the_same(
    make: type[nn.Module], inputs: tuple[TensorSpec, ...], alpha: int
) -> None:
    model = _shaken(make)
    plan, maps, done = _widened(model, inputs, alpha)
    assert maps.preserved, (maps.unknown, maps.fresh)
    assert not done.random
    assert sum(layer.outputs[1] > layer.outputs[0] for layer in plan.layers) >= 1
    args, _ = make_inputs(model, inputs, batch=3, seed=5)
    assert_near(done.model(*args), model(*args), torch.float32)


def test_a_fractional_alpha_keeps_a_chain() -> None:
    model = _shaken(Chain)
    _, maps, done = _widened(model, IMAGE, 1.5)
    assert maps.preserved
    x = torch.randn(3, 3, 8, 8, dtype=torch.float64)
    assert_near(done.model(x), model(x), torch.float32)


@pytest.mark.slow
def test_an_lstm_keeps_its_states() -> None:
    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(20, 6, padding_idx=0)
            self.lstm = nn.LSTM(6, 4, 2, batch_first=True, bidirectional=True)
            self.a, self.last = nn.Linear(16, 6), nn.Linear(6, 5)

        def forward(self, tokens: Tensor) -> Tensor:
            steps, (h, _) = self.lstm(self.table(tokens))
            ends = torch.cat([h[-2], h[-1], steps.mean(1)], 1)
            return self.last(torch.relu(self.a(ends)))

    model = Tagger().double().eval()
    inputs = (TensorSpec(dtype="int64", shape=(7,)),)
    plan, maps, done = _widened(model, inputs, 2)
    assert maps.preserved, maps.unknown
    assert {layer.name for layer in plan.converted} == {"table", "lstm", "a"}
    tokens = torch.randint(0, 20, (3, 7))
    assert_near(done.model(tokens), model(tokens), torch.float32)


def test_dead_channels_do_not_confuse_it() -> None:
    """Trained weights may give equal or dead channels; the maps do not look at them."""
    model = _shaken(Chain)
    with torch.no_grad():
        model.features[0].weight[1:].zero_()  # type: ignore[index, union-attr]
        model.features[0].bias.fill_(-9)  # type: ignore[index, union-attr]
    _, maps, done = _widened(model, IMAGE, 2)
    assert maps.preserved
    x = torch.randn(3, 3, 8, 8, dtype=torch.float64)
    assert_near(done.model(x), model(x), torch.float32)


@pytest.mark.parametrize(("shared", "alpha"), [(False, 1.5), (False, 2), (True, 2)])
def test_heads_that_keep_their_size_are_repeated_whole(shared: bool, alpha: float) -> None:
    model = Heads(shared).double().eval()
    _, maps, done = _widened(model, (TensorSpec(shape=(5, 6)),), alpha)
    assert maps.preserved, (maps.unknown, maps.fresh)
    assert not done.random
    x = torch.randn(2, 5, 6, dtype=torch.float64)
    assert_near(done.model(x), model(x), torch.float32)


def test_what_does_not_keep_repeats_is_named_and_starts_from_noise() -> None:
    class Sums(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Linear(7, 8), nn.Linear(8, 6), nn.Linear(6, 5)

        def forward(self, x: Tensor) -> Tensor:
            return self.c(torch.relu(self.b(torch.cumsum(self.a(x), 1))))

    model = Sums().double().eval()
    _, maps, done = _widened(model, (TensorSpec(shape=(7,)),), 2)
    assert not maps.preserved
    assert "does not repeat" in maps.unknown["b"]
    assert set(done.random) == {"b"}
    assert set(done.errors) == {"a", "c"}


def test_a_shifted_map_would_show() -> None:
    """The negative twin: one channel of one map moved by one, and the outputs differ."""
    model = _shaken(Chain)
    plan, maps, _ = _widened(model, IMAGE, 2)
    spread = maps.spreads["features.4"]
    moved = type(spread)(spread.inputs.roll(1), spread.outputs)
    maps.spreads["features.4"] = moved
    x = torch.randn(3, 3, 8, 8, dtype=torch.float64)
    gap = (apply_plan(model, plan, maps).model(x) - model(x)).abs().max().detach()
    assert float(gap) > 1e-3


def test_the_source_is_not_touched() -> None:
    model = _shaken(Dense)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = torch.get_rng_state()
    _widened(model, IMAGE, 2)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in before.items())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


class Picky(nn.Module):
    """Does not take every value of its own hidden layer."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.norm, self.two = nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 16)
        self.three = nn.Linear(16, 4)
        self.strict = False

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.one(x))
        if self.strict:
            raise ValueError("saturated")
        return self.three(self.two(hidden))


def test_a_model_that_does_not_run_on_drawn_values_starts_afresh() -> None:
    model = Picky().eval()
    inputs = (TensorSpec.parse("16"),)
    plan = prepare(model, Settings(alpha=2, rank=10**6, inputs=inputs, convert_anyway=True)).plan
    model.strict = True
    maps = measure_maps(model, plan, *make_inputs(model, inputs, batch=4))
    assert not maps.preserved
    assert "saturated" in maps.unknown["two"]
    assert "saturated" in maps.fresh["norm"]
    model.strict = False
    done = apply_plan(model, plan, maps)
    assert {"two", "norm"} <= done.random.keys()
    assert done.model(torch.zeros(2, 16)).shape == (2, 4)


class Gained(nn.Conv2d):
    """A convolution with a gain for each output, as timm's ScaledStdConv2d has."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.gain = nn.Parameter(torch.ones(self.out_channels, 1, 1, 1))

    def forward(self, input: Tensor) -> Tensor:
        return self._conv_forward(input, self.weight * self.gain, self.bias)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(3, 8, 3), Gained(8, 8, 3, padding=1)
        self.three, self.out = nn.Conv2d(8, 8, 3), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.one(x)
        return self.out(self.three(x + self.two(x).relu()).mean((2, 3)))


def test_tensors_that_a_subclass_adds_follow_too() -> None:
    torch.manual_seed(0)
    model = Residual().eval()
    asked: dict[str, Any] = {"alpha": 2, "init": "warm", "convert_anyway": True}
    small, report = bp_convert.convert(model, inputs=["3x12x12"], **asked)
    assert tuple(small.two.gain.shape) == (32, 1, 1, 1)
    assert report.verification is not None
    assert not any("noise" in note for layer in report.layers for note in layer.notes)


@pytest.mark.parametrize(("shape", "axis"), [((0, 5), 1), ((0, 5, 3), -2), ((5, 0), 0)])
def test_columns_of_nothing_are_told_apart_by_nothing(shape: tuple[int, ...], axis: int) -> None:
    assert torch.equal(fingerprint(torch.zeros(shape), axis), torch.zeros(5, 12).double())
