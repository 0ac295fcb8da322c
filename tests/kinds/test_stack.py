"""Experts that a class holds as one parameter (E, K, D): what the contract suite asks of layers,
asked of a module that poses as that parameter; and models of such classes converted."""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import bp_convert
from bp_convert.experts import BPStack
from bp_convert.experts.stack import Stack
from bp_convert.kinds import Ask, Kind, Spread, kind_of
from bp_convert.values.factors import FactorSpec
from tests.tolerances import assert_near

SPECS = [
    FactorSpec(out=(12, 1), inp=(1, 6), rank=2),  # low rank
    FactorSpec(out=(4, 3), inp=(2, 3), rank=1),
    FactorSpec(out=(2, 6), inp=(3, 2), rank=4),
    FactorSpec(out=(1, 12), inp=(6, 1), rank=3),
]
EVERY = pytest.mark.parametrize("spec", SPECS, ids=str)


def stack(spec: FactorSpec = SPECS[2]) -> Any:
    torch.manual_seed(0)
    return BPStack(6, 12, 5, factors=spec, dtype=torch.float64)


def kind() -> Kind:
    found = kind_of(Stack(6, 12, 5))
    assert found is not None
    return found


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


# What poses as a tensor


@EVERY
def test_products_are_those_of_the_tensor_and_build_nothing(
    spec: FactorSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    w, several, one = stack(spec), torch.tensor([3, 0, 3]), torch.tensor(2)
    dense = w.weight.detach()
    monkeypatch.setattr(BPStack, "matrices", lambda *_: pytest.fail("the matrices were built"))
    x, y = draw(4, 6), draw(4, 12)
    assert_near(F.linear(x, w[1]), F.linear(x, dense[1]))
    assert_near(F.linear(x, w[one], y[0]), F.linear(x, dense[2], y[0]))
    assert_near(y @ w[1], y @ dense[1])
    assert_near(torch.matmul(draw(0, 12), w[-1]), draw(0, 6))
    assert_near(x @ w[1].T, x @ dense[1].T)
    assert_near(torch.mm(x, w[0].t()), x @ dense[0].T)
    assert_near(w[1] @ x.T, dense[1] @ x.T)
    assert_near(x[0] @ w.mT[4], x[0] @ dense[4].T)
    x, y = draw(3, 4, 6), draw(3, 4, 12)
    assert_near(torch.bmm(y, w[several]), y @ dense[several])
    assert_near(torch.bmm(w[several], x.mT), dense[several] @ x.mT)
    assert_near(x @ w[several].transpose(1, 2), x @ dense[several].mT)
    every = draw(5, 2, 12)
    assert_near(torch.bmm(every, w), every @ dense)
    assert_near(x @ w[1].mT, x @ dense[1].T)


@pytest.mark.skipif(not hasattr(torch, "_grouped_mm"), reason="this torch has none")
def test_grouped_products_go_group_by_group() -> None:
    w, x = stack(), draw(9, 6)
    ends = torch.tensor([2, 2, 5, 8, 9], dtype=torch.int32)
    found = torch._grouped_mm(x, w.transpose(-2, -1), offs=ends)
    which = torch.tensor([0, 0, 2, 2, 2, 3, 3, 3, 4])
    assert_near(found, (x[:, None] @ w.weight[which].mT)[:, 0])
    y = draw(9, 12)
    assert_near(torch._grouped_mm(y, w, offs=ends), (y[:, None] @ w.weight[which])[:, 0])


def test_all_else_is_done_to_the_tensor() -> None:
    w = stack()
    dense = w.weight.detach()
    x = draw(4, 6)
    assert_near(torch.einsum("nd,ekd->enk", x, w), torch.einsum("nd,ekd->enk", x, dense))
    assert_near(w[:2], dense[:2])
    assert_near(w[torch.tensor([True, False, True, False, False])], dense[[0, 2]])
    assert_near(w[1][3], dense[1][3])
    assert_near(w[torch.tensor([[0, 1]])], dense[torch.tensor([[0, 1]])])
    assert_near(2 * w[1] + dense[0] - 1, 2 * dense[1] + dense[0] - 1)
    assert_near(torch.stack([w[0], w[1]]), dense[:2])
    assert_near(w[1].chunk(2)[1], dense[1].chunk(2)[1])
    assert_near(w.sum(0), dense.sum(0))
    assert_near(w.permute(2, 0, 1), dense.permute(2, 0, 1))
    assert (w.shape, w.ndim, w.dim(), w.size(1), len(w)) == (dense.shape, 3, 3, 12, 5)
    assert (w[1].shape, w[1].T.shape, w.dtype, w[1].device.type) == (
        *((12, 6), (6, 12), torch.float64, "cpu"),
    )
    assert [one.shape for one in w] == [(12, 6)] * 5
    assert not hasattr(w, "_grad_fn")
    with pytest.raises(AttributeError, match="no_such"):
        w.no_such()


@EVERY
def test_counts_are_the_counted_ones(spec: FactorSpec) -> None:
    dense, one = Stack(6, 12, 5, dtype=torch.float64), kind()
    factors = {"weight": spec}
    twin = one.build(dense, (6, 12), factors, "cpu")
    error = one.fill(dense, twin, Spread())
    gap = twin.to_dense().weight - dense.weight  # type: ignore[operator]
    share = gap.detach().norm() / dense.weight.detach().norm()
    assert error == pytest.approx(float(share), rel=1e-6)
    assert 0 < error < 1
    assert one.params(dense, (6, 12), factors) == sum(p.numel() for p in twin.parameters())
    assert one.params(dense, (6, 12)) == dense.weight.numel()
    for x in (draw(7, 6), draw(5, 3, 6)):
        with FlopCounterMode(display=False) as counter:
            twin(x, 1 if x.dim() == 2 else None)
        assert counter.get_total_flops() == 2 * one.macs(dense, (6, 12), factors, [tuple(x.shape)])
    with FlopCounterMode(display=False) as counter:
        twin(draw(7, 12), 1, back=True)
    assert counter.get_total_flops() == 2 * one.macs(dense, (6, 12), factors, [(7, 12)])


def test_full_rank_is_exact_and_each_matrix_is_its_own() -> None:
    dense, one = Stack(6, 12, 5, dtype=torch.float64), kind()
    factors = one.factor(dense, (6, 12), Ask(rank=10**6))
    twin: Any = one.build(dense, (6, 12), factors, "cpu")
    assert one.fill(dense, twin, Spread()) < 1e-9
    assert_near(twin.weight, dense.weight)
    for number, matrix in enumerate(one.matrices(dense, Spread())["weight"]):
        assert_near(matrix, dense.weight[number])
    one.place(twin, "weight", 3, torch.zeros_like(twin.w1[3]), twin.w2[3])
    assert not twin.weight[3].any()
    assert_near(twin.weight[4], dense.weight[4])


def test_state_copies_pickles_and_gradients() -> None:
    w, x = stack(), draw(4, 6)
    expected = F.linear(x, w[1])
    buffer = io.BytesIO()
    torch.save(w.state_dict(), buffer)
    buffer.seek(0)
    other = BPStack(6, 12, 5, factors=SPECS[2], dtype=torch.float64)
    other.load_state_dict(torch.load(buffer, weights_only=True))
    for same in (other, copy.deepcopy(w), pickle.loads(pickle.dumps(w))):
        assert torch.equal(F.linear(x, same[1]), expected)
    expected.square().sum().backward()
    assert w.w1.grad[1].any()
    assert not w.w1.grad[[0, 2, 3, 4]].any()
    assert w.half().dtype == torch.float16


# Models


class Experts(nn.Module):
    """Experts as most libraries hold them; ``how`` says how they are used."""

    def __init__(self, how: str, many: int = 4) -> None:
        super().__init__()
        self.how = how
        self.up = nn.Parameter(torch.randn(many, 48, 16) / 4)
        self.up_bias = nn.Parameter(torch.randn(many, 48) / 4)
        self.down = nn.Parameter(torch.randn(many, 48, 16) / 7)  # (E, D, K), as GPT-OSS has it

    def forward(self, x: Tensor, weight: Tensor, which: Tensor) -> Tensor:
        if self.how == "einsum":
            y = torch.einsum("nd,ekd->nek", x, self.up)[torch.arange(len(x)), which]
            return torch.einsum("nk,nkd->nd", y.relu(), self.down[which])
        if self.how == "typed" and not isinstance(self.up, Tensor):
            raise TypeError("up has to be a tensor")
        out = torch.zeros_like(x)
        for number in which.unique():
            rows = (which == number).nonzero()[:, 0]
            y = F.linear(x[rows], self.up[number], self.up_bias[number]).relu()
            out = out.index_add(0, rows, (y @ self.down[number]) * weight[rows, None])
        return out


class Model(nn.Module):
    def __init__(self, how: str = "loop") -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.router = nn.Linear(16, 4)
        self.experts = Experts(how)
        self.place = nn.Parameter(torch.randn(1, 6, 16))
        self.last = nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x) + self.place
        flat = x.flatten(0, 1)
        weight, which = self.router(flat).softmax(-1).max(-1)
        return self.last(x + self.experts(flat, weight, which).view_as(x))


def model(how: str = "loop") -> Model:
    torch.manual_seed(1)
    return Model(how).eval()


def rows_of(report: Any) -> dict[str, Any]:
    return {one.name: one for one in report.plan.layers if one.kind == "Stack"}


def test_the_class_goes_on_as_before_and_the_source_is_untouched() -> None:
    source, x = model(), torch.randn(5, 6, 16)
    before = {name: one.clone() for name, one in source.state_dict().items()}
    small, report = bp_convert.convert(source, inputs=["6x16"], rank=10**6, convert_anyway=True)
    assert isinstance(small.experts.up, BPStack)
    assert type(small.experts) is Experts
    assert_near(small(x), source(x))
    assert all(torch.equal(one, before[name]) for name, one in source.state_dict().items())
    rows = rows_of(report)
    assert list(rows) == ["experts.up", "experts.down"]
    assert {one.action for one in rows.values()} == {"replaced"}
    assert rows["experts.up"].macs[0] == 6 * 16 * 48  # of one expert for each of six tokens
    others = {one.name: one.reason for one in report.plan.others}
    assert others["experts"] == "bare parameter up_bias of class Experts"
    assert "place" in others[""]


def test_a_share_is_counted_saved_reloaded_and_turned_back(tmp_path: Path) -> None:
    source, x = model(), torch.randn(5, 6, 16)
    small, report = bp_convert.convert(
        source, inputs=["6x16"], rank=0.25, convert_anyway=True, include=["experts.*"]
    )
    own = small.experts.up
    assert report.plan.params.after == sum(one.numel() for one in small.parameters())
    assert sum(one.numel() for one in own.parameters()) <= source.experts.up.numel() / 4
    assert [row.params[1] for row in rows_of(report).values()] == [
        sum(one.numel() for one in stack.parameters()) for stack in (own, small.experts.down)
    ]
    bp_convert.save(small, tmp_path / "small.safetensors", arch=f"{__name__}:Model")
    again = bp_convert.load(tmp_path / "small.safetensors", trust=["tests"])
    assert torch.equal(again.eval()(x), small(x))
    dense = bp_convert.to_dense(small)
    assert type(dense.experts.up) is nn.Parameter
    assert dense.state_dict().keys() == source.state_dict().keys()
    assert_near(dense(x), small(x))


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("einsum", "Experts does more than multiply by its matrices"),
        ("typed", "Experts does not run with a module in its place: TypeError: up has to be"),
    ],
)
def test_where_it_does_not_work_the_reason_says_so(how: str, words: str) -> None:
    plan = bp_convert.plan(model(how), inputs=["6x16"], rank=0.25)
    kept = {one.name: one for one in plan.layers if one.kind == "Stack"}
    assert len(kept) == 2
    for one in kept.values():
        assert one.action == "kept"
        assert one.reason.startswith(words)
    assert any(one.macs[0] for one in plan.layers), "the other layers are still looked at"


def test_what_is_built_at_each_use_converts_on_request_alone() -> None:
    source, x = model("einsum"), torch.randn(5, 6, 16)
    small, _ = bp_convert.convert(source, inputs=["6x16"], rank=10**6, convert_anyway=True)
    assert isinstance(small.experts.up, BPStack)
    assert_near(small(x), source(x))


def test_unproven_and_widened_stacks_stay() -> None:
    class Scaled(Model):
        def forward(self, x: Tensor, scale: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(x) * scale

    for source, more, words in (
        (model(), {"inputs": ["6x16"], "alpha": 2.0}, "alpha does not widen"),
        (Scaled(), {}, "the model was not run"),
    ):
        plan = bp_convert.plan(source, **more)
        kept = [one for one in plan.layers if one.kind == "Stack"]
        assert all(one.reason.startswith(words) for one in kept), [one.reason for one in kept]
        assert len(kept) == 2


def test_what_is_no_stack_is_not_taken() -> None:
    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Parameter(torch.randn(1, 6, 16))  # places
            self.deep = nn.Parameter(torch.randn(2, 3, 4, 5))
            self.bilinear = nn.Bilinear(3, 4, 5)
            self.several = nn.ParameterList([torch.randn(2, 3, 4)])

    from bp_convert.graph.walk import walk

    assert not [one for one in walk(Holder()) if one.kind.bare]
    tied = model()
    tied.other = Experts("loop")
    tied.other.up = tied.experts.up
    plan = bp_convert.plan(tied, inputs=["6x16"], rank=0.25)
    reason = next(one.reason for one in plan.layers if one.name == "experts.up")
    assert reason == "its weight is tied to other.up"


def test_a_target_is_spent_on_experts_too_with_data_or_without() -> None:
    x = torch.randn(64, 6, 16)
    for more in ({}, {"calibrate": x}):
        small, report = bp_convert.convert(
            model(), inputs=["6x16"], target="params=0.4", convert_anyway=True, **more
        )
        assert isinstance(small.experts.up, BPStack)
        assert report.plan.params.after <= 0.4 * report.plan.params.before
        notes = " ".join(rows_of(report)["experts.up"].notes)
        assert ("which rows each of its matrices gets is not looked at" in notes) == bool(more)


# transformers


def moe(name: str, how: str) -> Any:
    transformers = pytest.importorskip("transformers")
    sizes = {
        **{"vocab_size": 90, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32},
        **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "num_experts_per_tok": 2},
    }
    more = {
        "Mixtral": {"num_local_experts": 4},
        "Qwen3Moe": {"num_experts": 4, "moe_intermediate_size": 16, "head_dim": 8},
        "GptOss": {"num_local_experts": 4, "head_dim": 8, "sliding_window": 4},
    }[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**sizes, **more)
    made = getattr(transformers, f"{name}ForCausalLM")(config)
    for one in made.modules():
        if hasattr(one, "config"):
            one.config._experts_implementation = how
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.dim() == 3:
                parameter.normal_(0, 0.1)
    return made.eval()


IDS = ["input_ids=int64:1x8<90"]


def tokens(model: Any) -> list[int]:
    found = model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=6, do_sample=False)
    return list(found[0].tolist())


@pytest.mark.parametrize(
    ("name", "how"),
    [("Mixtral", "eager"), ("GptOss", "batched_mm"), ("Qwen3Moe", "grouped_mm")],
)
def test_mixtures_of_experts_generate_the_same_at_full_rank(name: str, how: str) -> None:
    source = moe(name, how)
    small, report = bp_convert.convert(
        source, inputs=IDS, rank=10**6, convert_anyway=True, include=["*.experts.*"]
    )
    rows = rows_of(report)
    assert len(rows) == 4
    assert all(one.action == "replaced" for one in rows.values())
    ids = torch.tensor([[5, 6, 7, 8], [1, 2, 3, 4]])
    with torch.no_grad():
        assert_near(small(ids).logits, source(ids).logits)
    assert tokens(small) == tokens(source)


def test_folders_that_hold_experts_one_by_one_are_read(tmp_path: Path) -> None:
    source = moe("Mixtral", "eager")
    source.save_pretrained(tmp_path)
    held = bp_convert.open_model(tmp_path).model.state_dict()
    assert held.keys() == source.state_dict().keys()
    assert all(torch.equal(one, held[name]) for name, one in source.state_dict().items())


def test_an_input_is_guessed_for_grouped_experts() -> None:
    plan = bp_convert.plan(moe("Mixtral", "grouped_mm"), rank=0.25, convert_anyway=True)
    assert [str(one) for one in plan.inputs] == ["input_ids=int64:1x8<90"]
    assert {one.action for one in plan.layers if one.kind == "Stack"} == {"replaced"}


@pytest.mark.slow
def test_they_are_saved_and_reloaded_elsewhere(tmp_path: Path) -> None:
    small, _ = bp_convert.convert(
        moe("Mixtral", "eager"), inputs=IDS, rank=0.25, convert_anyway=True
    )
    bp_convert.save(small, tmp_path / "small.pt")
    code = (
        "import bp_convert, torch, sys; torch.set_num_threads(1)\n"
        "model = bp_convert.load('small.pt', trust=['transformers'])\n"
        "ids = torch.tensor([[5, 6, 7]])\n"
        "print(model.generate(ids, max_new_tokens=6, do_sample=False)[0].tolist())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.stdout.strip() == str(tokens(small)), done.stderr
