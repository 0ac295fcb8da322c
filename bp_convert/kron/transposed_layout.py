"""What of a convolution's layout is another where it is transposed: sizes grow from step to step,
so that the work of each factor hangs on the positions before it."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Literal

from bp_convert.kron.conv_layout import COPY, factor_costs, layout_of
from bp_convert.values.factors import FactorSpec

Sizes = tuple[int, ...]


def transposed_sizes(
    in_size: Sequence[int],
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    output_padding: Sequence[int],
) -> Sizes:
    """Return the spatial size that a transposed convolution gives out."""
    every = zip(in_size, kernel, stride, padding, dilation, output_padding, strict=True)
    return tuple((n - 1) * s - 2 * p + d * (k - 1) + more + 1 for n, k, s, p, d, more in every)


def first_transposed(
    spec: FactorSpec, kernel: Sequence[int], stride: Sequence[int]
) -> Literal[1, 2]:
    """Return which factor is applied first: the order of less work at one input position."""
    one, two = _costs(spec, kernel, stride)
    return 1 if one <= two else 2


def transposed_cost(spec: FactorSpec, kernel: Sequence[int], stride: Sequence[int]) -> float:
    """Estimate the work at one input position, in multiply-adds; for choosing, not reporting."""
    return min(_costs(spec, kernel, stride))


def _costs(spec: FactorSpec, kernel: Sequence[int], stride: Sequence[int]) -> list[float]:
    lay = layout_of(spec, kernel)
    (k1, k2), rank = spec.out, spec.rank
    costs = []
    for first in (1, 2):
        # Positions that one becomes once the first factor's axes have grown.
        grown = prod(step for step, owner in zip(stride, spec.axes, strict=True) if owner == first)
        one, two = factor_costs(spec, kernel, first)
        between = grown * (k1 * rank * lay.c2 if first == 1 else lay.c1 * rank * k2)
        early, late = (one, two) if first == 1 else (two, one)
        costs.append(early + grown * late + COPY * between)
    return costs


def transposed_macs(
    spec: FactorSpec,
    in_size: Sequence[int],
    out_size: Sequence[int],
    kernel: Sequence[int],
    stride: Sequence[int],
) -> int:
    """Return the multiply-adds of one example, in the order that the layer takes."""
    lay = layout_of(spec, kernel)
    (k1, k2), rank = spec.out, spec.rank
    first = first_transposed(spec, kernel, stride)
    between = prod(
        after if owner == first else before
        for before, after, owner in zip(in_size, out_size, spec.axes, strict=True)
    )
    if first == 1:
        one = prod(in_size) * k1 * rank * lay.c1 * lay.s1 * lay.c2
        two = between * k1 * k2 * rank * lay.c2 * lay.s2
    else:
        two = prod(in_size) * lay.c1 * k2 * rank * lay.c2 * lay.s2
        one = between * k1 * lay.c1 * rank * lay.s1 * k2
    return one + two
