"""What is trained keeps inputs and factors for backward, not what stands between two products."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bp_convert import BPConv2d, BPLinear
from bp_convert.kron import contract
from bp_convert.kron.built_product import built_product, pays_to_build
from bp_convert.kron.contract import TwoProducts, bilinear, bilinear_macs
from bp_convert.values.factors import FactorSpec
from tests.oracles import kron_sum
from tests.tolerances import assert_near

PRODUCTS = {"two products": TwoProducts.apply, "built": built_product}
PAIRS = [((4, 6), (5, 8), 3), ((6, 4), (8, 5), 1), ((24, 1), (4, 10), 2), ((2, 12), (5, 8), 4)]


def _given(out: Any, inp: Any, rank: int) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = (2, 3, 40), (rank, out[0], inp[0]), (rank, inp[1], out[1]), (24,)
    return [torch.randn(one, dtype=torch.float64, requires_grad=True) for one in shapes]


def _saved(run: Callable[[], Tensor], *, but: list[Tensor]) -> int:
    """Return the bytes that backward keeps besides some tensors."""
    sizes, known = {}, {one.untyped_storage().data_ptr() for one in but}

    def pack(one: Tensor) -> Tensor:
        if one.untyped_storage().data_ptr() not in known:
            sizes[one.untyped_storage().data_ptr()] = one.untyped_storage().nbytes()
        return one

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda one: one):
        run()
    return sum(sizes.values())


@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("pair", PAIRS)
def test_gradients_are_those_of_the_dense_weight(product: str, pair: Any) -> None:
    given = _given(*pair)
    x, w1, w2, bias = given
    y = PRODUCTS[product](*given)
    dense = nn.functional.linear(x, kron_sum(w1, w2), bias)
    torch.testing.assert_close(y, dense)
    pairs = [torch.autograd.grad(one.square().sum(), given) for one in (y, dense)]
    torch.testing.assert_close(*pairs)
    nn.ReLU(inplace=True)(PRODUCTS[product](*given)).sum().backward()


@pytest.mark.parametrize("product", PRODUCTS)
def test_they_can_be_differentiated_again(product: str) -> None:
    for pair in PAIRS[::3]:
        given = [one.detach().requires_grad_() for one in _given(*pair)]
        given[0] = given[0].detach()[:1, :1].clone().requires_grad_()
        assert torch.autograd.gradcheck(PRODUCTS[product], given, fast_mode=True)
        assert torch.autograd.gradgradcheck(PRODUCTS[product], given, fast_mode=True)


@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("frozen", range(4))
def test_what_is_frozen_gets_none(product: str, frozen: int) -> None:
    given = _given(*PAIRS[0])
    given[frozen].requires_grad_(False)
    PRODUCTS[product](*given).sum().backward()
    assert [one.grad is None for one in given] == [at == frozen for at in range(4)]


def test_a_layer_keeps_nothing_of_its_own_between_two_products() -> None:
    layer, x = BPLinear(256, 256, rank=4), torch.randn(300, 256)
    given = [x, *layer.parameters()]
    assert _saved(lambda: layer(x), but=given) == 0
    plain = _saved(lambda: contract._two_products(x, layer.w1, layer.w2, layer.bias), but=given)
    assert plain >= 4 * x.nbytes
    few = x[:1]  # too little to be worth a product
    assert _saved(lambda: layer(few), but=given) > 0


@pytest.mark.parametrize("layer", [BPLinear(64, 64, rank=24), BPConv2d(16, 32, 3, rank=12)])
def test_an_expanded_layer_builds_its_weight_where_that_is_less_work(layer: Any) -> None:
    layer.double()
    shape = (400, 64) if isinstance(layer, BPLinear) else (2, 16, 24, 24)
    x = torch.randn(shape, dtype=torch.float64)
    want = torch.autograd.grad(layer(x).square().sum(), list(layer.parameters()))
    keeps = _saved(lambda: layer(x), but=[x, *layer.parameters()])
    layer.way = "expanded"
    y = layer(x)
    got = torch.autograd.grad(y.square().sum(), list(layer.parameters()))
    for one, two in zip(got, want, strict=True):
        assert_near(one, two)
    factored = x.nbytes * 2
    if not isinstance(layer, BPLinear):
        assert keeps > factored
        assert _saved(lambda: layer(x), but=[x, *layer.parameters()]) < factored
    else:
        assert "BuiltProduct" in y.grad_fn.name()


def test_few_rows_and_few_macs_build_nothing() -> None:
    many = FactorSpec(out=(16, 48), inp=(48, 16), rank=212)
    assert pays_to_build(bilinear_macs(many), many, 1024)
    assert not pays_to_build(bilinear_macs(many), many, 8)
    low = FactorSpec(out=(768, 1), inp=(1, 768), rank=206)
    assert not pays_to_build(bilinear_macs(low), low, 10**6)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*")  # torch's own, in forward mode
@pytest.mark.parametrize("way", ["factored", "expanded"])
def test_transforms_and_forward_mode_and_autocast_see_plain_operations(way: Any) -> None:
    layer, x = BPLinear(256, 256, rank=16), torch.randn(300, 256)
    layer.way = way
    params = dict(layer.named_parameters())

    def loss(given: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(layer, given, (x,)).square().mean()

    want = torch.autograd.grad(layer(x).square().mean(), list(params.values()))
    found = torch.func.grad(loss)(params, x)
    torch.testing.assert_close(tuple(found.values()), want, rtol=1e-3, atol=1e-5)
    each = torch.func.vmap(torch.func.grad(loss), (None, 0))(params, x.view(2, 150, 256))
    torch.testing.assert_close(each["w1"].mean(0), want[0], rtol=1e-3, atol=1e-5)
    with torch.autograd.forward_ad.dual_level():
        y = layer(torch.autograd.forward_ad.make_dual(x, x))
        assert torch.autograd.forward_ad.unpack_dual(y).tangent is not None
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
    assert y.dtype == torch.bfloat16
    y.sum().backward()


def test_bilinear_goes_by_size() -> None:
    spec = FactorSpec(out=(16, 16), inp=(16, 16), rank=4)
    w1, w2 = torch.randn(4, 16, 16, requires_grad=True), torch.randn(4, 16, 16)
    assert bilinear_macs(spec)
    name = bilinear(torch.randn(100, 256), w1, w2).grad_fn.name()
    assert "TwoProducts" in name
    assert "TwoProducts" not in bilinear(torch.randn(10, 256), w1, w2).grad_fn.name()
