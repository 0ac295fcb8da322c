"""Which factor pairs a width gets where the user names none."""

from __future__ import annotations

from math import isqrt

from bp_convert.kron.contract import bilinear_macs
from bp_convert.kron.conv_layout import FAST_SLACK, every_factors
from bp_convert.kron.pairs import check_positive, divisor_pairs, nearest_pair
from bp_convert.values.factors import FactorSpec, Pair

# Widths up to here are worth factoring even when they are prime: (1, 7) is still a small factor.
SMALL_PRIME = 10


def lone_prime(width: int) -> bool:
    """Return whether ``width`` is a prime too large to be left whole in one factor."""
    return width > SMALL_PRIME and nearest_pair(width)[0] == 1


def scaled_pair(width: int, before: int) -> Pair:
    """Return the paper's pair for a convolution widened from ``before`` to ``width`` channels.

    Where the widening is a square a^2, both factors of the original pair grow by a (paper,
    section III-D); otherwise the new width is factored afresh.
    """
    ratio, rest = divmod(width, before)
    a = isqrt(ratio)
    if rest or a < 2 or a * a != ratio:
        return nearest_pair(width)
    k1, k2 = nearest_pair(before)
    return a * k1, a * k2


def paper_factors(inputs: int, outputs: int, rank: int) -> FactorSpec:
    """Return the nearest-square pairs of a D -> K projection.

    Raises:
        FactorError: a width or a rank below 1.
    """
    check_positive(rank, "rank")
    return FactorSpec(out=nearest_pair(outputs), inp=nearest_pair(inputs), rank=rank)


def fast_factors(inputs: int, outputs: int, rank: int) -> FactorSpec:
    """Return the pairs of fewest multiply-adds among those that give nothing up.

    They hold at most a tenth more parameters than the nearest-square pairs, and a term of theirs
    reaches at least the same matrix rank.
    """
    square = paper_factors(inputs, outputs, rank)
    return min(
        (
            spec
            for spec in every_factors(inputs, divisor_pairs(outputs), (), rank)
            if spec.params <= FAST_SLACK * square.params and spec.reach >= square.reach
        ),
        key=lambda spec: (bilinear_macs(spec), spec.params, spec.out, spec.inp),
    )


def low_rank_factors(inputs: int, outputs: int, rank: int) -> FactorSpec:
    """Return the truncated-SVD form, which is the Kronecker sum of a column and a row."""
    return FactorSpec(out=(outputs, 1), inp=(1, inputs), rank=rank)


def rank_for_share(spec: FactorSpec, budget: float) -> int:
    """Return the largest number of terms whose factors hold at most ``budget`` numbers (>= 1)."""
    one_term = spec.model_copy(update={"rank": 1}).params
    return max(1, min(spec.full_rank, int(budget // one_term)))
