from __future__ import annotations

from math import prod

import pytest

from bp_convert.kron.conv_layout import (
    aligned_axes,
    closest_conv_factors,
    every_axes,
    fast_conv_factors,
    first_factor,
    layout_cost,
    layout_of,
    out_sizes,
    paper_conv_factors,
    split_padding,
)
from bp_convert.kron.pairs import divisor_pairs, nearest_pair
from bp_convert.values.factors import FactorSpec


@pytest.mark.parametrize("channels", range(1, 130))
@pytest.mark.parametrize("kernel", [(3, 3), (1, 1), (5, 5), (3,), (1, 7)])
def test_a_square_kernel_of_prime_side_always_has_an_aligned_layout(
    channels: int, kernel: tuple[int, ...]
) -> None:
    spec = paper_conv_factors(channels, nearest_pair(64), kernel, 1)
    assert spec is not None
    assert spec.inp == nearest_pair(channels * prod(kernel))
    lay = layout_of(spec, kernel)
    assert lay.c1 * lay.c2 == channels
    assert lay.s1 * lay.s2 == prod(kernel)
    assert (lay.c1 * lay.s1, lay.c2 * lay.s2) == spec.inp


def test_a_kernel_without_an_aligned_layout_takes_the_closest() -> None:
    # 3 channels of 4x4: 48 = 6 x 8, and 4 does not divide 6
    assert paper_conv_factors(3, (4, 8), (4, 4), 1) is None
    spec = closest_conv_factors(3, (4, 8), (4, 4), 1)
    assert prod(spec.inp) == 48
    assert aligned_axes(spec.inp, 3, (4, 4))
    wanted = 4 * 6 + 8 * 8
    nearest = min(
        abs(4 * d1 + 8 * d2 - wanted)
        for d1, d2 in divisor_pairs(48)
        if aligned_axes((d1, d2), 3, (4, 4))
    )
    assert abs(spec.params - wanted) == nearest


def test_the_examples_of_the_design() -> None:
    kernel = (3, 3)
    assert aligned_axes((16, 18), 32, kernel) == ((2, 2),)  # 16 | 2*9
    assert set(aligned_axes((24, 24), 64, kernel)) == {(2, 1), (1, 2)}  # 8*3 | 8*3
    assert (2, 2) in aligned_axes((48, 54), 288, kernel)  # 48 | 6*9
    assert (2, 2) in aligned_axes((3, 9), 3, kernel)


@pytest.mark.parametrize("kernel", [(1, 1), (3, 3), (5, 5), (1, 7), (64, 1), (7, 7)])
@pytest.mark.parametrize(("channels", "outputs"), [(3, 64), (16, 16), (64, 64), (128, 97), (7, 11)])
def test_fast_layouts_are_within_a_tenth_and_no_dearer(
    channels: int, outputs: int, kernel: tuple[int, int]
) -> None:
    square = FactorSpec(out=nearest_pair(outputs), inp=nearest_pair(channels * prod(kernel)))
    fast = fast_conv_factors(channels, outputs, kernel, 1)
    paper = paper_conv_factors(channels, nearest_pair(outputs), kernel, 1)
    if paper is not None:
        assert fast.params <= 1.1 * square.params
        assert layout_cost(fast, kernel) <= layout_cost(paper, kernel)
        assert fast.reach >= square.reach
    lay = layout_of(fast, kernel)
    assert lay.c1 * lay.c2 == channels
    assert prod(fast.out) == outputs


@pytest.mark.parametrize("channels", [64, 128, 256, 512])
def test_fast_looks_beyond_the_square_outputs(channels: int) -> None:
    """The layouts that ran fastest of all those allowed; a square output pair is slower."""
    best = {64: (4, 16), 128: (8, 16), 256: (8, 32), 512: (16, 32)}
    spec = fast_conv_factors(channels, channels, (3, 3), 1)
    assert spec.out == best[channels]
    assert spec.axes == (2, 2)


def test_a_cheap_layout_that_squeezes_everything_through_one_number_is_not_fast() -> None:
    spec = fast_conv_factors(1, 16, (3, 3), 1)  # 16x1 | 1x9 holds fewer numbers
    assert (spec.out, spec.inp, spec.reach) == ((4, 4), (3, 3), 9)


@pytest.mark.parametrize(("channels", "axes"), [(36, (2, 2)), (12, (1, 1)), (27, (1, 1))])
def test_the_paper_pair_runs_in_its_cheapest_layout(channels: int, axes: tuple[int, ...]) -> None:
    spec = paper_conv_factors(channels, (8, 8), (3, 3), 1)
    assert spec is not None
    assert len(aligned_axes(spec.inp, channels, (3, 3))) > 1
    assert spec.axes == axes


@pytest.mark.parametrize("rank", [1, 4])
@pytest.mark.parametrize(
    ("out", "inp", "first"), [((1, 64), (64, 9), 1), ((64, 1), (1, 64 * 9), 2)]
)
def test_the_factor_that_shrinks_the_data_goes_first(
    out: tuple[int, int], inp: tuple[int, int], first: int, rank: int
) -> None:
    spec = FactorSpec(out=out, inp=inp, rank=rank, axes=(2, 2))
    assert first_factor(spec, (3, 3), (1, 1)) == first


def test_every_owner_of_every_long_axis() -> None:
    assert list(every_axes((3, 1, 2))) == [(2, 2, 2), (2, 2, 1), (1, 2, 2), (1, 2, 1)]


def test_sizes_and_padding() -> None:
    assert out_sizes((7, 8), (3, 2), (2, 1), (1, 0), (1, 2)) == (4, 6)
    assert out_sizes((7,), (3,), (1,), "same", (2,)) == (7,)
    assert out_sizes((7,), (3,), (1,), "valid", (2,)) == (3,)
    assert split_padding((3, 3), (1, 2), (1, 1), "zeros") == ([(0, 0)] * 2, (1, 2))
    assert split_padding((3, 3), (1, 2), (1, 1), "reflect") == ([(1, 1), (2, 2)], (0, 0))
    assert split_padding((2,), "same", (1,), "zeros") == ([(0, 1)], (0,))
    assert split_padding((1, 1), (2, 2), (1, 1), "zeros") == ([(2, 2), (2, 2)], (0, 0))
