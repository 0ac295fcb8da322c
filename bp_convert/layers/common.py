"""What every bilinear layer needs: a random start, checked factors, and nested inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from bp_convert.errors import FactorError
from bp_convert.values.factors import FactorSpec, Pair


def init_factors_(w1: Tensor, w2: Tensor, rank: int, variance: float) -> None:
    """Fill factors so that each entry of their Kronecker sum has the given variance, as a dense
    layer's would.

    An entry of the weight is a sum of R products of two independent entries, so its variance is
    R * var(w1) * var(w2); both factors get the same.
    """
    bound = (9 * variance / rank) ** 0.25  # var of uniform(-b, b) is b^2 / 3
    nn.init.uniform_(w1, -bound, bound)
    nn.init.uniform_(w2, -bound, bound)


def checked(layer: str, spec: FactorSpec, *, inputs: int, outputs: int) -> FactorSpec:
    """Return ``spec`` with its rank cut to full rank.

    Raises:
        FactorError: pairs whose products are not the layer's widths.
    """
    for side, pair, width in (("out", spec.out, outputs), ("in", spec.inp, inputs)):
        if pair[0] * pair[1] != width:
            raise wrong_pair(layer, side, pair, f"two factors of {width}")
    return spec.model_copy(update={"rank": min(spec.rank, spec.full_rank)})


def wrong_pair(layer: str, side: str, pair: Pair, allowed: str) -> FactorError:
    """Return the error for a pair that does not fit."""
    return FactorError(
        where=f"{layer}, pair {side}",
        found=f"{pair[0]} x {pair[1]} = {pair[0] * pair[1]}",
        allowed=allowed,
        fix="name factors whose product is the layer's width, or leave them out",
    )


def over_nested(layer: Callable[[Tensor], Tensor], input: Any) -> Tensor:
    """Apply a layer that maps (..., D) to (..., K) to all sequences (T_n, D) at once, as
    attention's fused path passes them."""
    if input.layout == torch.jagged:
        made: Tensor = torch.nested.nested_tensor_from_jagged(
            layer(input.values()), input.offsets(), input.lengths()
        )
        return made
    parts = input.unbind()  # (T_n, D) each
    rows = layer(torch.cat(parts))  # (sum of T_n, K)
    apart = torch.split(rows, [len(one) for one in parts])
    return torch.nested.as_nested_tensor(list(apart))
