"""Layers of low rank as two plain torch layers in a row."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bp_convert
from bp_convert.errors import VerificationError
from bp_convert.layers import BPConv1D, BPConv2d, BPConv3d, BPEmbedding, BPLinear
from bp_convert.layers.in_two import in_two
from bp_convert.values.factors import FactorSpec
from tests.tolerances import assert_near

THIN = {"out": (12, 1), "inp": (1, 8), "rank": 3}
TURNED = {"out": (1, 12), "inp": (8, 1), "rank": 3}


def _spec(**fields: Any) -> FactorSpec:
    return FactorSpec(**fields)


@pytest.mark.parametrize("spec", [THIN, TURNED], ids=["thin", "turned"])
@pytest.mark.parametrize("kind", [BPLinear, BPConv1D])
def test_matrices(kind: Any, spec: dict[str, Any]) -> None:
    layer = kind(8, 12, factors=_spec(**spec))
    plain = in_two(layer)
    assert plain is not None
    assert [type(one) for one in plain] == [nn.Linear, nn.Linear]
    x = torch.randn(2, 5, 8)
    assert_near(plain(x), layer(x))
    assert sum(p.numel() for p in plain.parameters()) == sum(p.numel() for p in layer.parameters())


@pytest.mark.parametrize("axes", [*itertools.product((1, 2), repeat=2)])
@pytest.mark.parametrize("first", [1, 2])
def test_convolutions_each_factor_along_its_axes(axes: Any, first: int) -> None:
    kernel = (3, 2)
    own = [
        torch.tensor([n for n, owner in zip(kernel, axes, strict=True) if owner == f] or [1]).prod()
        for f in (1, 2)
    ]
    if first == 2:
        pairs = {"out": (12, 1), "inp": (int(own[0]), 8 * int(own[1]))}
    else:
        pairs = {"out": (1, 12), "inp": (8 * int(own[0]), int(own[1]))}
    layer = BPConv2d(
        8, 12, kernel, (2, 1), (1, 2), (1, 2), factors=_spec(**pairs, axes=axes, rank=3)
    )
    plain = in_two(layer)
    assert plain is not None
    assert [type(one) for one in plain] == [nn.Conv2d, nn.Conv2d]
    x = torch.randn(2, 8, 9, 7)
    assert_near(plain(x), layer(x))


def test_what_has_no_such_form_is_left() -> None:
    assert in_two(BPLinear(8, 12)) is None
    assert in_two(nn.Linear(8, 12)) is None
    reflect = BPConv2d(
        8, 12, 3, padding=1, padding_mode="reflect",
        factors=_spec(out=(12, 1), inp=(1, 72), axes=(2, 2)),
    )  # fmt: skip
    assert in_two(reflect) is None
    assert in_two(BPConv3d(4, 8, 1, factors=_spec(out=(2, 4), inp=(2, 2), axes=(2, 2, 2)))) is None


def test_tables_with_and_without_a_padding_row() -> None:
    thin = _spec(out=(1, 6), inp=(10, 1), rank=2)
    layer = BPEmbedding(10, 6, 3, factors=thin)
    plain = in_two(layer)
    rows = torch.arange(10)
    assert plain is not None
    assert_near(plain(rows), layer(rows))
    layer.padding_row.fill_(1.0)
    assert in_two(layer) is None


class ReadsItsWeight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.b(self.a(x).relu()).to(self.b.weight.dtype)
        return y


def test_a_model_comes_back_as_small_and_needs_nothing_of_ours() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    small, report = bp_convert.convert(
        model, rank=0.25, convert_anyway=True, convert_head=True, inputs=["64"]
    )
    plain = bp_convert.to_dense(small, factored=True)
    assert isinstance(plain[0], nn.Sequential)  # type: ignore[index]
    assert all(type(one).__module__.startswith("torch.nn") for one in plain.modules())
    assert sum(p.numel() for p in plain.parameters()) == report.plan.params.after
    x = torch.randn(4, 64)
    assert_near(plain(x), small(x))


def test_code_that_reads_a_weight_is_told_of() -> None:
    small, _ = bp_convert.convert(
        ReadsItsWeight(), rank=0.25, convert_anyway=True, convert_head=True, inputs=["16"]
    )
    with pytest.raises(VerificationError, match="without factored") as caught:
        bp_convert.to_dense(small, factored=True)
    assert "weight" in caught.value.found


def test_half_precision_is_judged_by_what_it_rounds_to() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)).bfloat16()
    small, _ = bp_convert.convert(
        model, rank=0.25, convert_anyway=True, convert_head=True, inputs=["64"]
    )
    plain = bp_convert.to_dense(small, factored=True)
    assert all(type(one).__module__.startswith("torch.nn") for one in plain.modules())
