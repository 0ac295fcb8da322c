from __future__ import annotations

import copy
import pickle
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from bp_convert.errors import FactorError
from bp_convert.layers.embedding import BPEmbedding, in_groups
from bp_convert.values.factors import FactorSpec
from tests.ops import VIEWS, Ops
from tests.oracles import table_sum
from tests.tolerances import assert_near


@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize("out", [(1, 6), (2, 3), (6, 1)])
@pytest.mark.parametrize("inp", [(1, 10), (2, 5), (10, 1), (3, 4), (11, 1)])
def test_it_looks_up_rows_of_the_kronecker_sum(
    out: tuple[int, int], inp: tuple[int, int], rank: int
) -> None:
    spec = FactorSpec(out=out, inp=inp, rank=rank)
    layer = BPEmbedding(10, 6, factors=spec, dtype=torch.float64)
    rows = torch.randint(0, 10, (3, 4))
    table = table_sum(layer.w1, layer.w2, 10)
    assert_near(layer(rows), table[rows])
    assert_near(layer.weight, table)
    assert_near(layer.to_dense()(rows), table[rows])


def test_gradients() -> None:
    rows = torch.tensor([1, 1, 7])
    for inp, rank in (((2, 5), 1), ((2, 5), 2), ((10, 1), 2), ((1, 10), 2), ((3, 4), 2)):
        spec = FactorSpec(out=(2, 3), inp=inp, rank=rank)
        layer = BPEmbedding(10, 6, factors=spec, dtype=torch.float64)
        assert torch.autograd.gradcheck(
            lambda a, b, layer=layer: torch.func.functional_call(
                layer, {"w1": a, "w2": b}, (rows,)
            ),
            (layer.w1, layer.w2),
        )


def test_full_rank_is_exact_with_spare_rows_too() -> None:
    dense = nn.Embedding(97, 24)
    spec = FactorSpec(out=(4, 6), inp=(10, 10), rank=10**6)
    layer = BPEmbedding.from_dense(dense, factors=spec)
    rows = torch.arange(97)
    assert_near(layer(rows), dense(rows))


def test_the_padding_row_is_zero_and_gets_no_gradient() -> None:
    dense = nn.Embedding(10, 6, padding_idx=-7)  # row 3
    layer = BPEmbedding.from_dense(dense, rank=1)
    assert layer.padding_idx == 3
    assert layer(torch.tensor([3])).abs().max() == 0
    layer(torch.tensor([3, 3])).sum().backward()
    for factor in (layer.w1, layer.w2):
        assert factor.grad is not None
        assert factor.grad.abs().max() == 0
    layer(torch.tensor([2, 3])).sum().backward()
    assert layer.w1.grad is not None
    assert layer.w1.grad.abs().max() > 0
    assert layer.weight[3].abs().max() == 0
    assert layer.to_dense().padding_idx == 3


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"max_norm": 1.0}, "max_norm"),
        ({"scale_grad_by_freq": True}, "scale_grad_by_freq"),
        ({"sparse": True}, "sparse"),
    ],
)
def test_what_a_factored_table_cannot_honour_is_refused(
    options: dict[str, object], word: str
) -> None:
    with pytest.raises(FactorError, match=word):
        BPEmbedding.from_dense(nn.Embedding(10, 6, **options))  # type: ignore[arg-type]


def test_a_padding_row_that_is_not_zero_is_kept_exactly_and_still_gets_no_gradient() -> None:
    dense = nn.Embedding(10, 6, padding_idx=0)
    with torch.no_grad():
        dense.weight[0] = torch.arange(6.0)
    layer = BPEmbedding.from_dense(dense, rank=1)
    row = torch.tensor([0, 0])
    assert torch.equal(layer(row), dense(row))
    assert torch.equal(layer.weight[0], dense.weight[0])
    assert torch.equal(layer.to_dense()(row), dense(row))
    assert not layer(row).requires_grad or layer(row).sum().backward() is None
    grad = layer.w1.grad
    assert grad is None or float(grad.abs().max()) == 0
    other = BPEmbedding(10, 6, padding_idx=0)
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other(row), dense(row))


@pytest.mark.parametrize("bad", [-11, -1, 10, 11, 99])
@pytest.mark.parametrize("inp", [(2, 5), (3, 4), (1, 10), (10, 1), (1, 12), (12, 1)])
@pytest.mark.parametrize("rank", [1, 2])
def test_an_index_outside_the_vocabulary_is_an_error(
    bad: int, inp: tuple[int, int], rank: int
) -> None:
    layer = BPEmbedding(10, 6, factors=FactorSpec(out=(2, 3), inp=inp, rank=rank))
    with pytest.raises(IndexError, match="10 rows"):
        layer(torch.tensor([3, bad]))


def test_indices_that_are_no_integers_are_an_error_as_in_torch() -> None:
    for layer in (BPEmbedding(10, 6, rank=2), nn.Embedding(10, 6)):
        with pytest.raises((RuntimeError, IndexError), match=r"[Ii]nt"):
            layer(torch.tensor([1.0]))


def test_spare_rows_stay_hidden_when_compiled() -> None:
    torch._dynamo.reset()
    layer = BPEmbedding(10, 6, factors=FactorSpec(out=(2, 3), inp=(3, 4)))
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    for rows in (torch.arange(10), torch.tensor([3, 4]), torch.tensor([1, 2, 9])):
        assert_near(compiled(rows), layer(rows))
    with pytest.raises(Exception, match=r"out of (DATA bounds|range)"):
        compiled(torch.tensor([3, 10]))


def test_export_with_a_free_length() -> None:
    layer = BPEmbedding(10, 6, rank=2)
    free = {1: torch.export.Dim("tokens")}
    rows = torch.arange(6).view(2, 3)
    exported = torch.export.export(layer, (rows,), dynamic_shapes=(free,)).module()
    assert_near(exported(torch.arange(8).view(2, 4)), layer(torch.arange(8).view(2, 4)))


@pytest.mark.parametrize("rank", [1, 2])
def test_autocast_leaves_the_dtype_of_the_table_as_torch_does(rank: int) -> None:
    layer, rows = BPEmbedding(10, 6, rank=rank), torch.arange(10)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(rows)
    assert y.dtype == torch.float32
    assert_near(y, layer(rows), torch.bfloat16)


def test_a_long_factor_is_not_laid_out_anew() -> None:
    spec = FactorSpec(out=(1, 6), inp=(1000, 1), rank=4)
    layer = BPEmbedding(1000, 6, factors=spec)
    with Ops() as ops, torch.no_grad():
        layer(torch.tensor([1, 999]))
    assert max(size for name, size in ops.seen if name not in VIEWS) <= 2 * 6 * 4


@pytest.mark.parametrize("shape", [(), (0,), (2, 0), (1, 1), (2, 3, 4)])
@pytest.mark.parametrize("padding", [None, 0])
@pytest.mark.parametrize("rank", [1, 2, 9])
@pytest.mark.parametrize("table", [(1, 1), (1, 6), (2, 6), (6, 1), (10, 6)])
def test_any_shape_of_indices(
    table: tuple[int, int], rank: int, padding: int | None, shape: tuple[int, ...]
) -> None:
    layer = BPEmbedding(*table, padding, rank=rank)
    indices = torch.randint(table[0], shape)
    found = layer(indices)
    assert found.shape == (*shape, table[1])
    assert_near(found, layer.to_dense()(indices))
    with pytest.raises(IndexError):
        layer(indices.new_full((3,), table[0]))


@pytest.mark.parametrize("rank", [1, 3])
def test_a_fresh_table_varies_like_a_fresh_dense_one(rank: int) -> None:
    layer = BPEmbedding(2500, 400, rank=rank)
    assert layer.weight.var().item() == pytest.approx(1.0, rel=0.25)


def test_state_and_copies() -> None:
    layer, rows = BPEmbedding(10, 6, rank=2), torch.arange(10)
    other = BPEmbedding(10, 6, rank=2)
    other.load_state_dict(layer.state_dict())
    for twin in (other, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(twin(rows), layer(rows))
    assert list(layer.state_dict()) == ["w1", "w2"]
    assert "in=2x5" in repr(layer)


def test_pairs_must_cover_the_vocabulary() -> None:
    with pytest.raises(FactorError, match="at least 10"):
        BPEmbedding(10, 6, factors=FactorSpec(out=(2, 3), inp=(3, 3)))
    with pytest.raises(FactorError, match="pair out"):
        BPEmbedding(10, 6, factors=FactorSpec(out=(2, 2), inp=(2, 5)))


@pytest.mark.parametrize("inp", [(3, 40), (40, 3)])
@pytest.mark.parametrize("out", [(128, 2), (2, 128), (16, 16)])
def test_groups_of_indices_give_what_single_ones_do(
    inp: tuple[int, int], out: tuple[int, int]
) -> None:
    spec = FactorSpec(out=out, inp=inp, rank=64)
    layer = BPEmbedding(118, 256, padding_idx=5, factors=spec, dtype=torch.float64)
    rows = torch.randint(0, 118, (2, 30))
    rows[0, :3] = torch.tensor([5, 117, 0])
    with Ops() as seen:  # who counts sees one product, whatever the indices are
        wanted = layer(rows)
    assert {name for name, _ in seen.seen} >= {"bmm"}
    assert_near(layer(rows), wanted)
    assert_near(wanted, layer.weight[rows])
    found = []
    for watched in (True, False):
        layer.zero_grad()
        with Ops() if watched else nullcontext():
            y = layer(rows)
        (y * y.detach().cos()).sum().backward()
        found.append((layer.w1.grad, layer.w2.grad))
    assert_near(found[1][0], found[0][0])
    assert_near(found[1][1], found[0][1])
    assert_near(torch.func.vmap(layer)(rows), wanted)
    for wrong in (118, -1):
        rows[1, 7] = wrong
        with pytest.raises(IndexError, match="the table has 118 rows"):
            layer(rows)


def test_of_few_indices_or_short_rows_no_groups_are_made() -> None:
    many = FactorSpec(out=(128, 2), inp=(3, 40), rank=64)
    assert in_groups(many, 6)
    assert not in_groups(many, 5)
    assert not in_groups(many.model_copy(update={"rank": 7}), 6)
    assert not in_groups(FactorSpec(out=(128, 2), inp=(1, 120), rank=64), 6)
