from __future__ import annotations

from itertools import product
from math import prod

import pytest
import torch

from bp_convert.kron.als import natural
from bp_convert.kron.column_order import Columns
from bp_convert.kron.conv_layout import every_axes
from bp_convert.values.factors import FactorSpec, Pair
from tests.oracles import conv_weight, kron_sum
from tests.tolerances import assert_near

KERNELS = [(), (3,), (1,), (2, 3), (3, 1), (1, 1), (2, 3, 2), (2, 1, 3)]
CHANNELS = [(1, 1), (2, 3), (3, 2), (1, 6), (6, 1)]
LAYOUTS = [
    (channels, kernel, axes)
    for channels in CHANNELS
    for kernel in KERNELS
    for axes in every_axes(kernel)
]


def _places(channels: Pair, kernel: tuple[int, ...], axes: tuple[int, ...]) -> list[int]:
    """Walk the pair's columns in their order, one at a time, and find each among (C, *kernel)."""
    first = [range(n) if owner == 1 else (0,) for n, owner in zip(kernel, axes, strict=True)]
    second = [range(n) if owner == 2 else (0,) for n, owner in zip(kernel, axes, strict=True)]
    found = []
    for j1 in range(channels[0]):
        for at1 in product(*first):
            for j2 in range(channels[1]):
                for at2 in product(*second):
                    place = j1 * channels[1] + j2
                    for one, two, size in zip(at1, at2, kernel, strict=True):
                        place = place * size + one + two
                    found.append(place)
    return found


@pytest.mark.parametrize(("channels", "kernel", "axes"), LAYOUTS)
def test_the_order_is_the_one_that_a_walk_over_the_columns_gives(
    channels: Pair, kernel: tuple[int, ...], axes: tuple[int, ...]
) -> None:
    columns = Columns(channels, kernel, axes)
    expected = _places(channels, kernel, axes)
    total = prod(channels) * prod(kernel)
    assert sorted(expected) == list(range(total))
    if columns.order is None:
        assert expected == list(range(total))
    else:
        assert columns.order.tolist() == expected
    assert columns.kernel_order.tolist() == _places((1, 1), kernel, axes)
    assert prod(columns.inp) == total
    assert columns.places[0] * channels[0] == columns.inp[0]
    spec = FactorSpec(out=(1, 1), inp=columns.inp, axes=axes)  # type: ignore[arg-type]
    assert Columns.of(spec, kernel) == columns


@pytest.mark.parametrize(("channels", "kernel", "axes"), LAYOUTS)
def test_the_natural_weight_is_the_convolution_s(
    channels: Pair, kernel: tuple[int, ...], axes: tuple[int, ...]
) -> None:
    columns = Columns(channels, kernel, axes)
    d1, d2 = columns.inp
    w1 = torch.randn(2, 2, d1, dtype=torch.float64)
    w2 = torch.randn(2, d2, 3, dtype=torch.float64)
    dense = conv_weight(w1, w2, channels, kernel, axes).reshape(6, -1)
    assert_near(natural(w1, w2, columns), dense)
    if columns.order is not None:
        assert_near(dense[:, columns.order], kron_sum(w1, w2))


def test_an_axis_of_the_first_factor_moves_columns() -> None:
    """The negative twin: without the order the two weights differ."""
    columns = Columns((2, 3), (2, 3), (1, 2))
    w1, w2 = torch.randn(1, 2, 4).double(), torch.randn(1, 9, 3).double()
    assert columns.order is not None
    with pytest.raises(AssertionError):
        assert_near(natural(w1, w2, columns), kron_sum(w1, w2))
