from __future__ import annotations

import copy
import pickle
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.flop_counter import FlopCounterMode

from bp_convert.errors import FactorError
from bp_convert.layers import lstm as module
from bp_convert.layers.lstm import BPLSTM
from bp_convert.values.factors import FactorSpec
from tests.oracles import kron_sum
from tests.oracles import lstm as naive
from tests.tolerances import assert_near

PATHS = pytest.mark.parametrize("path", ["factored", "fused"], indirect=True)


@pytest.fixture
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Force one of the two ways to run."""
    monkeypatch.setattr(module, "prefers_factored", lambda *_: request.param == "factored")
    return str(request.param)


def _dense(layer: BPLSTM) -> list[list[dict[str, Tensor]]]:
    """Build the weights gate by gate with the naive Kronecker sum."""
    layers = []
    for index in range(layer.num_layers):
        sides = []
        for suffix in layer._sides(index):
            one: dict[str, Tensor] = {}
            for role in ("ih", "hh"):
                w1, w2 = layer._pair(role, suffix)
                one[role] = torch.cat([kron_sum(a, b) for a, b in zip(w1, w2, strict=True)])
            zero = torch.zeros(4 * layer.hidden_size, dtype=torch.float64)
            one["bias"] = layer._bias(suffix) if layer.bias else zero
            sides.append(one)
        layers.append(sides)
    return layers


@PATHS
@pytest.mark.parametrize("rank", [1, 2])
@pytest.mark.parametrize(("layers", "both", "bias"), list(product((1, 2, 3), (False, True), (True, False))))
def test_it_is_the_naive_lstm_of_the_kronecker_sums(
    path: str, layers: int, both: bool, bias: bool, rank: int
) -> None:
    layer = BPLSTM(6, 4, layers, bias, bidirectional=both, rank=rank, dtype=torch.float64)
    x = torch.randn(5, 3, 6, dtype=torch.float64)
    assert_near(layer(x)[0], naive(x, _dense(layer), 4))


@PATHS
@pytest.mark.parametrize(("layers", "both", "first"), list(product((1, 2), (False, True), (False, True))))
def test_states_and_packed_sequences_agree_with_torch(
    path: str, layers: int, both: bool, first: bool
) -> None:
    layer = BPLSTM(6, 4, layers, batch_first=first, bidirectional=both, dtype=torch.float64)
    dense = layer.to_dense()
    count = layers * (2 if both else 1)
    state = tuple(torch.randn(count, 3, 4, dtype=torch.float64) for _ in range(2))
    x = torch.randn(*((3, 5, 6) if first else (5, 3, 6)), dtype=torch.float64)
    for given in (None, state):
        y, (h, c) = layer(x, given)
        y2, (h2, c2) = dense(x, given)
        for ours, theirs in ((y, y2), (h, h2), (c, c2)):
            assert_near(ours, theirs)
        packed = pack_padded_sequence(x, [2, 5, 3], batch_first=first, enforce_sorted=False)
        y, (h, c) = layer(packed, given)
        y2, (h2, c2) = dense(packed, given)
        assert_near(
            pad_packed_sequence(y, batch_first=first)[0],
            pad_packed_sequence(y2, batch_first=first)[0],
        )
        assert_near(h, h2)
        assert_near(c, c2)


@PATHS
def test_single_sequences_empty_batches_and_one_step(path: str) -> None:
    layer = BPLSTM(6, 4, rank=2, dtype=torch.float64)
    dense = layer.to_dense()
    for shape in ((5, 6), (1, 2, 6)):
        x = torch.randn(shape, dtype=torch.float64)
        assert_near(layer(x)[0], dense(x)[0])
        assert_near(layer(x)[1][1], dense(x)[1][1])
    if path == "factored":
        assert layer(torch.zeros(5, 0, 6, dtype=torch.float64))[0].shape == (5, 0, 4)


@PATHS
def test_gradients(path: str) -> None:
    layer = BPLSTM(4, 4, rank=2, dtype=torch.float64)
    names = [name for name, _ in layer.named_parameters()]
    x = torch.randn(3, 2, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda x, *p: torch.func.functional_call(layer, dict(zip(names, p, strict=True)), (x,))[0],
        (x, *layer.parameters()),
    )


@PATHS
@pytest.mark.parametrize(("layers", "both", "first"), list(product((1, 2), (False, True), (False, True))))
def test_predicted_multiply_adds_are_the_counted_ones(
    path: str, layers: int, both: bool, first: bool
) -> None:
    layer = BPLSTM(
        6, 4, layers, batch_first=first, bidirectional=both, rank=2, device="meta"
    ).eval()
    with FlopCounterMode(display=False) as counter:
        layer(torch.empty(5, 3, 6, device="meta"))
    assert counter.get_total_flops() == 2 * layer.predict_macs((5, 3, 6))


def test_full_rank_is_exact_and_biases_add_up() -> None:
    dense = nn.LSTM(6, 8, 2, bidirectional=True).eval()
    layer = BPLSTM.from_dense(dense, rank=10**6)
    x = torch.randn(5, 3, 6)
    assert_near(layer(x)[0], dense(x)[0])
    assert torch.equal(layer.bias_ih_l1_reverse, dense.bias_ih_l1_reverse + dense.bias_hh_l1_reverse)
    assert layer.bias_hh_l0.abs().max() == 0
    assert layer.weight_ih_l1.shape == (32, 16)
    assert not layer.training


def test_built_weights_are_kept_only_while_they_are_true(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "prefers_factored", lambda *_: False)
    layer, x = BPLSTM(6, 4).eval(), torch.randn(5, 3, 6)
    with torch.no_grad():
        first = layer(x)[0]
        kept = layer._kept
        assert kept is not None
        layer(x)
        assert layer._kept is kept
        layer.w1_ih_l0.mul_(2)
        assert not torch.equal(layer(x)[0], first)
        assert_near(layer(x)[0], layer.to_dense()(x)[0])
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert twin._kept is None
    assert not any("kept" in name for name in layer.state_dict())
    layer.train()(x)
    assert layer._kept is None


def test_dropout_acts_between_layers_in_training_only() -> None:
    layer, x = BPLSTM(6, 4, 2, dropout=0.5), torch.randn(5, 3, 6)
    assert not torch.equal(layer(x)[0], layer(x)[0])
    layer.eval()
    assert torch.equal(layer(x)[0], layer(x)[0])


@pytest.mark.parametrize("rank", [1, 3])
def test_a_fresh_layer_varies_like_a_fresh_dense_one(rank: int) -> None:
    layer, dense = BPLSTM(144, 100, rank=rank), nn.LSTM(144, 100)
    for name in ("weight_ih_l0", "weight_hh_l0"):
        ours, theirs = getattr(layer, name).var().item(), getattr(dense, name).var().item()
        assert ours == pytest.approx(theirs, rel=0.25)
    both = (dense.bias_ih_l0 + dense.bias_hh_l0).var().item()
    assert layer.bias_ih_l0.var().item() == pytest.approx(both, rel=0.3)


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"proj_size": 2}, "proj_size=2"),
        ({"factors": {"ih_l0": FactorSpec(out=(2, 2), inp=(2, 3))}}, "hh_l0"),
        (
            {
                "factors": {
                    "ih_l0": FactorSpec(out=(2, 2), inp=(2, 2)),
                    "hh_l0": FactorSpec(out=(2, 2), inp=(2, 2)),
                }
            },
            "pair in",
        ),
    ],
)
def test_bad_fields_are_refused_at_construction(options: dict[str, Any], word: str) -> None:
    with pytest.raises(FactorError, match=word):
        BPLSTM(6, 4, **options)


def test_wrong_inputs_fail_as_in_torch() -> None:
    layer = BPLSTM(6, 4)
    with pytest.raises(RuntimeError, match="must be 6"):
        layer(torch.randn(5, 3, 7))
    state = (torch.zeros(1, 2, 4), torch.zeros(1, 2, 4))
    with pytest.raises(RuntimeError, match="h_0"):
        layer(torch.randn(5, 3, 6), state)
    with pytest.raises(ValueError, match="2 or 3 axes"):
        layer(torch.randn(6))
    with pytest.raises(AttributeError):
        _ = layer.weight_ih_l7


def test_the_method_that_callers_expect() -> None:
    assert BPLSTM(6, 4).flatten_parameters() is None


@PATHS
@pytest.mark.parametrize("own", [torch.float32, torch.bfloat16])
def test_autocast_takes_factors_of_either_width(path: str, own: torch.dtype) -> None:
    layer = BPLSTM(6, 4, rank=2, dtype=own)
    with torch.autocast("cpu", torch.bfloat16):
        y, _ = layer(torch.randn(5, 3, 6))
    assert y.isfinite().all()
