"""Example inputs and calibration data of any structure that a forward takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence, pad_packed_sequence

import bp_convert
from bp_convert.errors import TraceError
from bp_convert.fakes.inputs import bounded, settle
from bp_convert.graph.example import smallest_vocabulary
from bp_convert.values.tensors import TensorSpec

FULL: dict[str, Any] = {"rank": 10**6, "convert_anyway": True, "convert_head": True}
X = torch.randn(6, 12, generator=torch.Generator().manual_seed(0))


@dataclass(kw_only=True, frozen=True)
class Given:
    x: Tensor
    scale: float = 2.0
    more: Any = None


class OfDataclass(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(12, 20), nn.Linear(20, 7)

    def forward(self, given: Given) -> Given:
        return Given(x=self.b(torch.relu(self.a(given.x * given.scale))), more=[given.x, None])


class OfPictures(OfDataclass):
    def forward(self, pictures: list[Tensor]) -> list[dict[str, Tensor]]:  # type: ignore[override]
        return [{"y": self.b(torch.relu(self.a(one.mean((0, 1))[:12])))} for one in pictures]


class OfPacked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.out = nn.LSTM(12, 9, batch_first=True), nn.Linear(9, 4)

    def forward(self, packed: PackedSequence) -> Tensor:
        return self.out(pad_packed_sequence(self.rnn(packed)[0], batch_first=True)[0])


class OfTensor(OfDataclass):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return self.b(torch.relu(self.a(x)))


PICTURES = [torch.rand(3, 5, 12), torch.rand(3, 4, 14)]
PACKED = pack_sequence([torch.randn(5, 12), torch.randn(3, 12)])
CASES = [
    (OfTensor, [X], X),
    (OfTensor, X, X),
    (OfTensor, {"x": X}, {"x": X}),
    (OfTensor, (X,), [X[:3], X[3:]]),
    (OfDataclass, Given(x=X), [Given(x=X[:3]), Given(x=X[3:])]),
    (OfDataclass, [Given(x=X)], Given(x=X)),
    (OfPictures, (PICTURES,), [PICTURES, PICTURES[::-1]]),
    (OfPacked, PACKED, [PACKED, PACKED]),
]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "inputs", "data"), CASES)
def test_values_as_inputs_and_as_data(kind: type[nn.Module], inputs: Any, data: Any) -> None:
    torch.manual_seed(0)
    model = kind().eval()
    call = inputs if type(inputs) in (tuple, list) else (inputs,)
    if isinstance(inputs, dict):
        call = tuple(inputs.values())
    for more in ({"inputs": inputs}, {"calibrate": data}, {"inputs": inputs, "calibrate": data}):
        small, report = bp_convert.convert(model, **FULL, **more)
        assert report.verification is not None
        assert report.verification.output_error is not None
        assert report.verification.output_error < 1e-3
        with torch.no_grad():
            want, got = model(*call), small(*call)
        one, two = (_first(value) for value in (want, got))
        torch.testing.assert_close(one, two, rtol=1e-3, atol=1e-4)
    plan = bp_convert.plan(model, calibrate=data, target="params=0.9")
    assert plan.layers


def _first(value: Any) -> Tensor:
    if isinstance(value, Given):
        return value.x
    return value[0]["y"] if isinstance(value, list) else value


def test_one_channel_of_a_volume_may_be_left_out() -> None:
    model = nn.Sequential(nn.Conv3d(1, 6, 3), nn.Flatten(), nn.Linear(6 * 64, 3))
    for text in ("1x6x6x6", "6x6x6"):
        plan = bp_convert.plan(model, inputs=[text])
        assert plan.inputs[0].shape == (1, 6, 6, 6)
        assert "one channel of a volume" in plan.assumed
    flat = nn.Sequential(nn.Conv2d(6, 4, 3), nn.Flatten(), nn.Linear(64, 3))
    assert bp_convert.plan(flat, inputs=["1x6x6x6"]).inputs[0].shape == (6, 6, 6)


class TwoTables(nn.Module):
    """A table for each input, a third for kinds of words."""

    def __init__(self) -> None:
        super().__init__()
        self.source, self.target, self.kind = (nn.Embedding(n, 8) for n in (50, 7, 3))
        self.out = nn.Linear(8, 5)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        kinds = self.kind(target % 3)
        return self.out(self.source(source).mean(1) + (self.target(target) + kinds).mean(1))


def test_ids_are_valid_for_the_table_that_they_reach() -> None:
    model = TwoTables()
    assert smallest_vocabulary(model) == 3
    specs = tuple(TensorSpec(name=n, dtype="int64", shape=(6,)) for n in ("source", "target"))
    assert [one.high for one in bounded(model, specs)] == [50, 7]
    plan = bp_convert.plan(model, inputs=["source=int64:1x6", "target=int64:1x6"])
    assert [one.high for one in plan.inputs] == [50, 7]


class Lengths(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(6, 8, batch_first=True)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(
            x, lengths.cpu(), batch_first=True, enforce_sorted=False
        )
        return pad_packed_sequence(self.rnn(packed)[0], batch_first=True, total_length=5)[0]


def test_lengths_are_drawn_above_zero_where_they_have_to_be() -> None:
    specs = (TensorSpec(shape=(5, 6)), TensorSpec(dtype="int64", shape=(), high=2))
    found = settle(Lengths(), specs)
    assert found.specs[1].low == 1
    assert "from 1 on" in found.words
    assert TensorSpec.parse(str(found.specs[1])) == found.specs[1]


def test_a_model_that_runs_in_no_reading_says_so_at_once() -> None:
    with pytest.raises(TraceError, match="cannot be multiplied"):
        bp_convert.plan(OfTensor(), inputs=[torch.randn(2, 11)])


class OfGraph(nn.Module):
    """Takes the features of nodes and the edges between them, and no part of them."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(12, 20), nn.Linear(20, 7)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        hidden = torch.relu(self.a(x))
        return self.b(torch.zeros_like(hidden).index_add(0, edges[1], hidden[edges[0]]))


class OfLevels(nn.Module):
    """Takes a list of as many tensors as it has layers."""

    def __init__(self) -> None:
        super().__init__()
        self.sides = nn.ModuleList(nn.Linear(12, 20) for _ in range(3))
        self.out = nn.Linear(20, 7)

    def forward(self, levels: list[Tensor]) -> Tensor:
        pairs = zip(self.sides, levels, strict=True)
        return self.out(torch.stack([side(one) for side, one in pairs]).relu().sum(0))


EDGES = torch.tensor([[0, 1, 5, 4, 3], [5, 4, 3, 2, 0]])


@pytest.mark.parametrize(
    ("kind", "inputs"),
    [
        (OfGraph, {"x": torch.randn(6, 12), "edges": EDGES}),
        (OfGraph, (torch.randn(6, 12), EDGES)),
        (OfLevels, ([torch.randn(2, 12) for _ in range(3)],)),
    ],
)
def test_inputs_of_which_no_part_is_an_example(kind: type[nn.Module], inputs: Any) -> None:
    torch.manual_seed(0)
    _, report = bp_convert.convert(kind().eval(), inputs=inputs, **FULL)
    assert report.verification is not None
    assert report.verification.output_error is not None
    assert report.verification.output_error < 1e-3
    assert report.verification.examples == 1
    assert any(layer.action == "replaced" for layer in report.layers)


def test_a_layer_of_less_precision_than_the_rest_is_judged_by_its_own() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(12, 20)
            self.body = nn.Linear(20, 20).bfloat16()
            self.out = nn.Linear(20, 7)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.body(self.head(x).bfloat16()).float())

    torch.manual_seed(0)
    _, report = bp_convert.convert(Mixed().eval(), inputs=["12"], rank=0.5, convert_anyway=True)
    assert report.verification is not None
