"""Blocks are found by structure, run alone where they can, and tuned to the source's outputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bp_convert
from bp_convert.calibration.ahead import Ahead
from bp_convert.data import from_tensors
from bp_convert.errors import PlanError
from bp_convert.graph.clone import clone
from bp_convert.reconstruction import bench as benches
from bp_convert.reconstruction import blockwise, reconstruct
from bp_convert.reconstruction.bench import Bench
from bp_convert.reconstruction.block_finding import blocks_of
from bp_convert.reconstruction.call_order import segments_of
from bp_convert.reconstruction.dividing import divided
from bp_convert.reconstruction.resuming import Done
from bp_convert.reconstruction.shelf import Shelf
from bp_convert.surgery import apply_plan
from bp_convert.values.report import Report

N, T, D = 96, 6, 12


@dataclass
class Made:
    """What a block of the encoder returns."""

    hidden: Tensor
    scale: Tensor


class Block(nn.Module):
    """Mixes tokens and features; takes a mask by keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.up, self.down = nn.Linear(D, D), nn.Linear(D, 3 * D), nn.Linear(3 * D, D)
        self.norm = nn.LayerNorm(D)

    def forward(self, x: Tensor, *, bias: Tensor, step: int = 0) -> Made:
        seen = (self.mix(x) @ x.transpose(1, 2) + bias).softmax(-1) @ x
        made = self.norm(x + self.down(F.gelu(self.up(seen))))
        return Made(made, made.detach().abs().mean())


class Encoder(nn.Module):
    """Words through a table, blocks and a head; padding is masked."""

    def __init__(self, block: Callable[[], nn.Module] = Block, count: int = 3) -> None:
        super().__init__()
        self.words = nn.Embedding(40, D)
        self.blocks = nn.ModuleList(block() for _ in range(count))
        self.head = nn.Linear(D, 5)

    def forward(self, ids: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
        x = self.words(ids)
        bias = (1 - attention_mask[:, None].float()) * -1e9
        for step, block in enumerate(self.blocks):
            x = block(x, bias=bias, step=step).hidden
        return {"scores": self.head(x)}


def tokens(count: int = N) -> dict[str, Tensor]:
    ids = torch.randint(0, 40, (count, T), generator=torch.Generator().manual_seed(1))
    return {"ids": ids, "attention_mask": (torch.arange(T) < 1 + ids[:, :1] % T).long()}


def converted(model: nn.Module, data: object, **how: object) -> tuple[nn.Module, Report]:
    asked = {"target": "params=0.5", "exclude": ["Embedding"], "convert_anyway": True}
    asked |= {"sides": "inputs", **how}
    return bp_convert.convert(model.eval(), calibrate=data, **asked)


def test_blocks_are_the_children_of_the_outermost_rows_of_one_class() -> None:
    stage = nn.Sequential(*(nn.Sequential(nn.Conv2d(3, 3, 1), nn.ReLU()) for _ in range(2)))
    deep = nn.Sequential(nn.Conv2d(1, 3, 1), nn.Sequential(stage, nn.Sequential(nn.ReLU(), stage)))
    assert blocks_of(Encoder()) == ("blocks.0", "blocks.1", "blocks.2")
    assert blocks_of(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))) == ()
    assert blocks_of(deep) == ("1.0.0", "1.0.1", "1.1.1.0", "1.1.1.1")
    layer = nn.TransformerEncoderLayer(8, 2)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    assert blocks_of(encoder) == ("layers.0", "layers.1")


def test_experts_inside_a_block_are_no_blocks_but_those_of_a_stage_are() -> None:
    def mlp() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 4), nn.ReLU())

    class Routed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mlp = nn.ModuleDict({"experts": nn.ModuleList(mlp() for _ in range(3))})
            self.norm = nn.LayerNorm(4)

    class Stage(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(mlp() for _ in range(2))
            self.norm = nn.LayerNorm(4)

    assert blocks_of(nn.ModuleList([Routed(), Routed()])) == ("0", "1")
    assert blocks_of(nn.ModuleList([Stage(), Stage()])) == tuple(
        f"{stage}.blocks.{block}" for stage in (0, 1) for block in (0, 1)
    )


def test_a_block_can_be_named_and_a_wrong_name_is_an_error() -> None:
    assert blocks_of(Encoder(), ["blocks.1"]) == ("blocks.1",)
    with pytest.raises(PlanError, match=r"near names: blocks.1"):
        converted(Encoder(), tokens(), reconstruct={"blocks": "block.1"})


def test_blocks_and_what_stands_behind_them_come_nearer_to_the_source() -> None:
    model, data = Encoder(), tokens(256)
    start = {name: one.clone() for name, one in model.state_dict().items()}
    plain, before = converted(model, data, reconstruct="off")
    small, report = converted(model, data, reconstruct={"epochs": 12})
    assert before.reconstruction is None
    found = report.reconstruction
    assert found is not None
    assert [one.name for one in found.blocks] == ["blocks.0", "blocks.1", "blocks.2", "head"]
    assert all(one.kept and one.seconds for one in found.blocks)
    assert (found.learnt, found.held) == (224, 32)
    assert found.before is not None
    assert found.after is not None
    assert found.after < 0.9 * found.before
    fresh = tokens(400)
    mask = fresh["attention_mask"].bool()

    @torch.no_grad()
    def error(one: nn.Module) -> float:
        want, got = (m.eval()(**fresh)["scores"][mask] for m in (model, one))
        return float((want - got).norm() / want.norm())

    assert error(small) < 0.95 * error(plain)  # on examples of which most were not seen
    assert all(torch.equal(one, start[name]) for name, one in model.state_dict().items())
    assert torch.equal(small.get_parameter("words.weight"), model.words.weight)
    assert [p.requires_grad for p in small.parameters()] == [True] * len([*small.parameters()])
    assert all(p.grad is None for p in small.parameters())
    assert report.plan.notes[-1].startswith("blocks.0 and 2 more blocks: tuned to")
    assert "4 of 4 tuned to the source's outputs on 224 examples" in str(report)


def parts(model: nn.Module, data: dict[str, Tensor]) -> tuple[nn.Module, list[object]]:
    small, _ = converted(model, data, reconstruct="off")
    batches, _ = divided([((), data)], 16)
    return clone(small).eval(), [batches, segments_of(small, blocks_of(small), batches[0])]


def test_a_block_runs_alone_with_what_it_is_given_by_keyword() -> None:
    model = Encoder()
    small, (batches, segments) = parts(model, tokens())
    for segment in segments[1:-1]:
        block = small.get_submodule(segment.modules[0])
        bench = Bench(model, small, segment, [*block.parameters()], batches)
        assert bench.alone
        assert bench.places == [0]  # the other output follows no weight
        alone = bench.error([0])
        bench.alone = False  # with all that is before it
        assert bench.error([0]) == pytest.approx(alone, rel=1e-5)
        bench.close()


class Noisy(Block):
    def forward(self, x: Tensor, *, bias: Tensor, step: int = 0) -> Made:
        return super().forward(x + Noisy.count(x), bias=bias)

    calls = 0

    @classmethod
    def count(cls, x: Tensor) -> Tensor:
        cls.calls += 1
        return x.new_tensor(float(cls.calls % 7))


class Detached(Block):
    def forward(self, x: Tensor, *, bias: Tensor, step: int = 0) -> Made:
        made = super().forward(x, bias=bias)
        return Made(made.hidden.detach(), made.scale)


class Remembering(Block):
    """Gives something else where it is not called in its model."""

    def forward(self, x: Tensor, *, bias: Tensor, step: int = 0) -> Made:
        made = super().forward(x + self.__dict__.get("seen", 0), bias=bias)
        self.__dict__["seen"] = 1
        return made


def hooked(model: Encoder) -> Encoder:
    """Let a model tell its blocks that a pass begins."""

    def begin(whole: nn.Module, *_: object) -> None:
        for block in whole.blocks:
            block.__dict__["seen"] = 0

    model.register_forward_pre_hook(begin, with_kwargs=True)
    return model


@pytest.mark.parametrize(
    ("block", "reason"),
    [(Noisy, "something else each time"), (Detached, "follows its weights")],
)
def test_what_cannot_be_tuned_is_left_with_a_reason(block: type[nn.Module], reason: str) -> None:
    _, report = converted(Encoder(block, 2), tokens(), reconstruct={"epochs": 1})
    assert report.reconstruction is not None
    for one in report.reconstruction.blocks[:2]:
        assert not one.kept
        assert reason in one.reason
    assert reason in str(report)


def test_a_model_without_numbers_to_judge_it_by_stays_as_it_was() -> None:
    class Choosing(Encoder):
        def forward(self, ids: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
            return {"best": super().forward(ids, attention_mask)["scores"].argmax(-1)}

    model, data = Choosing(count=2), tokens(200)
    plan = bp_convert.plan(model, rank=0.5, convert_anyway=True, reconstruct={"epochs": 4})
    small = apply_plan(model, plan).model
    before = [one.clone() for one in small.parameters()]
    found = reconstruct(model, small, plan, [((), data)])
    assert found is not None
    assert "no floating-point numbers to judge it by" in found.reason
    assert "follows its weights" in found.blocks[-1].reason
    assert all(map(torch.equal, before, small.parameters()))


def test_a_block_that_cannot_run_alone_runs_in_its_model() -> None:
    model = hooked(Encoder(Remembering, 2))
    small, (batches, segments) = parts(model, tokens())
    block = small.get_submodule("blocks.1")
    bench = Bench(model, small, segments[2], [*block.parameters()], batches)
    assert not bench.alone
    assert bench.error([0]) > 0


def test_a_layer_that_is_called_twice_is_tuned_to_the_models_output() -> None:
    class Twice(Encoder):
        def forward(self, ids: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
            x = self.words(ids)
            bias = (1 - attention_mask[:, None].float()) * -1e9
            for block in (*self.blocks, self.blocks[0]):
                x = block(x, bias=bias).hidden
            return {"scores": self.head(x)}

    model = Twice(count=2)
    assert segments_of(model, blocks_of(model), ((), tokens(4))) == []  # nothing is converted
    _, (_, segments) = parts(model, tokens())
    assert [one.modules for one in segments if one.block] == [("blocks.1",)]
    _, report = converted(model, tokens(), reconstruct={"epochs": 2})
    assert report.reconstruction is not None
    assert report.reconstruction.after is not None
    assert report.reconstruction.after < report.reconstruction.before


def test_large_inputs_go_to_disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    one, two = {"x": [torch.ones(3)], "n": 1}, {"x": [torch.zeros(3)], "n": 2}
    shelf = Shelf(2, limit=20)
    for value in (one, two):
        shelf.put(value)
    assert shelf.folder is not None
    assert torch.equal(shelf[0]["x"][0], torch.ones(3))
    assert shelf[1]["n"] == 2
    shelf.close()
    small = {}
    for limit in (0.5, 1e-12):
        monkeypatch.setattr("bp_convert.reconstruction.shelf.SHARE", limit)
        monkeypatch.setenv("BP_CONVERT_CACHE", str(tmp_path / str(limit)))  # nothing is resumed
        torch.manual_seed(0)
        small[limit], report = converted(Encoder(), tokens(), reconstruct={"epochs": 1})
        assert report.reconstruction is not None
        assert report.reconstruction.resumed == 0
    for a, b in zip(*(one.parameters() for one in small.values()), strict=True):
        assert torch.equal(a, b)
    assert benches.Shelf is Shelf


def test_a_share_is_of_what_a_container_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("reconstruction.shelf", "calibration.work"):
        monkeypatch.setattr(f"bp_convert.{module}.free_memory", lambda: 1000)
    assert Shelf(2).limit == 100
    assert Ahead(nn.Linear(2, 2), [], {}, []).limit == 100


def test_another_activation_on_the_same_weights_is_another_model() -> None:
    class Addressed(nn.Linear):
        def extra_repr(self) -> str:
            return object.__repr__(self)

    def key(*layers: nn.Module) -> str:
        model = nn.Sequential(line, *layers)
        return Done(model, model, "words").key

    line = nn.Linear(3, 3)
    assert key(nn.ReLU()) == key(nn.ReLU())
    assert key(nn.ReLU()) != key(nn.Tanh())
    one, two = Addressed(3, 3), Addressed(3, 3)
    two.load_state_dict(one.state_dict())
    assert repr(one) != repr(two)
    assert key(one) == key(two)


def test_examples_are_divided_with_the_last_to_judge() -> None:
    x = torch.arange(70)
    batches, judging = divided([((x[:50],), {"n": 3}), ((x[50:],), {"n": 3})], 25)
    assert torch.equal(torch.cat([args[0] for args, _ in batches]), x)
    assert sum(len(args[0]) for args, _ in batches[-judging:]) == 25
    assert all(kwargs == {"n": 3} for _, kwargs in batches)
    whole = nn.utils.rnn.pack_sequence([torch.ones(2, 3), torch.ones(1, 3)])
    assert divided([((whole,), {})], 1) == ([], 0)


@pytest.mark.parametrize(("epochs", "tried"), [(3, 1), (4, 3)])
def test_of_few_epochs_rates_are_tried_in_the_first_block_only(
    epochs: int, tried: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates: list[float | None] = []
    real = blockwise.tune

    def noted(*args: Any, **kwargs: Any) -> Any:
        rates.append(kwargs["rate"])
        return real(*args, **kwargs)

    monkeypatch.setattr(blockwise, "tune", noted)
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(24, 24), nn.Tanh()) for _ in range(3)))
    data = from_tensors(torch.randn(160, 24))
    small = bp_convert.convert(
        model, rank=0.3, calibrate=data, convert_anyway=True, reconstruct={"epochs": epochs}
    )
    assert small is not None
    assert len(rates) == 3
    assert sum(one is None for one in rates) == tried
