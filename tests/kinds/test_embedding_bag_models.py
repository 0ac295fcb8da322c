"""Models with bags of embeddings: converted, fitted, reloaded; offsets, sparse gradients, alpha."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bp_convert
from bp_convert.kinds import kind_of
from bp_convert.layers import BPEmbeddingBag
from bp_convert.seen.pick import Pick
from tests.tolerances import assert_near

ROWS, BAG = 60, 4


class Clicks(nn.Module):
    """A small recommender: bags of several tables, their products, and layers on top."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(ROWS, 12, mode="sum", **options) for _ in "ab")
        self.bottom = nn.Linear(3, 12)
        self.top = nn.Sequential(nn.Linear(15, 8), nn.ReLU(), nn.Linear(8, 2))

    def forward(self, dense: Tensor, ids: Tensor) -> Tensor:
        x = self.bottom(dense)
        rows = torch.stack([x, *(bag(ids[:, i]) for i, bag in enumerate(self.bags))], 1)
        dots = torch.bmm(rows, rows.transpose(1, 2))[:, [0, 0, 1], [1, 2, 2]]
        return self.top(torch.cat([x, dots], 1))


INPUT: dict[str, Any] = {"inputs": ["dense=float32:1x3", f"ids=int64:1x2x{BAG}<{ROWS}"]}


def data(count: int = 64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(ROWS // 2, (count, 2, BAG), generator=generator)  # half is never seen
    return torch.randn(count, 3, generator=generator), ids


@pytest.mark.parametrize("sparse", [False, True])
def test_full_rank_is_the_same_model(sparse: bool) -> None:
    torch.manual_seed(0)
    model = Clicks(sparse=sparse).eval()
    small, report = bp_convert.convert(model, **INPUT, rank=10**6, convert_anyway=True)
    assert all(isinstance(bag, BPEmbeddingBag) for bag in small.bags)
    assert_near(small(*data()), model(*data()))
    assert report.plan.params.after == sum(p.numel() for p in small.parameters())
    assert bp_convert.to_dense(small).bags[0].sparse == sparse


def test_a_target_is_met_on_data_and_the_result_reloads(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Clicks().eval()
    dense, ids = data()
    small, report = bp_convert.convert(
        model, **INPUT, target="params=0.4", calibrate={"dense": dense, "ids": ids},
        convert_anyway=True,
    )  # fmt: skip
    before = sum(p.numel() for p in model.parameters())
    assert sum(p.numel() for p in small.parameters()) <= 0.4 * before
    replaced = {one.kind for one in report.plan.layers if one.action == "replaced"}
    assert "EmbeddingBag" in replaced
    bp_convert.save(small, tmp_path / "small.pt")
    again = bp_convert.load(tmp_path / "small.pt", trust=["tests"])
    assert torch.equal(again(dense, ids), small(dense, ids))


def test_only_rows_that_count_are_looked_at() -> None:
    bag = nn.EmbeddingBag(ROWS, 4, mode="sum", padding_idx=0)
    kind = kind_of(bag)
    assert kind is not None
    assert kind.rows(bag, torch.tensor([[1, 0], [0, 5]]), Pick(10))["weight"][0].tolist() == [1, 5]


class Told(nn.Module):
    """Bags of different lengths, as offsets tell."""

    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(ROWS, 16)
        self.head = nn.Linear(16, 5)

    def forward(self, text: Tensor, offsets: Tensor) -> Tensor:
        return self.head(self.bag(text, offsets))


def test_bags_of_offsets_are_counted_and_converted() -> None:
    torch.manual_seed(0)
    model = Told().eval()
    text, offsets = torch.arange(30), torch.tensor([0, 3, 3, 20])
    small, report = bp_convert.convert(
        model, inputs=(text, offsets), rank=4, ways="factored", convert_anyway=True
    )
    assert isinstance(small.bag, BPEmbeddingBag)
    layer = report.plan.layer("bag")
    assert layer is not None
    assert layer.macs[1] > 0
    assert_near(small(text, offsets), bp_convert.to_dense(small)(text, offsets))


def test_widened_at_full_rank_it_computes_the_same() -> None:
    class Narrow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bag, self.head = nn.EmbeddingBag(ROWS, 8, mode="max"), nn.Linear(8, 5)

        def forward(self, ids: Tensor) -> Tensor:
            return self.head(self.bag(ids).relu())

    torch.manual_seed(0)
    model, ids = Narrow().eval(), data()[1][:, 0]
    small, report = bp_convert.convert(
        model, inputs=[f"int64:1x{BAG}<{ROWS}"], alpha=2, rank=10**6, convert_anyway=True
    )
    layer = report.plan.layer("bag")
    assert layer is not None
    assert layer.after == (ROWS, 16)
    assert_near(small(ids), model(ids))
