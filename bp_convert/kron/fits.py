"""Whether factor pairs fit the widths of a weight."""

from __future__ import annotations

from bp_convert.errors import FactorError
from bp_convert.values.factors import FactorSpec, Pair


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
