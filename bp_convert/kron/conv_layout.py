"""How a convolution's receptive field is shared between the two factors, and what that costs.

Each factor takes some of the channels and whole axes of the kernel: d1 = c1*s1 and d2 = c2*s2 with
c1*c2 the input channels and s1*s2 the kernel's size. The bilinear convolution then is a product
over channels and a thin convolution, or two thin convolutions, on reshaped views: no im2col.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import ceil, prod
from typing import Literal

from bp_convert.kron.pairs import divisor_pairs, nearest_pair
from bp_convert.values.factors import FactorSpec, Pair

Axes = tuple[Literal[1, 2], ...]
Padding = str | Sequence[int] | int

FAST_SLACK = 1.1  # `fast` may spend this much more than the nearest-square pair's parameters
LANES = 16  # thin convolutions round their output channels up to the vector width
COPY = 8  # multiply-adds that moving one element costs


@dataclass(frozen=True)
class Layout:
    """The shares of one factorisation: channels c1, c2 and kernel sizes s1, s2."""

    c1: int
    c2: int
    s1: int
    s2: int


def layout_of(spec: FactorSpec, kernel: Sequence[int]) -> Layout:
    """Return the shares that ``spec`` stands for."""
    s1, s2 = _places(kernel, spec.axes)
    return Layout(spec.inp[0] // s1, spec.inp[1] // s2, s1, s2)


def _places(kernel: Sequence[int], axes: Sequence[int]) -> Pair:
    """Return the kernel places of the two factors, given who owns its axes."""
    one = prod(size for size, owner in zip(kernel, axes, strict=True) if owner == 1)
    return one, prod(kernel) // one


def every_axes(kernel: Sequence[int]) -> Iterator[Axes]:
    """Yield every way to give the kernel's axes to the factors; an axis of 1 always to the second.

    The whole kernel in the second factor comes first: it runs without moving any data.
    """
    choices: list[tuple[Literal[1, 2], ...]] = [(2,) if size == 1 else (2, 1) for size in kernel]
    return product(*choices)


def aligned_axes(inp: Pair, channels: int, kernel: Sequence[int]) -> tuple[Axes, ...]:
    """Return the ways in which the pair ``inp`` of channels * kernel can be laid out."""
    found = []
    for axes in every_axes(kernel):
        s1, s2 = _places(kernel, axes)
        if inp[0] % s1 == 0 and inp[1] % s2 == 0 and inp[0] // s1 * (inp[1] // s2) == channels:
            found.append(axes)
    return tuple(found)


def paper_conv_factors(
    channels: int, out: Pair, kernel: Sequence[int], rank: int
) -> FactorSpec | None:
    """Return the nearest-square pair of the receptive field in its cheapest layout.

    A kernel of p x p with p prime always has one: p^2 divides d1*d2, so it divides d1 or d2, or p
    divides both. Other kernels may have none; then the result is None.
    """
    inp = nearest_pair(channels * prod(kernel))
    found = [
        FactorSpec(out=out, inp=inp, rank=rank, axes=axes)
        for axes in aligned_axes(inp, channels, kernel)
    ]
    return min(found, key=lambda spec: layout_cost(spec, kernel), default=None)


def closest_conv_factors(channels: int, out: Pair, kernel: Sequence[int], rank: int) -> FactorSpec:
    """Return the layout whose parameters are nearest to the nearest-square pair's."""
    inp = nearest_pair(channels * prod(kernel))
    wanted = FactorSpec(out=out, inp=inp, rank=rank).params
    return min(
        every_factors(channels, (out,), kernel, rank),
        key=lambda spec: (abs(spec.params - wanted), layout_cost(spec, kernel)),
    )


def fast_conv_factors(channels: int, outputs: int, kernel: Sequence[int], rank: int) -> FactorSpec:
    """Return the cheapest layout among those that give nothing up: at most a tenth more
    parameters than the nearest-square pair, and terms that reach at least its matrix rank."""
    kernel = tuple(kernel)
    out = nearest_pair(outputs)
    square = FactorSpec(out=out, inp=nearest_pair(channels * prod(kernel)), rank=rank)
    within = [
        spec
        for spec in every_factors(channels, divisor_pairs(outputs), kernel, rank)
        if spec.params <= FAST_SLACK * square.params and spec.reach >= square.reach
    ]
    if within:
        return min(within, key=lambda spec: (layout_cost(spec, kernel), spec.params))
    return closest_conv_factors(channels, out, kernel, rank)


def every_factors(
    channels: int, outs: Sequence[Pair], kernel: Sequence[int], rank: int
) -> Iterator[FactorSpec]:
    """Yield every choice of ``outs``, of divisors of the channels, and of who owns the axes."""
    for axes in every_axes(kernel):
        s1, s2 = _places(kernel, axes)
        for c1, c2 in divisor_pairs(channels):
            for out in outs:
                yield FactorSpec(out=out, inp=(c1 * s1, c2 * s2), rank=rank, axes=axes)


def layout_cost(spec: FactorSpec, kernel: Sequence[int], stride: Sequence[int] = ()) -> float:
    """Estimate the work at one output position, in multiply-adds; for choosing, not reporting."""
    return min(_order_cost(spec, kernel, stride, first) for first in (1, 2))


def first_factor(spec: FactorSpec, kernel: Sequence[int], stride: Sequence[int]) -> Literal[1, 2]:
    """Return which factor is applied first: the order of less work."""
    one, two = (_order_cost(spec, kernel, stride, first) for first in (1, 2))
    return 1 if one <= two else 2


def _order_cost(
    spec: FactorSpec, kernel: Sequence[int], stride: Sequence[int], first: int
) -> float:
    lay = layout_of(spec, kernel)
    (k1, k2), rank = spec.out, spec.rank
    stride = tuple(stride) or (1,) * len(kernel)
    # Positions per output position while only the first factor's axes are strided.
    early = prod(step for step, owner in zip(stride, spec.axes, strict=True) if owner != first)
    one, two = factor_costs(spec, kernel, first)
    if first == 1:
        return early * one + COPY * early * k1 * rank * lay.c2 + two
    return early * two + COPY * early * lay.c1 * rank * k2 + one


def factor_costs(spec: FactorSpec, kernel: Sequence[int], first: int) -> tuple[float, float]:
    """Return the work of each factor at one position, given which comes first."""
    lay = layout_of(spec, kernel)
    (k1, k2), rank = spec.out, spec.rank
    if first == 1:
        return _one(lay, k1 * rank, lay.c1, lay.c2), k1 * _two(lay, k2, rank * lay.c2)
    return _one(lay, k1, lay.c1 * rank, k2), lay.c1 * _two(lay, k2 * rank, lay.c2)


def _one(lay: Layout, rows: int, columns: int, passive: int) -> float:
    """Work of the first factor: a product, or a convolution beside a passive channel axis, which
    must be moved out of the way and back."""
    if lay.s1 == 1:
        return rows * columns * passive
    move = COPY * passive * (rows + columns)
    return lanes(rows) * columns * lay.s1 * passive + move


def _two(lay: Layout, rows: int, columns: int) -> float:
    return (lanes(rows) if lay.s2 > 1 else rows) * columns * lay.s2


def lanes(rows: int) -> int:
    """Return the output channels that a thin convolution of so many computes."""
    return LANES * ceil(rows / LANES)


def conv_macs(
    spec: FactorSpec,
    *,
    in_size: Sequence[int],
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Padding,
    dilation: Sequence[int],
    padding_mode: str,
) -> int:
    """Return the multiply-adds of one example, in the order that the layer takes.

    Args:
        in_size: spatial size of the input.
    """
    lay = layout_of(spec, kernel_size)
    (k1, k2), rank = spec.out, spec.rank
    sizes = out_sizes(in_size, kernel_size, stride, padding, dilation)
    first = first_factor(spec, kernel_size, stride)
    if prod(kernel_size) == 1:
        early = prod(sizes)  # strided before anything else
    else:
        front, _ = split_padding(kernel_size, padding, dilation, padding_mode)
        early = prod(
            done if owner == first else raw + before + after
            for done, raw, (before, after), owner in zip(
                sizes, in_size, front, spec.axes, strict=True
            )
        )
    last = prod(sizes)
    if first == 1:
        one = early * k1 * rank * lay.c1 * lay.s1 * lay.c2
        two = last * k1 * k2 * rank * lay.c2 * lay.s2
    else:
        two = early * lay.c1 * k2 * rank * lay.c2 * lay.s2
        one = last * k1 * lay.c1 * rank * lay.s1 * k2
    return one + two


def split_padding(
    kernel: Sequence[int], padding: Padding, dilation: Sequence[int], mode: str
) -> tuple[list[tuple[int, int]], tuple[int, ...]]:
    """Say which padding is put on before the first factor, and which each factor puts on itself.

    Zeros pass through a product over channels, so that a factor can pad its own axes. Other
    modes, uneven padding, and kernels that run as products want it done before.

    Returns:
        (before, after) of each axis to put on first, and what is left for the convolutions.
    """
    none = [(0, 0)] * len(kernel)
    if padding == "valid":
        return none, (0,) * len(kernel)
    if isinstance(padding, str):
        totals = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
        sides = [(total // 2, total - total // 2) for total in totals]
    else:
        pads = (padding,) * len(kernel) if isinstance(padding, int) else tuple(padding)
        sides = [(pad, pad) for pad in pads]
    even = all(before == after for before, after in sides)
    if mode == "zeros" and even and prod(kernel) > 1:
        return none, tuple(before for before, _ in sides)
    return sides, (0,) * len(kernel)


def out_sizes(
    in_size: Sequence[int],
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Padding,
    dilation: Sequence[int],
) -> tuple[int, ...]:
    """Return the spatial size that a convolution gives out."""
    if padding == "same":
        return tuple(in_size)
    if isinstance(padding, str):
        padding = 0
    pads = (padding,) * len(kernel) if isinstance(padding, int) else tuple(padding)
    return tuple(
        (n + 2 * p - d * (k - 1) - 1) // s + 1
        for n, k, s, p, d in zip(in_size, kernel, stride, pads, dilation, strict=True)
    )
