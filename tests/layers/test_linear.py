from __future__ import annotations

import copy
import pickle
from importlib.util import find_spec

import pytest
import torch
from torch import nn

from bp_convert.errors import FactorError
from bp_convert.layers.linear import BPLinear
from bp_convert.values.factors import FactorSpec
from tests.oracles import kron_sum
from tests.tolerances import assert_near


def _spec(out: tuple[int, int], inp: tuple[int, int], rank: int) -> FactorSpec:
    return FactorSpec(out=out, inp=inp, rank=rank)


@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize("out", [(1, 6), (2, 3), (3, 2), (6, 1)])
@pytest.mark.parametrize("inp", [(1, 8), (2, 4), (4, 2), (8, 1)])
@pytest.mark.parametrize("bias", [True, False])
def test_it_is_the_dense_layer_of_the_kronecker_sum(
    out: tuple[int, int], inp: tuple[int, int], rank: int, bias: bool
) -> None:
    layer = BPLinear(8, 6, bias, factors=_spec(out, inp, rank), dtype=torch.float64)
    x = torch.randn(5, 8, dtype=torch.float64)
    dense = kron_sum(layer.w1, layer.w2)
    expected = x @ dense.t() + (layer.bias if layer.bias is not None else 0)
    assert_near(layer(x), expected)
    assert_near(layer.weight, dense)
    assert_near(layer.to_dense()(x), expected)


def test_gradients() -> None:
    for out, inp in (((2, 3), (4, 2)), ((3, 2), (2, 4)), ((6, 1), (1, 8)), ((1, 6), (8, 1))):
        layer = BPLinear(8, 6, factors=_spec(out, inp, 2), dtype=torch.float64)
        x = torch.randn(3, 8, dtype=torch.float64, requires_grad=True)
        assert torch.autograd.gradcheck(
            lambda x, *p, layer=layer: torch.func.functional_call(
                layer, dict(zip(("w1", "w2", "bias"), p, strict=True)), (x,)
            ),
            (x, layer.w1, layer.w2, layer.bias),
        )


@pytest.mark.parametrize("lead", [(), (1,), (0,), (2, 3), (2, 0, 4), (1, 2, 3, 4)])
def test_any_leading_axes(lead: tuple[int, ...]) -> None:
    layer = BPLinear(12, 20, rank=2)
    x = torch.randn(*lead, 12)
    assert layer(x).shape == (*lead, 20)
    assert_near(layer(x), layer.to_dense()(x))


def test_inputs_that_are_not_contiguous() -> None:
    layer = BPLinear(12, 20, rank=2)
    x = torch.randn(12, 4, 3).permute(2, 1, 0)
    assert_near(layer(x), layer(x.contiguous()))


def test_a_huge_rank_is_full_rank_and_exact() -> None:
    dense = nn.Linear(512, 256)
    layer = BPLinear.from_dense(dense, rank=10**6)
    assert layer.factors.rank == layer.factors.full_rank
    x = torch.randn(4, 512)
    assert_near(layer(x), dense(x))
    assert torch.equal(layer.weight, dense.weight)
    assert "rank=256" in repr(layer)  # 16 * 16 of the outer, 32 * 16 of the inner


def test_from_dense_carries_everything_and_shares_nothing() -> None:
    dense = nn.Linear(12, 20, dtype=torch.float64).eval()
    dense.weight.requires_grad_(False)
    layer = BPLinear.from_dense(dense, rank=2)
    assert layer.w1.dtype == torch.float64
    assert not layer.training
    assert not layer.w1.requires_grad
    assert not layer.w2.requires_grad
    assert layer.bias is not None
    assert layer.bias.requires_grad
    assert layer.bias.data_ptr() != dense.bias.data_ptr()
    back = layer.to_dense()
    assert not back.weight.requires_grad
    assert not back.training
    assert back.bias.data_ptr() != layer.bias.data_ptr()
    assert BPLinear.from_dense(nn.Linear(12, 20, bias=False)).bias is None


def test_fit_returns_the_error_that_the_weights_show() -> None:
    dense = nn.Linear(36, 25)
    layer = BPLinear(36, 25, rank=3)
    error = layer.fit_(dense.weight)
    gap = ((layer.weight - dense.weight).norm() / dense.weight.norm()).detach()
    assert error == pytest.approx(float(gap), rel=1e-4)


@pytest.mark.parametrize("rank", [1, 4])
def test_a_fresh_layer_varies_like_a_fresh_dense_one(rank: int) -> None:
    layer, dense = BPLinear(400, 900, rank=rank), nn.Linear(400, 900)
    assert layer.weight.var().item() == pytest.approx(dense.weight.var().item(), rel=0.25)
    assert layer.bias is not None
    assert 0.9 * 400**-0.5 < layer.bias.abs().max() <= 400**-0.5
    x = torch.randn(2000, 400)
    assert layer(x).var().item() == pytest.approx(dense(x).var().item(), rel=0.25)


def test_state_copies_and_pickles() -> None:
    layer, x = BPLinear(12, 20, rank=2), torch.randn(3, 12)
    other = BPLinear(12, 20, rank=2)
    other.load_state_dict(layer.state_dict())
    for twin in (other, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(twin(x), layer(x))
    assert list(layer.state_dict()) == ["w1", "w2", "bias"]


def test_wrong_pairs_are_refused_at_construction() -> None:
    with pytest.raises(FactorError, match=r"pair out(.|\n)*3 x 7 = 21(.|\n)*two factors of 20"):
        BPLinear(12, 20, factors=_spec((3, 7), (3, 4), 1))
    with pytest.raises(FactorError, match="pair in"):
        BPLinear(12, 20, factors=_spec((4, 5), (4, 4), 1))


@pytest.mark.parametrize(("sizes", "word"), [((0, 4, 1), "width of 0"), ((4, 4, 0), "rank of 0")])
def test_a_width_or_rank_below_one_is_refused(sizes: tuple[int, int, int], word: str) -> None:
    inputs, outputs, rank = sizes
    with pytest.raises(FactorError, match=word):
        BPLinear(inputs, outputs, rank=rank)


def test_the_weight_is_read_only() -> None:
    with pytest.raises((AttributeError, KeyError)):
        BPLinear(4, 4).weight = nn.Parameter(torch.zeros(4, 4))  # type: ignore[misc]


@pytest.mark.parametrize("own", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16])
def test_autocast_takes_factors_of_either_width(own: torch.dtype, given: torch.dtype) -> None:
    layer = BPLinear(12, 20, rank=2, dtype=own)
    dense = layer.to_dense()
    x = torch.randn(3, 12).to(given)
    with torch.autocast("cpu", torch.bfloat16):
        y, expected = layer(x), dense(x)
    assert y.dtype == expected.dtype == torch.bfloat16
    assert_near(y, expected)
    y.sum().backward()
    assert layer.w1.grad is not None
    assert layer.w1.grad.dtype == own


def test_mixed_dtypes_without_autocast_fail_as_in_torch() -> None:
    with pytest.raises(RuntimeError, match="dtype"):
        BPLinear(12, 20, dtype=torch.bfloat16)(torch.randn(3, 12))


@pytest.mark.parametrize("batches", [range(1, 13), range(4, 52, 4)])
def test_compiling_for_twelve_batch_sizes_makes_at_most_two_graphs(batches: range) -> None:
    assert find_spec("opt_einsum") is not None  # its presence changes how torch contracts
    torch._dynamo.reset()
    graphs = 0

    def count(graph: torch.fx.GraphModule, _: object) -> object:
        nonlocal graphs
        graphs += 1
        return graph.forward

    model = nn.Sequential(BPLinear(12, 20, rank=2), nn.ReLU(), BPLinear(20, 6))
    compiled = torch.compile(model, backend=count, fullgraph=True)
    for batch in batches:
        x = torch.randn(batch, 12)
        assert_near(compiled(x), model(x))
    assert graphs <= 2


@pytest.mark.parametrize("example", [2, 3])
def test_export_with_a_free_batch_runs_at_another_batch(example: int) -> None:
    model = nn.Sequential(BPLinear(12, 20, rank=2), nn.ReLU(), BPLinear(20, 6)).eval()
    free = {0: torch.export.Dim("batch")}
    exported = torch.export.export(model, (torch.randn(example, 12),), dynamic_shapes=(free,))
    for batch in (1, 17):
        x = torch.randn(batch, 12)
        assert_near(exported.module()(x), model(x))
