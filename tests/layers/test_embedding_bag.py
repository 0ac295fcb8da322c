"""Bags of a factored table, against torch's layer on the table built."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from bp_convert.errors import FactorError
from bp_convert.kinds import kind_of
from bp_convert.layers import BPEmbeddingBag
from bp_convert.values.factors import FactorSpec
from tests.ops import Ops
from tests.tolerances import assert_near

ROWS, COLUMNS = 12, 6
PAIRS: list[tuple[Any, Any]] = [
    ((12, 1), (1, 6)),  # low rank
    ((1, 12), (2, 3)),
    ((1, 12), (6, 1)),  # low rank, too
    ((3, 4), (2, 3)),
    ((4, 4), (3, 2)),  # with spare rows
    ((16, 1), (1, 6)),
]
MODES = ["sum", "mean", "max"]


def _bag(pair: tuple[Any, Any], rank: int, **options: Any) -> BPEmbeddingBag:
    spec = FactorSpec(out=pair[1], inp=pair[0], rank=rank)
    return BPEmbeddingBag(ROWS, COLUMNS, factors=spec, dtype=torch.float64, **options)


def _ragged(last: bool) -> tuple[Tensor, Tensor]:
    """Seven indices in bags of 3, 0, 4."""
    return torch.tensor([1, 3, 3, 0, 11, 5, 3]), torch.tensor([0, 3, 3, 7] if last else [0, 3, 3])


@pytest.mark.parametrize("pair", PAIRS, ids=str)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("pad", [None, 3, -1])
def test_bags_are_those_of_the_table(pair: tuple[Any, Any], mode: str, pad: int | None) -> None:
    x = torch.tensor([[1, 3, 11, 3], [3, 3, 3, 3], [0, 2, 5, 1]])
    for rank in (1, 2):
        for last in (False, True):
            bag = _bag(pair, rank, mode=mode, padding_idx=pad, include_last_offset=last)
            dense = bag.to_dense()
            assert type(dense) is nn.EmbeddingBag
            assert (dense.mode, dense.padding_idx) == (mode, bag.padding_idx)
            ragged = _ragged(last)
            assert_near(bag(x), dense(x))
            assert_near(bag(*ragged), dense(*ragged))
            assert_near(bag(x[:0]), dense(x[:0]))
            if mode == "sum":
                weights = torch.randn(3, 4, dtype=torch.float64)
                assert_near(
                    bag(x, per_sample_weights=weights), dense(x, per_sample_weights=weights)
                )
                flat = weights.flatten()[:7]
                assert_near(
                    bag(*ragged, per_sample_weights=flat), dense(*ragged, per_sample_weights=flat)
                )
            for given in ((x,), ragged):
                for one in (bag, dense):
                    one.zero_grad()
                bag(*given).square().sum().backward()
                assert all(p.grad is not None for p in bag.parameters())
            kind = kind_of(dense)
            assert kind is not None
            with FlopCounterMode(display=False) as counter:
                bag(x)
            told = kind.macs(dense, kind.widths(dense), {"weight": bag.factors}, [tuple(x.shape)])
            assert counter.get_total_flops() == 2 * told


@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_gradients(pair: tuple[Any, Any]) -> None:
    x = torch.tensor([[1, 3, 11], [2, 3, 3]])
    for mode in ("sum", "mean"):
        bag = _bag(pair, 2, mode=mode, padding_idx=3)
        assert torch.autograd.gradcheck(
            lambda w1, w2, bag=bag: torch.func.functional_call(bag, {"w1": w1, "w2": w2}, (x,)),
            (bag.w1, bag.w2),
        )


def test_sums_of_a_low_rank_table_build_no_row() -> None:
    bag = BPEmbeddingBag(1000, 64, "sum", factors=FactorSpec(out=(1, 64), inp=(1000, 1), rank=4))
    x = torch.randint(1000, (2, 50))
    with torch.no_grad(), Ops() as ops:
        bag(x)
    assert max(size for _, size in ops.seen) <= max(bag.w1.numel(), 2 * 64)


def test_full_rank_is_exact_and_a_subset_of_the_fields_is_carried() -> None:
    dense = nn.EmbeddingBag(ROWS, COLUMNS, mode="sum", sparse=True, padding_idx=2)
    bag = BPEmbeddingBag.from_dense(dense, rank=10**6)
    x = torch.tensor([[1, 2, 11, 3]])
    assert_near(bag(x), dense(x))
    assert bag.sparse
    assert bag.to_dense().sparse
    assert bag.w1.grad is None


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ((torch.tensor([1, 2]),), ValueError),
        ((torch.tensor([[1, 2]]), torch.tensor([0])), ValueError),
        ((torch.tensor([[1, 12]]),), (IndexError, RuntimeError)),
        ((torch.tensor([[1, -1]]),), (IndexError, RuntimeError)),
        ((torch.tensor([[1, 2]]), None, torch.ones(1, 3)), ValueError),
    ],
)
def test_what_torch_refuses_is_refused(given: tuple[Any, ...], error: Any) -> None:
    for pair in PAIRS:
        with pytest.raises(error):
            _bag(pair, 1, mode="sum")(*given)


def test_weights_are_for_sums() -> None:
    with pytest.raises(ValueError, match="sums"):
        _bag(PAIRS[0], 1)(torch.tensor([[1]]), None, torch.ones(1, 1))
    with pytest.raises(FactorError, match="median"):
        BPEmbeddingBag(4, 4, mode="median")
    with pytest.raises(FactorError, match="max_norm"):
        BPEmbeddingBag.from_dense(nn.EmbeddingBag(4, 4, max_norm=1.0))
