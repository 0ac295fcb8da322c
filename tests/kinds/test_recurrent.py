"""Models of GRUs, RNNs and cells, through the whole conversion."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import bp_convert
from bp_convert.kinds import kind_of
from bp_convert.layers import BPGRU, BPGRUCell
from tests.tolerances import assert_near

IDS = ["int64:1x6<30"]


class Seq2Seq(nn.Module):
    """A GRU reads; a cell writes, fed what it just wrote."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(30, 24)
        self.encoder = nn.GRU(24, 40, 2, batch_first=True)
        self.cell = nn.GRUCell(24, 40)
        self.head = nn.Linear(40, 30)

    def forward(self, ids: Tensor) -> Tensor:  # (N, T) -> (N, T, 30)
        _, state = self.encoder(self.words(ids))
        h, word, found = state[-1], ids[:, 0], []
        for _ in range(ids.shape[1]):
            h = self.cell(self.words(word), h)
            found.append(self.head(h))
            word = found[-1].argmax(-1)
        return torch.stack(found, 1)


class Mixed(nn.Module):
    """Every recurrent module in a row; states are given."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(6, 12)
        self.lstm = nn.LSTM(12, 10, proj_size=4, batch_first=True, bidirectional=True)
        self.rnn = nn.RNN(8, 10, nonlinearity="relu", batch_first=True)
        self.start = nn.Linear(12, 10)
        self.lstm_cell, self.rnn_cell = nn.LSTMCell(10, 8), nn.RNNCell(8, 6)
        self.head = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:  # (N, T, 6)
        x = self.stem(x)
        y, _ = self.rnn(self.lstm(x)[0], self.start(x[:, 0])[None])
        state, h = None, None
        for step in y.unbind(1):
            state = self.lstm_cell(step, state)
            h = self.rnn_cell(state[0], h)
        return self.head(h)


def seq2seq() -> Seq2Seq:
    torch.manual_seed(0)
    return Seq2Seq().eval()


@torch.no_grad()
def test_every_layer_is_replaced_and_the_same_at_full_rank() -> None:
    model, ids = seq2seq(), torch.randint(30, (5, 9))
    small, report = bp_convert.convert(model, inputs=IDS, rank=10**6, convert_anyway=True)
    kinds = {one.name: one.kind for one in report.plan.layers if one.action == "replaced"}
    assert {"encoder": "GRU", "cell": "GRUCell"}.items() <= kinds.items()
    assert isinstance(small.encoder, BPGRU)
    assert isinstance(small.cell, BPGRUCell)
    assert_near(small(ids), model(ids))
    dense = bp_convert.to_dense(small)
    assert type(dense.encoder) is nn.GRU
    assert type(dense.cell) is nn.GRUCell
    assert_near(dense(ids), small(ids))


@torch.no_grad()
def test_a_widened_model_starts_as_what_it_was() -> None:
    model = Mixed().eval()
    small, report = bp_convert.convert(model, inputs=["5x6"], alpha=2, rank=10**6)
    after = {one.name: one.after for one in report.plan.layers}
    assert after == {
        "stem": (6, 24),
        "lstm": (24, 8),
        "rnn": (16, 20),
        "start": (24, 20),
        "lstm_cell": (20, 16),
        "rnn_cell": (16, 12),
        "head": (12, 5),
    }
    assert (small.lstm.hidden_size, small.lstm.proj_size) == (20, 8)
    x = torch.randn(3, 5, 6)
    assert_near(small(x), model(x))


@torch.no_grad()
def test_a_target_on_data_is_met_and_loses_less_than_without() -> None:
    model = seq2seq()
    data = torch.randint(30, (96, 6), generator=torch.Generator().manual_seed(1))
    gaps = []
    for given in (data, None):
        small, _ = bp_convert.convert(
            model, inputs=IDS, target="params=0.5", calibrate=given, convert_anyway=True
        )
        held = sum(p.numel() for p in model.parameters())
        assert sum(p.numel() for p in small.parameters()) <= 0.5 * held
        states = [one.encoder(one.words(data))[1] for one in (small, model)]
        gaps.append(float((states[0] - states[1]).square().mean()))
    assert gaps[0] < gaps[1]


def test_small_cells_stay_dense_as_they_would_be_slower() -> None:
    plan = bp_convert.plan(seq2seq(), inputs=IDS, rank=0.5, ways="factored")
    (cell,) = [one for one in plan.layers if one.name == "cell"]
    assert cell.action == "kept"
    assert "slower" in (cell.reason or "")
    cell = bp_convert.plan(seq2seq(), inputs=IDS, rank=0.5).layer("cell")
    assert cell is not None
    assert cell.way == "expanded"


def test_what_several_roles_of_a_cell_cost_adds_up() -> None:
    cell = nn.GRUCell(24, 40)
    kind = kind_of(cell)
    assert kind is not None
    widths = kind.widths(cell)
    factors = {role: next(iter(one.specs())) for role, one in kind.choices(cell, widths).items()}
    parts = [{role: spec} for role, spec in factors.items()]
    shape = (7, 24)
    assert kind.macs(cell, widths, factors, [shape]) == sum(
        kind.macs(cell, widths, part, [shape]) for part in parts
    )
    whole = kind.operations(cell, widths, factors, shape)
    assert whole is not None
    for side in (0, 1):
        counted = [kind.operations(cell, widths, part, shape)[side] for part in parts]  # type: ignore[index]
        for name, count in whole[side].items():
            assert count == sum(one[name] for one in counted)


@pytest.mark.slow
def test_it_is_saved_and_reloaded_elsewhere(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(6, 12), nn.GRU(12, 10, batch_first=True)).eval()
    small, _ = bp_convert.convert(
        model, inputs=["5x6"], rank=0.5, convert_anyway=True, convert_head=True
    )
    bp_convert.save(small, tmp_path / "small.pt")
    code = (
        "import bp_convert, torch\n"
        "model = bp_convert.load('small.pt')\n"
        "print(float(model(torch.linspace(-1, 1, 60).view(2, 5, 6))[0].square().sum()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True
    )
    with torch.no_grad():
        y = small(torch.linspace(-1, 1, 60).view(2, 5, 6))[0]
    assert float(done.stdout) == pytest.approx(float(y.square().sum()), rel=1e-5), done.stderr


def test_a_cell_with_a_forward_of_its_own_is_not_tried_and_stays() -> None:
    class Leaky(nn.GRUCell):
        def forward(self, x: Tensor, hx: Tensor | None = None) -> Tensor:
            return super().forward(x, None if hx is None else hx / 2)

    model = seq2seq()
    model.cell = Leaky(24, 40)
    plan = bp_convert.plan(model, inputs=IDS, rank=2, convert_anyway=True)
    assert "cell" not in {one.name for one in plan.converted}
    assert next(one.reason for one in plan.others if one.name == "cell") == (
        "Leaky (an nn.GRUCell) has a forward of its own"
    )
