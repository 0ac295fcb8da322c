"""Bilinear layers as two nn.Linear each, and what quantisers and files make of them."""

from __future__ import annotations

import copy
import importlib
import io
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bp_convert
from bp_convert.errors import CheckpointError, VerificationError
from bp_convert.layers import BPConv1D, BPEmbedding, BPLinear
from bp_convert.linears import FactoredLinear, linear_clone
from bp_convert.planner.worth import READ
from bp_convert.values.factors import FactorSpec
from tests.tolerances import assert_near

PAIRS = [
    ((12, 1), (1, 8), 3),  # low rank
    ((1, 12), (8, 1), 3),
    ((6, 2), (2, 4), 3),  # w2 first
    ((2, 6), (4, 2), 5),  # w1 first
    ((3, 4), (4, 2), 1),
]


class Mixed(nn.Module):
    """A table, attention, a recurrent layer and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(60, 16)
        self.block = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.steps = nn.GRU(16, 16, batch_first=True)
        self.head = nn.Linear(16, 24)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.steps(self.block(self.table(x)))[0])


@pytest.fixture(scope="module")
def small() -> nn.Module:
    torch.manual_seed(0)
    asked: dict[str, Any] = {"convert_anyway": True, "convert_head": True}
    return bp_convert.convert(Mixed().eval(), rank=2, inputs=["int64:1x5<60"], **asked)[0]


ROWS = torch.arange(15).view(3, 5)


@pytest.mark.parametrize("kind", [BPLinear, BPConv1D])
@pytest.mark.parametrize(("out", "inp", "rank"), PAIRS)
def test_a_layer_is_two_linear_ones(kind: Any, out: Any, inp: Any, rank: int) -> None:
    layer = kind(8, 12, factors=FactorSpec(out=out, inp=inp, rank=rank)).double()
    two: Any = bp_convert.to_linears(layer)
    assert type(two.first) is type(two.last) is nn.Linear
    assert sum(p.numel() for p in two.parameters()) == sum(p.numel() for p in layer.parameters())
    assert (two.last.bias is None) is (1 not in out)
    assert_near(two.weight, layer.dense_weight())
    assert torch.equal(two.bias, layer.bias)
    for lead in ((), (5,), (2, 3), (0,), (2, 0)):
        x = torch.randn(*lead, 8, dtype=torch.float64, requires_grad=True)
        assert_near(two(x), layer(x))
        got, want = (torch.autograd.grad(one(x).square().sum(), x)[0] for one in (two, layer))
        assert_near(got, want)
    with torch.no_grad():
        two.first.weight += 1
    ones = torch.ones(8, dtype=torch.float64)
    assert (two(ones) - layer(ones)).abs().max() > 0.1


def test_a_model_keeps_its_outputs_and_says_what_stays(
    small: nn.Module, caplog: pytest.LogCaptureFixture
) -> None:
    before = {name: one.clone() for name, one in small.state_dict().items()}
    with caplog.at_level(logging.INFO, logger="bp_convert"):
        made = bp_convert.to_linears(small)
    assert caplog.messages[-1] == (
        "two nn.Linear each of 7 bilinear layers; as they were stay table (BPEmbedding), "
        "steps (BPGRU)"
    )
    assert not any(type(one) is BPLinear for one in made.modules())
    assert_near(made(ROWS), small(ROWS))
    x = torch.randn(3, 16)
    head = torch.compile(made.head, backend="aot_eager", fullgraph=True)  # type: ignore[arg-type]
    assert_near(head(x), small.head(x))  # type: ignore[operator]
    made(ROWS).sum().backward()
    linears = [one for one in made.modules() if isinstance(one, nn.Linear)]
    assert all(one.weight.grad is not None for one in linears)
    with torch.no_grad():
        for one in made.parameters():
            one.zero_()
    assert all(torch.equal(one, before[name]) for name, one in small.state_dict().items())


def test_copies_and_files(small: nn.Module, tmp_path: Path) -> None:
    made = bp_convert.to_linears(small)
    torch.save(made, file := io.BytesIO())
    file.seek(0)
    for again in (copy.deepcopy(made), torch.load(file, weights_only=False)):
        assert torch.equal(again(ROWS), made(ROWS))
    with torch.no_grad():
        made.head.last.weight.mul_(2)  # type: ignore[union-attr, operator]
    again = bp_convert.to_linears(small)
    assert not torch.equal(again(ROWS), made(ROWS))
    again.load_state_dict(made.state_dict())
    assert torch.equal(again(ROWS), made(ROWS))
    with pytest.raises(CheckpointError, match="to_linears on what bp_") as caught:
        bp_convert.save(made, tmp_path / "made.pt")
    assert caught.value.where == "saving what to_linears returned"
    assert not list(tmp_path.iterdir())


def test_what_layers_share_stays_shared() -> None:
    factors = FactorSpec(out=(2, 6), inp=(4, 2), rank=2)
    assert not FactoredLinear(8, 12, factors=factors).w2_first  # which it takes to share w2
    a, b = BPLinear(8, 12, factors=factors), BPLinear(8, 18, factors=factors.model_copy(
        update={"out": (3, 6)}
    ))  # fmt: skip
    b.w2 = a.w2
    model = nn.ModuleDict({"a": a, "b": b})
    model.register_parameter("bias", a.bias)  # type: ignore[arg-type]
    made: Any = bp_convert.to_linears(model)
    assert made["a"].first.weight is made["b"].first.weight
    assert made.bias is made["a"].bias
    assert made["a"].last.weight is not made["b"].last.weight
    x = torch.randn(4, 8)
    assert_near(made["a"](x), a(x))
    assert_near(made["b"](x), b(x))
    left: Any = linear_clone(model, ["b"])
    assert type(left["a"]) is type(left["b"]) is BPLinear
    assert left["a"].w2 is left["b"].w2


def test_a_head_that_is_tied_to_a_table_stays() -> None:
    table = BPEmbedding(12, 8, factors=FactorSpec(out=(2, 4), inp=(3, 4), rank=2))
    head = bp_convert.BPTiedLinear(8, 12, factors=FactorSpec(out=(3, 4), inp=(2, 4), rank=2))
    head.tie_(table)
    made: Any = bp_convert.to_linears(nn.Sequential(table, BPLinear(8, 8), head))
    assert [type(one) for one in made] == [BPEmbedding, FactoredLinear, type(head)]
    assert made[2].w1 is made[0].w1
    assert made[2].table == [made[0]]


class Reads(nn.Module):
    """Reads a layer's weight in the place of calling it."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(self.b(x @ self.a.weight.T).relu(), self.a.weight)


def test_layers_whose_weight_is_read_stay() -> None:
    asked: dict[str, Any] = {"convert_anyway": True, "convert_head": True}
    small, report = bp_convert.convert(Reads(), rank=0.25, inputs=["16"], **asked)
    layer = report.plan.layer("a")
    assert layer is not None
    assert READ in layer.notes
    made: Any = bp_convert.to_linears(small)
    assert (type(made.a), type(made.b)) == (BPLinear, FactoredLinear)
    assert type(linear_clone(small).a) is FactoredLinear


def test_a_model_that_asks_what_its_layers_are_is_refused(small: nn.Module) -> None:
    asking = copy.deepcopy(small)
    asking.head.register_forward_hook(lambda one, x, y: y if hasattr(one, "w1") else 2 * y)  # type: ignore[union-attr]
    with pytest.raises(VerificationError, match="the model's code reads its layers") as caught:
        bp_convert.to_linears(asking)
    assert caught.value.where == "Mixed with two nn.Linear for each bilinear layer"


def test_a_folder_of_transformers_is_refused(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=40, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=32, max_position_embeddings=16,
    )  # fmt: skip
    asked: dict[str, Any] = {"convert_anyway": True, "rank": 0.25}
    model = transformers.BertForMaskedLM(config).eval()
    small, _ = bp_convert.convert(model, inputs=["input_ids=int64:1x6<40"], **asked)
    made: Any = bp_convert.to_linears(small)
    with pytest.raises(CheckpointError, match="to_linears"):
        made.save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="to_linears"):
        made.bert.save_pretrained(tmp_path)
    small.save_pretrained(tmp_path)  # type: ignore[operator]


def _torch_ao(model: nn.Module) -> nn.Module:
    return torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)


def _torchao(name: str) -> Callable[[nn.Module], nn.Module]:
    def quantised(model: nn.Module) -> nn.Module:
        # Older ones warn, and pass over layers of up to 16 inputs.
        pytest.importorskip("torchao", "0.18", reason="needs torchao")
        home = importlib.import_module("torchao.quantization")
        home.quantize_(made := copy.deepcopy(model), getattr(home, name)())
        return made

    return quantised


QUANTISERS = {
    "torch.ao": _torch_ao,
    "weights": _torchao("Int8WeightOnlyConfig"),
    "dynamic": _torchao("Int8DynamicActivationInt8WeightConfig"),
}


@pytest.mark.filterwarnings("ignore:.*deprecated.*:UserWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("name", QUANTISERS)
def test_quantisers_find_the_inner_layers(small: nn.Module, name: str) -> None:
    linears = bp_convert.to_linears(small)
    made = QUANTISERS[name](linears)
    inner = [one for one in linears.modules() if type(one) is nn.Linear]
    assert len(inner) == 14
    left = [one for one in made.modules() if type(one) is nn.Linear]
    assert nn.Parameter not in {type(one.weight) for one in left}
    with torch.no_grad():
        gap = float((made(ROWS) - small(ROWS)).norm() / small(ROWS).norm())
        assert 0 < gap < 0.02
        head: Any = made.head
        assert_near(head.weight, _read(head), torch.bfloat16)
        assert 0 < (head.weight - small.head.weight).abs().max() < 0.01  # type: ignore[union-attr, operator]
        # Of the converted model they find nothing: what this is all about.
        assert torch.equal(QUANTISERS[name](small)(ROWS), small(ROWS))


def _read(layer: nn.Module) -> Tensor:
    """Return a layer's matrix (K, D), by what it makes of unit vectors."""
    zero = layer(torch.zeros(1, 16))
    return (layer(torch.eye(16)) - zero).T
