"""GRUs, RNNs, projected LSTMs and cells, against torch's of the same weights."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.flop_counter import FlopCounterMode

from bp_convert.errors import FactorError
from bp_convert.layers import BPGRU, BPLSTM, BPRNN, BPGRUCell, BPLSTMCell, BPRNNCell
from bp_convert.layers import recurrent_stack as stack_module
from bp_convert.recurrence import path_cost
from bp_convert.recurrence.path_cost import prefers_factored
from bp_convert.values.factors import FactorSpec
from tests.tolerances import assert_near

STACKS = {
    "GRU": (BPGRU, {}),
    "RNN": (BPRNN, {}),
    "RNN relu": (BPRNN, {"nonlinearity": "relu"}),
    "LSTM projected": (BPLSTM, {"proj_size": 2}),
}
CELLS = {
    "LSTMCell": (BPLSTMCell, {}),
    "GRUCell": (BPGRUCell, {}),
    "RNNCell": (BPRNNCell, {}),
    "RNNCell relu": (BPRNNCell, {"nonlinearity": "relu"}),
}
EVERY = pytest.mark.parametrize("name", STACKS)
EVERY_CELL = pytest.mark.parametrize("name", CELLS)
PATHS = pytest.mark.parametrize("path", ["factored", "fused"], indirect=True)


@pytest.fixture
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Force one of the two ways to run."""
    for module in (stack_module, path_cost):
        monkeypatch.setattr(module, "prefers_factored", lambda *_: request.param == "factored")
    return str(request.param)


def flat(y: Any) -> list[Tensor]:
    """List the tensors of an output, of packed sequences their data."""
    if isinstance(y, nn.utils.rnn.PackedSequence):
        return [y.data]
    return [y] if isinstance(y, Tensor) else [one for part in y for one in flat(part)]


def agree(ours: Any, theirs: Any) -> None:
    for one, two in zip(flat(ours), flat(theirs), strict=True):
        assert_near(one, two)


def states(layer: Any, *sizes: int) -> Any:
    widths = (layer.proj_size or layer.hidden_size, layer.hidden_size)
    found = [torch.randn(*sizes, w, dtype=torch.float64) for w in widths]
    return tuple(found) if isinstance(layer, BPLSTM | BPLSTMCell) else found[0]


def joint(layer: Any) -> dict[str, FactorSpec]:
    """Return factors that the gates share, of full rank, with pairs that differ by role."""
    found = {}
    for role, one in layer.frame.matrices().items():
        rows = one.gates * one.outputs
        out = (rows, 1) if role.startswith("hh") else (2, rows // 2)
        found[role] = FactorSpec(out=out, inp=(1, one.inputs), rank=99)
    return found


@EVERY
@PATHS
@pytest.mark.parametrize(
    ("layers", "both", "first", "bias"),
    [(1, False, False, True), (2, True, True, True), (2, True, False, False)],
)
def test_states_and_packed_sequences_agree_with_torch(
    name: str, path: str, layers: int, both: bool, first: bool, bias: bool
) -> None:
    kind, more = STACKS[name]
    made: Any = kind.DENSE
    dense = made(6, 4, layers, bias=bias, batch_first=first, bidirectional=both, **more).double()
    count = layers * (1 + both)
    x = torch.randn(*((3, 5, 6) if first else (5, 3, 6)), dtype=torch.float64)
    packed = pack_padded_sequence(x, [2, 5, 3], batch_first=first, enforce_sorted=False)
    single = x[0] if first else x[:, 0]
    layer = kind.from_dense(dense)
    for factors in (None, joint(layer)):
        few = kind.from_dense(dense, factors=factors)
        whole = kind.from_dense(dense, factors=factors, rank=99)
        for twin, other in ((few, few.to_dense()), (whole, dense)):
            for given, sizes in ((x, (count, 3)), (packed, (count, 3)), (single, (count,))):
                for hx in (None, states(layer, *sizes)):
                    agree(twin(given, hx), other(given, hx))


@EVERY
@PATHS
def test_gradients(name: str, path: str) -> None:
    kind, more = STACKS[name]
    made: Any = kind
    layer = made(4, 4, 2, bidirectional=True, rank=2, dtype=torch.float64, **more)
    dense = layer.to_dense()
    x = torch.randn(3, 2, 4, dtype=torch.float64)
    for one in (layer, dense):
        sum(y.square().sum() for y in flat(one(x, None))).backward()  # type: ignore[union-attr]
    for suffix in layer.suffixes():
        ih, bias = getattr(dense, f"bias_ih_{suffix}").grad, layer.bias_of(suffix).grad
        assert_near(bias[: len(ih)], ih)
        if name == "GRU":
            assert_near(bias[len(ih) :], getattr(dense, f"bias_hh_{suffix}").grad[-4:])
    assert all(float(p.grad.abs().max()) > 0 for p in layer.parameters())


def test_the_inner_bias_of_a_gru_stays_inside_its_reset_gate() -> None:
    """The negative twin: added up with the other one it would compute something else."""
    dense = nn.GRU(6, 4).double()
    layer, x = BPGRU.from_dense(dense, rank=99), torch.randn(5, 3, 6, dtype=torch.float64)
    agree(layer(x), dense(x))
    assert torch.equal(layer.bias_hh_l0[-4:], dense.bias_hh_l0[-4:])
    assert not layer.bias_hh_l0[:-4].any()
    with torch.no_grad():
        layer.bias_l0[8:12] += layer.bias_l0[12:]
        layer.bias_l0[12:] = 0
    with pytest.raises(AssertionError):
        agree(layer(x), dense(x))


@EVERY
@PATHS
@pytest.mark.parametrize("both", [False, True])
def test_predicted_multiply_adds_are_the_counted_ones(name: str, path: str, both: bool) -> None:
    kind, more = STACKS[name]
    made: Any = kind
    layer = made(6, 4, 2, bidirectional=both, rank=2, device="meta", **more).eval()
    with FlopCounterMode(display=False) as counter:
        layer(torch.empty(5, 3, 6, device="meta"))
    assert counter.get_total_flops() == 2 * layer.predict_macs((5, 3, 6))


@EVERY
@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
def test_what_is_kept_for_inference_follows_the_factors(name: str) -> None:
    kind, more = STACKS[name]
    made: Any = kind
    layer, x = made(6, 4, **more).eval(), torch.randn(5, 3, 6)
    with torch.no_grad():
        layer(x)
        assert layer._kept is not None
        layer.w2_hh_l0.data.mul_(3)
        agree(layer(x), layer.to_dense()(x))
        again = pickle.loads(pickle.dumps(layer))
        agree(again(x), layer(x))
    assert layer.train()._kept is None


def test_each_mode_has_a_rule_of_its_own() -> None:
    spec = FactorSpec(out=(16, 16), inp=(16, 16), rank=1)
    factors = {"ih_l0": spec, "hh_l0": spec}
    at = {mode: prefers_factored(factors, 20, 1, mode) for mode in ("LSTM", "GRU", "RNN_TANH")}
    assert at == {"LSTM": True, "GRU": False, "RNN_TANH": False}
    wide = FactorSpec(out=(32, 32), inp=(32, 32), rank=1)
    for mode in at:
        assert prefers_factored({"ih_l0": wide, "hh_l0": wide}, 20, 8, mode)
        assert prefers_factored(factors, 20, 0, mode)


def test_dropout_acts_between_layers_in_training_only() -> None:
    x = torch.randn(5, 3, 6)
    whole = BPGRU(6, 4, 2, dropout=1.0)
    assert torch.equal(whole(x)[0], whole(torch.randn(5, 3, 6))[0])  # layer 1 sees nothing
    whole.eval()
    assert not torch.equal(whole(x)[0], whole(torch.randn(5, 3, 6))[0])


def test_from_dense_and_back_carry_everything() -> None:
    dense = nn.RNN(6, 4, 2, "relu", batch_first=True, dropout=0.5).double().eval()
    dense.weight_hh_l1.requires_grad_(False)
    layer = BPRNN.from_dense(dense, rank=2)
    assert not layer.w1_hh_l1.requires_grad
    back = layer.to_dense()
    assert type(back) is nn.RNN
    for one in (layer, back):
        assert (one.batch_first, one.dropout, one.nonlinearity) == (True, 0.5, "relu")
        assert not one.training
    assert layer.mode == dense.mode
    assert repr(layer) == (
        "BPRNN(6, 4, num_layers=2, batch_first=True, dropout=0.5, nonlinearity='relu', "
        "hidden=2x2, in=2x3, rank=2)"
    )


def test_a_fresh_gru_varies_like_a_fresh_dense_one() -> None:
    layer, dense = BPGRU(64, 400), nn.GRU(64, 400)
    for name in ("bias_ih_l0", "bias_hh_l0"):
        ours, theirs = (getattr(one, name)[-400:].var().item() for one in (layer, dense))
        assert ours == pytest.approx(theirs, rel=0.3)
    added = (dense.bias_ih_l0 + dense.bias_hh_l0)[:800].var().item()
    assert layer.bias_ih_l0[:800].var().item() == pytest.approx(added, rel=0.3)


# Cells


@EVERY_CELL
@pytest.mark.parametrize("bias", [True, False])
def test_cells_agree_with_torch(name: str, bias: bool) -> None:
    kind, more = CELLS[name]
    made: Any = kind.DENSE
    dense = made(6, 4, bias=bias, **more).double()
    x = torch.randn(3, 6, dtype=torch.float64)
    layer = kind.from_dense(dense)
    for factors in (None, joint(layer)):
        few = kind.from_dense(dense, factors=factors)
        whole = kind.from_dense(dense, factors=factors, rank=99)
        for twin, other in ((few, few.to_dense()), (whole, dense)):
            assert type(other) is kind.DENSE
            for given, sizes in ((x, (3,)), (x[0], ()), (x[:0], (0,))):
                for hx in (None, states(layer, *sizes)):
                    agree(twin(given, hx), other(given, hx))


@EVERY_CELL
def test_a_cell_is_exported_with_a_free_batch(name: str) -> None:
    kind, more = CELLS[name]
    made: Any = kind
    cell = made(6, 4, rank=2, **more).double().eval()
    free = {0: torch.export.Dim("batch")}
    hx = states(cell, 3)
    shapes = {"input": free, "hx": (free, free) if isinstance(hx, tuple) else free}
    x = torch.randn(3, 6, dtype=torch.float64)
    exported = torch.export.export(cell, (x, hx), dynamic_shapes=shapes).module()
    x, hx = torch.randn(7, 6, dtype=torch.float64), states(cell, 7)
    agree(exported(x, hx), cell(x, hx))


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda: BPGRU(6, 4, proj_size=2), "proj_size=2"),
        (lambda: BPLSTM(6, 4, proj_size=4), "proj_size=4"),
        (lambda: BPRNN(6, 4, nonlinearity="sigmoid"), "sigmoid"),
        (lambda: BPRNNCell(6, 4, nonlinearity="sigmoid"), "sigmoid"),
        (lambda: BPGRUCell(6, 4, factors={"ih": FactorSpec(out=(2, 2), inp=(2, 3))}), "'hh'"),
        (lambda: BPGRU(6, 0), "0"),
    ],
)
def test_bad_fields_are_refused_at_construction(make: Any, word: str) -> None:
    with pytest.raises((FactorError, ValueError), match=word):
        make()


def test_wrong_inputs_fail_as_in_torch() -> None:
    layer, cell = BPGRU(6, 4), BPLSTMCell(6, 4)
    with pytest.raises(RuntimeError, match=r"BPGRU: h_0 must be \(1, 3, 4\)"):
        layer(torch.randn(5, 3, 6), torch.zeros(1, 2, 4))
    with pytest.raises(RuntimeError, match="must be 6"):
        cell(torch.randn(3, 7))
    good, bad = torch.zeros(3, 4), torch.zeros(2, 4)
    with pytest.raises(RuntimeError, match="c_0"):
        cell(torch.randn(3, 6), (good, bad))
    with pytest.raises(ValueError, match="1 or 2 axes"):
        cell(torch.randn(1, 3, 6))
