"""Expanded layers compute what those on factors do, keep nothing that is not true any more, and
hold nothing that is saved or copied."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from bp_convert.kinds import Ask, Spread
from bp_convert.layers.conv import BPConv2d
from bp_convert.layers.linear import BPLinear
from bp_convert.layers.lstm import BPLSTM
from bp_convert.layers.rnn import BPGRU, BPRNN
from bp_convert.values.factors import FactorSpec
from bp_convert.ways.expanding import Expanding
from tests.contract.cases import CASES, VARIANTS, Case, kind, output
from tests.tolerances import assert_near

EVERY = pytest.mark.parametrize("case", [*CASES, *VARIANTS], ids=str)
DOUBLE = torch.float64
pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")


def _twins(case: Case, dtype: torch.dtype = DOUBLE) -> tuple[Any, Any]:
    """Return a layer on its factors, and an expanded one with the same."""
    dense, one = case.make().to(dtype), kind(case)
    widths = one.widths(dense)
    twin: Any = one.build(dense, widths, one.factor(dense, widths, Ask(rank=2)), "cpu")
    one.fill(dense, twin, Spread())
    twin.eval()
    other = copy.deepcopy(twin)
    other.way = "expanded"
    return twin, other


def _held(layer: nn.Module) -> list[Any]:
    """Return what is kept in a layer."""
    return [one._kept for one in layer.modules() if isinstance(one, Expanding)]


@torch.no_grad()
def _agrees(other: nn.Module, case: Case, dtype: torch.dtype = DOUBLE) -> None:
    """Check an expanded layer against one that was made anew on factors of the same values."""
    twin = copy.deepcopy(other)
    twin.way = "factored"
    x = case.draw(dtype)
    assert_near(output(other, x), output(twin, x))


@EVERY
def test_both_ways_compute_the_same(case: Case) -> None:
    twin, other = _twins(case)
    x = case.draw(DOUBLE)
    with torch.no_grad():
        expected = output(twin, x)
        assert_near(output(other, x), expected)
        kept = _held(other)
        assert all(one is not None for one in kept)
        assert_near(output(other, x), expected)
        assert _held(other) == kept  # and is used again
    with torch.inference_mode():
        assert_near(output(other, x), expected)
    assert_near(output(other, x), expected)  # with gradients nothing kept is used


@EVERY
def test_gradients_are_those_of_the_factors(case: Case) -> None:
    twin, other = _twins(case)
    x = case.draw(DOUBLE)
    with torch.no_grad():
        output(other, x)
    found = [output(layer, x) for layer in (twin, other)]
    for one in found:
        one.square().sum().backward()
    factored = torch.equal(*found)  # else it has built its weight, in another order of sums
    for (name, one), two in zip(twin.named_parameters(), other.parameters(), strict=True):
        assert one.grad is not None, name
        assert two.grad is not None, name
        assert not factored or torch.equal(one.grad, two.grad), name
        assert_near(two.grad, one.grad)


def _step(layer: nn.Module) -> None:
    for one in layer.parameters():
        one.grad = torch.ones_like(one)
    torch.optim.SGD(layer.parameters(), 0.1).step()


@torch.no_grad()
def _in_place(layer: nn.Module) -> None:
    for one in layer.parameters():
        one.mul_(1.5)


def _by_data(layer: nn.Module) -> None:
    for one in layer.parameters():
        one.data.copy_(torch.randn_like(one))


def _other_data(layer: nn.Module) -> None:
    for one in layer.parameters():
        one.data = torch.randn_like(one)


def _other_state(layer: nn.Module) -> None:
    state = {name: torch.randn_like(one) for name, one in layer.state_dict().items()}
    layer.load_state_dict(state)


def _assigned(layer: nn.Module) -> None:
    state = {name: torch.randn_like(one) for name, one in layer.state_dict().items()}
    layer.load_state_dict(state, assign=True)


def _other_parameters(layer: nn.Module) -> None:
    for module in layer.modules():
        for name, one in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(torch.randn_like(one)))


CHANGES = (_step, _in_place, _by_data, _other_data, _other_state, _assigned, _other_parameters)


@EVERY
def test_nothing_is_kept_that_is_not_true_any_more(case: Case) -> None:
    for change in CHANGES:
        _, other = _twins(case)
        x = case.draw(DOUBLE)
        with torch.no_grad():
            before = output(other, x)
        change(other)
        _agrees(other, case)
        with torch.no_grad():
            assert not torch.allclose(output(other, x), before), change.__name__


@EVERY
def test_what_is_kept_stays_out_of_everything_else(case: Case) -> None:
    twin, other = _twins(case, torch.float32)
    x = case.draw(torch.float32)
    with torch.no_grad():
        expected = output(other, x)
        assert list(other.state_dict()) == list(twin.state_dict())
        for again in (copy.deepcopy(other), pickle.loads(pickle.dumps(other))):
            assert again.way == "expanded"
            assert _held(again) == [None] * len(_held(again))
            assert torch.equal(output(again, x), expected)
    moved = other.double()
    assert _held(moved) == [None] * len(_held(moved))
    _agrees(moved, case)
    other.train()
    assert _held(other) == [None] * len(_held(other))
    with torch.no_grad():
        output(other, case.draw(DOUBLE))
    assert _held(other) == [None] * len(_held(other))  # nothing is kept while it is trained


@EVERY
def test_threads_that_call_at_once_get_the_same(case: Case) -> None:
    twin, other = _twins(case)
    x = case.draw(DOUBLE)
    with torch.no_grad():
        expected = output(twin, x)
    found: list[Tensor] = []

    def call() -> None:
        with torch.no_grad():
            found.extend(output(other, x) for _ in range(5))

    threads = [threading.Thread(target=call) for _ in range(4)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert len(found) == 20
    for y in found:
        assert_near(y, expected)


def _linear(**fields: Any) -> BPLinear:
    layer = BPLinear(12, 8, rank=2, **fields).eval()
    layer.way = "expanded"
    return layer


def _after(layer: BPLinear, call: Callable[[], Any]) -> Any:
    with torch.no_grad():
        call()
    return layer._kept


@pytest.mark.filterwarnings("ignore:.torch.jit.trace", "ignore::torch.jit.TracerWarning")
def test_what_is_watched_or_cast_runs_on_the_factors() -> None:
    layer, x = _linear(), torch.randn(3, 12)
    with torch.autocast("cpu", torch.bfloat16):
        assert _after(layer, lambda: layer(x)) is None
    with FlopCounterMode(display=False):
        assert _after(layer, lambda: layer(x)) is None
    with torch.no_grad():
        traced = torch.jit.trace(layer, (x,), check_trace=False)
        assert layer._kept is None
        layer.w1.mul_(2)
        assert_near(traced(x), layer(x))  # it follows the factors
        held = {name: 2 * one for name, one in layer.named_parameters()}
        y = torch.func.functional_call(layer, held, (x,))
        assert_near(y, nn.functional.linear(x, 4 * layer.weight, 2 * layer.bias))


def test_what_has_no_version_or_another_type_runs_on_the_factors() -> None:
    with torch.inference_mode():
        layer = _linear()
        layer(torch.randn(3, 12))
    assert layer._kept is None
    layer = _linear(dtype=torch.bfloat16)
    layer.bias = nn.Parameter(torch.zeros(8))
    assert _after(layer, lambda: layer(torch.randn(3, 12, dtype=torch.bfloat16))) is None
    meta = _linear(device="meta")
    assert _after(meta, lambda: meta(torch.empty(3, 12, device="meta"))) is None


def test_the_memory_of_a_factor_can_be_given_back() -> None:
    layer = BPLinear(12, 12).eval()
    layer.way = "expanded"
    with torch.no_grad():
        layer(torch.randn(2, 12))
        assert layer._kept is not None
        storage = layer.w1.untyped_storage()
        assert storage.resizable()
        storage.resize_(0)
        assert not layer._kept.holds()  # without a look at what is gone


def test_one_number_written_in_place_into_a_large_factor_is_seen() -> None:
    layer = BPLinear(128, 128).eval()
    layer.way = "expanded"
    layer.w1 = nn.Parameter(torch.randn(64, *layer.w1.shape[1:]))
    layer.w2 = nn.Parameter(torch.randn(64, *layer.w2.shape[1:]))
    x = torch.randn(2, 128)
    with torch.no_grad():
        for at in range(1, 4):  # not all of them are among those that are compared
            layer(x)
            assert layer._kept is not None
            layer.w1.view(-1)[at] += 1
            assert not layer._kept.holds()


def test_a_large_factor_is_looked_at_throughout() -> None:
    layer = BPLinear(512, 512, rank=16).eval()
    layer.way = "expanded"
    x = torch.randn(2, 512)
    with torch.no_grad():
        layer(x)
        for at in range(layer.w2.shape[-1]):  # any column of it
            layer.w2.data[..., at].add_(0.1)
            assert_near(layer(x), nn.functional.linear(x, layer.weight, layer.bias))


def test_large_calls_that_factors_make_cheap_go_on_them(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = BPLinear(512, 512).eval()
    layer.way = "expanded"
    called: list[int] = []
    monkeypatch.setattr(
        "bp_convert.layers.linear.bilinear", lambda x, *_: called.append(len(x)) or x
    )
    with torch.no_grad():
        for rows in (1, 8, 32):
            layer(torch.randn(rows, 512))
    assert called == [32]
    layer = BPLinear(512, 512, rank=64).eval()  # as many multiply-adds as the dense layer
    layer.way = "expanded"
    with torch.no_grad():
        layer(torch.randn(32, 512))
    assert called == [32]


def test_large_calls_of_convolutions_go_on_cheap_factors(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[int] = []
    monkeypatch.setattr(BPConv2d, "_run", lambda self, x, _: called.append(len(x)) or x)
    one_term, many = FactorSpec(out=(4, 8), inp=(32, 9), axes=(2, 2)), 32
    for rank, expected in ((1, [16]), (many, [])):  # many terms take more than the dense layer
        called.clear()
        factors = one_term.model_copy(update={"rank": rank})
        layer = BPConv2d(32, 32, 3, padding=1, factors=factors).eval()
        layer.way = "expanded"
        with torch.no_grad():
            for batch in (1, 16):
                layer(torch.randn(batch, 32, 14, 14))
        assert called == expected
        assert layer._kept is not None
    thin = BPConv2d(16, 16, 3, factors=FactorSpec(out=(16, 1), inp=(1, 144), axes=(2, 2)))
    assert thin._most() == float("inf")  # one channel takes as long as sixteen


@pytest.mark.parametrize("kind", [BPLSTM, BPGRU, BPRNN])
def test_large_calls_of_recurrent_layers_go_on_cheap_factors(
    kind: type[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = kind(256, 256).eval()
    layer.way = "expanded"
    called: list[int] = []
    loop = kind._loop
    monkeypatch.setattr(
        kind, "_loop", lambda self, x, *rest: called.append(len(x)) or loop(self, x, *rest)
    )
    with torch.no_grad():
        for batch in (1, 64):
            layer(torch.randn(20, batch, 256))
        many = torch.nn.utils.rnn.pack_sequence([torch.randn(20, 256)] * 64)
        layer(many)
        assert called == [20 * 64] * 2
        assert layer._kept is not None
        slow = kind(32, 64, rank=4).eval()
        slow.way = "expanded"
        slow(torch.randn(20, 64, 32))
    assert len(called) == 2


def test_parametrized_factors_run_as_factors() -> None:
    layer, x = _linear(), torch.randn(3, 12)
    expected = layer(x)
    nn.utils.parametrize.register_parametrization(layer, "w1", nn.Identity())
    assert _after(layer, lambda: layer(x)) is None
    with torch.no_grad():
        assert_near(layer(x), expected)


def test_a_bias_is_read_anew_whoever_holds_it() -> None:
    conv = BPConv2d(6, 4, 3, rank=2).eval()
    conv.way = "expanded"
    layers: list[tuple[Any, Tensor]] = [
        (_linear(), torch.randn(3, 12)),
        (conv, torch.randn(2, 6, 5, 5)),
    ]
    for layer, x in layers:
        axes = (-1,) if x.dim() == 2 else (-1, 1, 1)
        with torch.no_grad():
            before = layer(x) - layer.bias.view(axes)
            kept = layer._kept
            nn.utils.parametrize.register_parametrization(layer, "bias", _Doubled())
            assert_near(layer(x), before + layer.bias.view(axes))  # it is no parameter any more
            assert layer._kept is kept
            nn.utils.parametrize.remove_parametrizations(layer, "bias")
            layer.bias = None
            assert_near(layer(x), before)


class _Doubled(nn.Module):
    def forward(self, bias: Tensor) -> Tensor:
        return 2 * bias


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_sequences_run_expanded(layout: torch.layout) -> None:
    layer = _linear()
    x = torch.nested.nested_tensor([torch.randn(3, 12), torch.randn(2, 12)], layout=layout)
    assert _after(layer, lambda: layer(x)) is not None
    with torch.no_grad():
        for one, two in zip(layer(x).unbind(), x.unbind(), strict=True):
            assert_near(one, nn.functional.linear(two, layer.weight, layer.bias))
