"""The contraction does what it is counted to do, and nothing else of any size."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from bp_convert.kron.contract import bilinear, bilinear_macs, order_costs, w2_first
from bp_convert.kron.pairs import divisor_pairs
from bp_convert.values.factors import FactorSpec
from tests.ops import PRODUCTS, VIEWS, Ops
from tests.oracles import kron_sum
from tests.tolerances import assert_near


def _factors(spec: FactorSpec, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    (k1, k2), (d1, d2), rank = spec.out, spec.inp, spec.rank
    return torch.randn(rank, k1, d1, dtype=dtype), torch.randn(rank, d2, k2, dtype=dtype)


@pytest.mark.parametrize("k", [1, 6, 12])
@pytest.mark.parametrize("d", [1, 8, 12])
@pytest.mark.parametrize("rank", [1, 3])
def test_the_cheaper_order_is_taken_and_counted_exactly(k: int, d: int, rank: int) -> None:
    for out in divisor_pairs(k):
        for inp in divisor_pairs(d):
            spec = FactorSpec(out=out, inp=inp, rank=rank)
            two, one = order_costs(spec)
            assert bilinear_macs(spec) == (two if w2_first(*out, *inp) else one) == min(two, one)
            w1, w2 = _factors(spec)
            with FlopCounterMode(display=False) as counter:
                bilinear(torch.randn(5, d), w1, w2)
            assert counter.get_total_flops() == 2 * 5 * bilinear_macs(spec)


@pytest.mark.parametrize("rank", [1, 4])
@pytest.mark.parametrize(
    ("out", "inp"),
    [((4, 6), (5, 8)), ((6, 4), (8, 5)), ((24, 1), (1, 40)), ((1, 24), (40, 1)), ((1, 24), (5, 8))],
)
@pytest.mark.parametrize("grad", [False, True])
def test_two_products_whatever_the_rank_and_no_copy_of_an_activation(
    out: tuple[int, int], inp: tuple[int, int], rank: int, grad: bool
) -> None:
    spec = FactorSpec(out=out, inp=inp, rank=rank)
    w1, w2 = _factors(spec)
    x = torch.randn(1000, 40, requires_grad=grad)
    with Ops() as ops:
        bilinear(x, w1.requires_grad_(grad), w2.requires_grad_(grad))
    names = [name for name, _ in ops.seen]
    assert sum(name in PRODUCTS for name in names) == 2
    rest = [(n, size) for n, size in ops.seen if n not in PRODUCTS | VIEWS]
    assert all(size <= spec.params for _, size in rest), rest
    if rank == 1 or 1 in (out[1], inp[0]):
        assert not rest  # nothing is laid out anew


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_narrow_types(dtype: torch.dtype) -> None:
    for out, inp in (((4, 6), (5, 8)), ((6, 4), (8, 5))):
        w1, w2 = _factors(FactorSpec(out=out, inp=inp, rank=3), dtype)
        x = torch.randn(7, 40, dtype=dtype)
        expected = x.double() @ kron_sum(w1.double(), w2.double()).t()
        assert_near(bilinear(x, w1, w2), expected, dtype)


def test_inputs_of_any_strides() -> None:
    w1, w2 = _factors(FactorSpec(out=(4, 6), inp=(5, 8), rank=2))
    whole = torch.randn(9, 3, 80)
    for x in (
        whole[..., :40],
        whole[..., ::2],
        whole[::2, :, 40:],
        whole[:, :, :40].transpose(0, 1),
    ):
        assert_near(bilinear(x, w1, w2), bilinear(x.contiguous(), w1, w2))


def test_one_row_of_many_by_vmap() -> None:
    w1, w2 = _factors(FactorSpec(out=(4, 6), inp=(5, 8), rank=2))
    x = torch.randn(7, 40)
    each = torch.func.vmap(lambda row: bilinear(row, w1, w2))(x)
    assert_near(each, bilinear(x, w1, w2))


@pytest.mark.parametrize("rank", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("out", "inp"), [((12, 1), (1, 8)), ((4, 3), (2, 4)), ((2, 6), (4, 2)), ((3, 4), (8, 1))]
)
def test_a_bias_is_added_once_whatever_the_order_and_its_type(
    out: tuple[int, int], inp: tuple[int, int], dtype: torch.dtype, rank: int
) -> None:
    w1, w2 = _factors(FactorSpec(out=out, inp=inp, rank=rank))
    bias = torch.randn(12, dtype=dtype)
    x = torch.randn(5, 2, 8)
    wanted = x @ kron_sum(w1, w2).t() + bias.float()
    assert_near(bilinear(x, w1, w2, bias), wanted)
    assert_near(bilinear(x[:0], w1, w2, bias), wanted[:0])
    kept = bias.clone()
    bilinear(x, w1, w2, bias).mul_(2)
    assert torch.equal(bias, kept)
