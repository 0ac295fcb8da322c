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
from bp_convert.layers import recurrent_stack
from bp_convert.layers.lstm import BPLSTM
from bp_convert.recurrence import path_cost
from bp_convert.recurrence.path_cost import prefers_factored
from bp_convert.recurrence.paths import GateProduct, built, one_chunk
from bp_convert.values.factors import FactorSpec
from tests.oracles import kron_sum
from tests.oracles import lstm as naive
from tests.tolerances import assert_near

JOINT = pytest.mark.parametrize("joint", [False, True], ids=["each gate", "joint"])
PATHS = pytest.mark.parametrize("path", ["factored", "fused"], indirect=True)


def _runs_in_bfloat16() -> bool:
    """Return whether torch's own LSTM runs under autocast here: not every processor has it."""
    with torch.no_grad(), torch.autocast("cpu"):
        try:
            nn.LSTM(4, 4)(torch.zeros(2, 1, 4))
        except RuntimeError:
            return False
    return True


NEEDS_BF16 = pytest.mark.skipif(
    not _runs_in_bfloat16(), reason="oneDNN has no bfloat16 LSTM on this processor"
)


@pytest.fixture
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Force one of the two ways to run."""
    _force(monkeypatch, request.param)
    return str(request.param)


def _force(monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    for module in (recurrent_stack, path_cost):
        monkeypatch.setattr(module, "prefers_factored", lambda *_: path == "factored")


def _factors(
    joint: bool, inputs: int, hidden: int, layers: int, both: bool = False, rank: int = 1
) -> dict[str, FactorSpec] | None:
    """Return factors that the four gates share, with pairs that differ by role."""
    if not joint:
        return None
    found = {}
    for layer in range(layers):
        width = hidden * (2 if both else 1) if layer else inputs
        found[f"ih_l{layer}"] = FactorSpec(out=(4, hidden), inp=(2, width // 2), rank=rank)
        found[f"hh_l{layer}"] = FactorSpec(out=(4 * hidden, 1), inp=(1, hidden), rank=rank)
    return found


def _dense(layer: BPLSTM) -> list[list[dict[str, Tensor]]]:
    """Build the weights gate by gate with the naive Kronecker sum."""
    layers = []
    for index in range(layer.num_layers):
        sides = []
        for suffix in layer.frame.sides(index):
            one: dict[str, Tensor] = {}
            for role in ("ih", "hh"):
                w1, w2 = layer.pair(role, suffix)
                one[role] = torch.cat([kron_sum(a, b) for a, b in zip(w1, w2, strict=True)])
            zero = torch.zeros(4 * layer.hidden_size, dtype=torch.float64)
            one["bias"] = layer.bias_of(suffix) if layer.bias else zero
            sides.append(one)
        layers.append(sides)
    return layers


@PATHS
@JOINT
@pytest.mark.parametrize("rank", [1, 2])
@pytest.mark.parametrize(
    ("layers", "both", "bias"), list(product((1, 2, 3), (False, True), (True, False)))
)
def test_it_is_the_naive_lstm_of_the_kronecker_sums(
    path: str, layers: int, both: bool, bias: bool, rank: int, joint: bool
) -> None:
    given = _factors(joint, 6, 4, layers, both, rank)
    layer = BPLSTM(
        6, 4, layers, bias, bidirectional=both, factors=given, rank=rank, dtype=torch.float64
    )
    x = torch.randn(5, 3, 6, dtype=torch.float64)
    assert_near(layer(x)[0], naive(x, _dense(layer), 4))


@PATHS
@JOINT
@pytest.mark.parametrize(
    ("layers", "both", "first"), list(product((1, 2), (False, True), (False, True)))
)
def test_states_and_packed_sequences_agree_with_torch(
    path: str, layers: int, both: bool, first: bool, joint: bool
) -> None:
    given = _factors(joint, 6, 4, layers, both)
    layer = BPLSTM(
        6, 4, layers, batch_first=first, bidirectional=both, factors=given, dtype=torch.float64
    )
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
@JOINT
@pytest.mark.parametrize(
    ("layers", "both", "first", "bias", "packs"),
    list(product((1, 2, 3), *4 * [(False, True)])),
)
def test_outputs_and_gradients_are_those_of_the_dense_lstm(
    path: str, layers: int, both: bool, first: bool, bias: bool, packs: bool, joint: bool
) -> None:
    factors = _factors(joint, 6, 4, layers, both, rank=2)
    layer = BPLSTM(
        6,
        4,
        layers,
        bias,
        first,
        bidirectional=both,
        factors=factors,
        rank=2,
        dtype=torch.float64,
    )
    dense = layer.to_dense()
    shape = (3, 5, 6) if first else (5, 3, 6)
    count = layers * (2 if both else 1)
    ours = [torch.randn(shape, dtype=torch.float64, requires_grad=True)]
    ours += [torch.randn(count, 3, 4, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    theirs = [one.detach().clone().requires_grad_() for one in ours]
    seen = []
    for lstm, (x, h, c) in ((layer, ours), (dense, theirs)):
        given: Any = x
        if packs:
            given = pack_padded_sequence(x, [2, 5, 4], batch_first=first, enforce_sorted=False)
        y, state = lstm(given, (h, c))
        parts = [y.data if packs else y, *state]
        sum(
            (part * torch.arange(part.numel()).view_as(part).cos()).sum() for part in parts
        ).backward()
        seen.append(parts)
    for one, two in zip(
        seen[0] + [x.grad for x in ours], seen[1] + [x.grad for x in theirs], strict=True
    ):
        assert_near(one, two)
    for suffix in layer.suffixes():
        for role in ("ih", "hh"):
            pair = [p.detach().requires_grad_() for p in layer.pair(role, suffix)]
            built(*pair).backward(getattr(dense, f"weight_{role}_{suffix}").grad)
            for one, factor in zip(layer.pair(role, suffix), pair, strict=True):
                assert_near(one.grad, factor.grad)
        if bias:
            assert_near(layer.bias_of(suffix).grad, getattr(dense, f"bias_ih_{suffix}").grad)


PAIRS_OF = {4: [(1, 4), (2, 2), (4, 1)], 6: [(1, 6), (2, 3), (3, 2), (6, 1)]}


@pytest.mark.parametrize(("out", "inp"), list(product(PAIRS_OF[4], PAIRS_OF[6])))
@pytest.mark.parametrize("rank", [1, 3])
def test_the_gates_are_four_kronecker_sums(
    out: tuple[int, int], inp: tuple[int, int], rank: int
) -> None:
    w1 = torch.randn(4, rank, out[0], inp[0], dtype=torch.float64)
    w2 = torch.randn(4, rank, inp[1], out[1], dtype=torch.float64)
    oracle = torch.cat([kron_sum(a, b) for a, b in zip(w1, w2, strict=True)])
    assert_near(built(w1, w2), oracle)
    for rows in (0, 1, 5):
        x, product = torch.randn(rows, 6, dtype=torch.float64), GateProduct(w1, w2)
        y = product(product.lay(x))
        assert_near(product.rows(y).transpose(0, 1).flatten(1), x @ oracle.t())
        assert torch.equal(product.lay_result(product.rows(y)), y)


@pytest.mark.parametrize("bias", [True, False])
def test_one_chunk_holds_the_same_weights_matrices_first(bias: bool) -> None:
    layer = BPLSTM(6, 4, 2, bias, bidirectional=True)
    weights = layer.expand()
    moved = one_chunk(weights)
    for one, two in zip(moved, weights, strict=True):
        assert torch.equal(one, two)
    assert len({one.untyped_storage().data_ptr() for one in moved}) == 1
    by_place = sorted(moved, key=lambda one: one.storage_offset())
    dims = [one.dim() for one in by_place]
    assert dims == sorted(dims, reverse=True)
    assert by_place[0].storage_offset() == 0
    assert sum(one.numel() for one in moved) == moved[0].untyped_storage().nbytes() // 4
    moved[0].sum().backward()
    assert layer.w1_ih_l0.grad is not None


@pytest.mark.parametrize(
    ("out", "inp", "own"), list(product(PAIRS_OF[4], PAIRS_OF[6], PAIRS_OF[4]))
)
def test_the_loop_takes_pairs_that_differ_on_its_sides(
    out: tuple[int, int],
    inp: tuple[int, int],
    own: tuple[int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _force(monkeypatch, "factored")
    for turned in (out, out[::-1]):
        factors = {
            "ih_l0": FactorSpec(out=out, inp=inp, rank=2),
            "hh_l0": FactorSpec(out=turned, inp=own, rank=2),
        }
        layer = BPLSTM(6, 4, factors=factors, dtype=torch.float64)
        x = torch.randn(4, 3, 6, dtype=torch.float64)
        assert_near(layer(x)[0], naive(x, _dense(layer), 4))


@PATHS
def test_single_sequences_empty_batches_and_one_step(path: str) -> None:
    layer = BPLSTM(6, 4, rank=2, dtype=torch.float64)
    dense = layer.to_dense()
    for shape in ((5, 6), (1, 2, 6), (5, 0, 6)):
        x = torch.randn(shape, dtype=torch.float64)
        state = torch.randn(2, 1, *shape[1:-1], 4, dtype=torch.float64).unbind(0)
        for given in (None, state):
            y, (h, c) = layer(x, given)
            y2, (h2, c2) = dense(x, given)
            for ours, theirs in ((y, y2), (h, h2), (c, c2)):
                assert_near(ours, theirs)


def test_inputs_that_are_not_contiguous() -> None:
    layer = BPLSTM(6, 4, rank=2)
    x = torch.randn(6, 3, 5).permute(2, 1, 0)
    assert_near(layer(x)[0], layer(x.contiguous())[0])


@PATHS
@JOINT
def test_gradients(path: str, joint: bool) -> None:
    factors = _factors(joint, 4, 4, 1, rank=2)
    layer = BPLSTM(4, 4, factors=factors, rank=2, dtype=torch.float64)
    names = [name for name, _ in layer.named_parameters()]
    x = torch.randn(3, 2, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda x, *p: torch.func.functional_call(layer, dict(zip(names, p, strict=True)), (x,))[0],
        (x, *layer.parameters()),
    )


@PATHS
@JOINT
@pytest.mark.parametrize(
    ("layers", "both", "first"), list(product((1, 2), (False, True), (False, True)))
)
def test_predicted_multiply_adds_are_the_counted_ones(
    path: str, layers: int, both: bool, first: bool, joint: bool
) -> None:
    factors = _factors(joint, 6, 4, layers, both, rank=2)
    layer = BPLSTM(
        6,
        4,
        layers,
        batch_first=first,
        bidirectional=both,
        factors=factors,
        rank=2,
        device="meta",
    ).eval()
    with FlopCounterMode(display=False) as counter:
        layer(torch.empty(5, 3, 6, device="meta"))
    assert counter.get_total_flops() == 2 * layer.predict_macs((5, 3, 6))


def test_full_rank_is_exact_and_biases_add_up() -> None:
    dense = nn.LSTM(6, 8, 2, bidirectional=True).eval()
    layer = BPLSTM.from_dense(dense, rank=10**6)
    x = torch.randn(5, 3, 6)
    assert_near(layer(x)[0], dense(x)[0])
    assert torch.equal(
        layer.bias_ih_l1_reverse, dense.bias_ih_l1_reverse + dense.bias_hh_l1_reverse
    )
    assert layer.bias_hh_l0.abs().max() == 0
    assert layer.weight_ih_l1.shape == (32, 16)
    assert not layer.training


def _kept_after(layer: BPLSTM, x: Tensor) -> Any:
    with torch.no_grad():
        assert_near(layer(x)[0], layer.to_dense()(x)[0])
    return layer._kept


def test_built_weights_are_kept_only_while_they_are_true(monkeypatch: pytest.MonkeyPatch) -> None:
    _force(monkeypatch, "fused")
    layer, x = BPLSTM(6, 4).eval(), torch.randn(5, 3, 6)
    kept = _kept_after(layer, x)
    assert kept is not None
    assert _kept_after(layer, x) is kept
    with torch.no_grad():
        layer.w1_ih_l0.mul_(2)
    assert _kept_after(layer, x) is not kept
    layer.w2_hh_l0.data.mul_(3)  # unseen by the version counter
    _kept_after(layer, x)
    layer.w2_hh_l0.data = torch.randn_like(layer.w2_hh_l0)
    _kept_after(layer, x)
    layer.load_state_dict(BPLSTM(6, 4).state_dict())
    _kept_after(layer, x)
    with torch.inference_mode():
        layer(x)
    _kept_after(layer, x)


@NEEDS_BF16
def test_kept_weights_stay_out_of_everything_else(monkeypatch: pytest.MonkeyPatch) -> None:
    _force(monkeypatch, "fused")
    layer, x = BPLSTM(6, 4).eval(), torch.randn(5, 3, 6)
    assert _kept_after(layer, x) is not None
    for twin in (copy.copy(layer), copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert twin._kept is None
        assert torch.equal(twin(x)[0], layer(x)[0])
    assert not any("kept" in name for name in layer.state_dict())
    y = layer(x)[0]  # with gradients, so built anew
    assert y.grad_fn is not None
    layer.train()
    assert layer._kept is None
    assert _kept_after(layer, x) is None
    layer.eval()
    assert _kept_after(layer, x) is not None
    assert layer.double()._kept is None
    _kept_after(layer, x.double())
    layer.float()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        layer(x)
    assert layer._kept is None
    _kept_after(layer, x)


def test_fake_tensors_leave_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    _force(monkeypatch, "fused")
    layer, x = BPLSTM(6, 4).eval(), torch.randn(5, 3, 6)
    mode = torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True)
    for _ in range(2):
        with mode, torch.no_grad():
            assert layer(mode.from_tensor(x))[0].shape == (5, 3, 4)
        _kept_after(layer, x)


def test_the_rule_picks_by_size() -> None:
    def picks(hidden: int, steps: int, batch: int, rank: int = 1) -> bool:
        layer = BPLSTM(hidden, hidden, rank=rank, device="meta")
        return prefers_factored(layer.factors, steps, batch)

    assert all(picks(1024, steps, batch) for steps in (1, 20, 200) for batch in (1, 32))
    assert not any(picks(64, steps, batch) for steps in (1, 20, 200) for batch in (1, 32))
    assert picks(512, 20, 1, rank=8)
    assert not picks(512, 20, 32, rank=8)
    assert picks(64, 20, 0)


@PATHS
def test_dropout_acts_between_layers_in_training_only(path: str) -> None:
    layer, x = BPLSTM(6, 4, 2, dropout=0.5), torch.randn(5, 3, 6)
    assert not torch.equal(layer(x)[0], layer(x)[0])
    whole = BPLSTM(6, 4, 2, dropout=1.0)
    assert torch.equal(whole(x)[0], whole(torch.randn(5, 3, 6))[0])  # layer 1 sees nothing
    single = BPLSTM(6, 4, 1, dropout=1.0)  # there is nothing between one layer
    assert_near(single(x)[0], single.to_dense().eval()(x)[0])
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
        ({"proj_size": 4}, "proj_size=4"),
        ({"num_layers": 0}, "num_layers=0"),
        ({"dropout": 1.5}, "dropout=1.5"),
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
        (
            {
                "factors": {
                    "ih_l0": FactorSpec(out=(2, 2), inp=(2, 3)),
                    "hh_l0": FactorSpec(out=(2, 2), inp=(2, 2)),
                    "hh_l0_reverse": FactorSpec(out=(2, 2), inp=(2, 2)),
                }
            },
            "hh_l0_reverse",
        ),
    ],
)
def test_bad_fields_are_refused_at_construction(options: dict[str, Any], word: str) -> None:
    with pytest.raises(FactorError, match=word):
        BPLSTM(6, 4, **options)


def test_wrong_inputs_fail_as_in_torch() -> None:
    layer, x = BPLSTM(6, 4), torch.randn(5, 3, 6)
    with pytest.raises(RuntimeError, match="must be 6"):
        layer(torch.randn(5, 3, 7))
    with pytest.raises(RuntimeError, match="must be 6"):
        layer(pack_padded_sequence(torch.randn(5, 3, 7), [5, 3, 2]))
    with pytest.raises(RuntimeError, match="at least one step"):
        layer(torch.randn(0, 3, 6))
    good, bad = torch.zeros(1, 3, 4), torch.zeros(1, 2, 4)
    packed = pack_padded_sequence(x, [5, 3, 2])
    for given in (x, packed):
        with pytest.raises(RuntimeError, match="h_0"):
            layer(given, (bad, good))
        with pytest.raises(RuntimeError, match="c_0"):
            layer(given, (good, bad))
    with pytest.raises(RuntimeError, match="h_0"):  # one sequence takes (layers, H)
        layer(x[:, 0], (good, good))
    with pytest.raises(ValueError, match="2 or 3 axes"):
        layer(torch.randn(6))


def test_dense_weights_are_there_to_read_and_not_to_set() -> None:
    layer = BPLSTM(6, 4)
    assert layer.weight_ih_l0.shape == (16, 6)
    with pytest.raises(AttributeError, match="weight_ih_l7"):
        _ = layer.weight_ih_l7
    for name in ("weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0"):
        with pytest.raises(AttributeError, match="built from factors"):
            setattr(layer, name, nn.Parameter(torch.zeros(1)))
    assert not hasattr(BPLSTM(6, 4, bias=False), "bias_ih_l0")
    assert not hasattr(layer, "weight_ih_l0_reverse")


def test_from_dense_and_back_carry_everything_and_share_nothing() -> None:
    dense = nn.LSTM(6, 4, 2, batch_first=True, dropout=0.5, bidirectional=True).double().eval()
    dense.weight_hh_l1.requires_grad_(False)
    layer = BPLSTM.from_dense(dense, rank=2)
    assert (layer.w1_hh_l1.requires_grad, layer.w2_hh_l1.requires_grad) == (False, False)
    assert layer.w1_ih_l1.requires_grad
    assert layer.bias_l1.requires_grad
    back = layer.to_dense()
    assert not back.weight_hh_l1.requires_grad
    assert back.weight_ih_l1.requires_grad
    for one in (layer, back):
        assert (one.batch_first, one.dropout, one.bidirectional) == (True, 0.5, True)
        assert not one.training
        assert {p.dtype for p in one.parameters()} == {torch.float64}
    theirs = {p.data_ptr() for p in dense.parameters()} | {p.data_ptr() for p in back.parameters()}
    assert not theirs & {p.data_ptr() for p in layer.parameters()}


def test_fit_returns_the_error_that_the_weights_show() -> None:
    dense, layer = nn.LSTM(6, 8, 2), BPLSTM(6, 8, 2, rank=2)
    weights = {n: p for n, p in dense.named_parameters() if n.startswith("weight")}
    error = layer.fit_(weights)
    gap = torch.cat([(getattr(layer, n) - p).flatten() for n, p in weights.items()]).detach().norm()
    whole = torch.cat([p.flatten() for p in weights.values()]).detach().norm()
    assert error == pytest.approx(float(gap / whole), rel=1e-4)


def test_factors_of_all_gates_together_are_the_nearest_to_the_whole_weight() -> None:
    dense = nn.LSTM(6, 8, bidirectional=True, batch_first=True).eval()
    layer = BPLSTM.from_dense(dense, factors=_factors(True, 6, 8, 1, True, rank=3))
    assert layer.w1_hh_l0.shape == (1, 3, 32, 1)
    u, s, v = torch.linalg.svd(dense.weight_hh_l0_reverse)
    assert_near(layer.weight_hh_l0_reverse, u[:, :3] * s[:3] @ v[:3])
    again = BPLSTM.from_dense(dense, factors=layer.factors)
    again.load_state_dict(layer.state_dict())
    x = torch.randn(2, 5, 6)
    assert torch.equal(again(x)[0], layer(x)[0])
    assert "gates=4x8" in repr(layer)


def test_it_tells_its_pairs_and_ranks() -> None:
    text = repr(BPLSTM(6, 12, 2, rank=9, batch_first=True))
    assert text == "BPLSTM(6, 12, num_layers=2, batch_first=True, hidden=3x4, in=2x3, rank=6+9)"


def test_state_keys_are_the_factors() -> None:
    layer = BPLSTM(6, 4, bidirectional=True)
    names = [f"{w}_{role}_l0" for role in ("ih", "hh") for w in ("w1", "w2")] + ["bias_l0"]
    assert list(layer.state_dict()) == names + [f"{name}_reverse" for name in names]
    assert layer.w1_ih_l0.shape == (4, 1, 2, 2)
    assert all(p.is_contiguous() for p in layer.parameters())


def test_the_method_that_callers_expect() -> None:
    assert BPLSTM(6, 4).flatten_parameters() is None


@NEEDS_BF16
@PATHS
@pytest.mark.parametrize("own", [torch.float32, torch.bfloat16])
def test_autocast_takes_factors_of_either_width(path: str, own: torch.dtype) -> None:
    layer = BPLSTM(6, 4, rank=2, dtype=own)
    x = torch.randn(5, 3, 6)
    with torch.autocast("cpu", torch.bfloat16):
        y, (h, c) = layer(x)
    assert {one.dtype for one in (y, h, c)} == {torch.bfloat16}
    assert_near(y.float(), layer.to_dense().float()(x)[0], torch.bfloat16)
    y.float().sum().backward()
    assert layer.w1_hh_l0.grad is not None


@pytest.mark.slow
@PATHS
@pytest.mark.parametrize("both", [False, True])
def test_export_with_a_free_batch_runs_at_another_batch(path: str, both: bool) -> None:
    layer = BPLSTM(6, 4, 2, batch_first=True, bidirectional=both).eval()
    free = {0: torch.export.Dim("batch")}
    exported = torch.export.export(layer, (torch.randn(3, 5, 6),), dynamic_shapes=(free,))
    x = torch.randn(7, 5, 6)
    for ours, theirs in zip(exported.module()(x), layer(x), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.slow
def test_export_by_the_rule_itself_takes_a_free_batch() -> None:
    free = {1: torch.export.Dim("batch")}
    for hidden in (4, 512):
        layer = BPLSTM(6, hidden).eval()
        exported = torch.export.export(layer, (torch.randn(2, 3, 6),), dynamic_shapes=(free,))
        x = torch.randn(2, 9, 6)
        torch.testing.assert_close(exported.module()(x), layer(x))


@PATHS
def test_compiling_gives_the_same_and_few_graphs(path: str) -> None:
    torch._dynamo.reset()
    graphs = 0

    def count(graph: torch.fx.GraphModule, _: object) -> object:
        nonlocal graphs
        graphs += 1
        return graph.forward

    layer = BPLSTM(6, 4, rank=2).eval()
    compiled = torch.compile(layer, backend=count)
    for batch in (2, 3, 4, 5):
        x = torch.randn(4, batch, 6)
        assert_near(compiled(x)[0], layer(x)[0])
    assert graphs <= 3


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("bidirectional", [True, False])
def test_all_weights_are_those_of_the_dense_layer(bias: bool, bidirectional: bool) -> None:
    layer = BPLSTM(6, 8, 2, bias=bias, bidirectional=bidirectional)
    found, wanted = layer.all_weights, layer.to_dense().all_weights
    assert [len(one) for one in found] == [len(one) for one in wanted]
    for some, others in zip(found, wanted, strict=True):
        for one, other in zip(some, others, strict=True):
            assert_near(one, other)
    sum(one.sum() for some in found for one in some).backward()
    assert all(one.grad is not None for one in layer.parameters())
