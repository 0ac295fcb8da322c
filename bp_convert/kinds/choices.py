"""Which factor pairs and how many terms a weight gets: asked for, by a share, or any there are."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from bp_convert.errors import PlanError
from bp_convert.kron.conv_layout import Axes
from bp_convert.kron.policies import (
    fast_factors,
    lone_prime,
    low_rank_factors,
    paper_factors,
    rank_for_share,
)
from bp_convert.values.factors import FactorSpec, Pair
from bp_convert.values.literals import Policy
from bp_convert.values.settings import Pairs, Rank

Factors = dict[str, FactorSpec]  # by role
Widths = tuple[int, int]  # (inputs, outputs)


@dataclass(frozen=True)
class Ask:
    """What the settings ask of one layer."""

    pairs: Policy | Pairs = "fast"
    rank: Rank = 1

    @property
    def by_share(self) -> bool:
        """Whether a share of the parameters is to be spent, on whatever form costs least time."""
        return self.pairs == "fast" and isinstance(self.rank, float)


@dataclass(frozen=True)
class Choices:
    """Every pair that a weight may be given: any of ``outs`` with any of ``ins``.

    Attributes:
        outs: pairs of the outputs, by rising first factor.
        ins: pairs of the columns by who owns the kernel's axes, by rising first factor.
        kernel: sizes of the kernel's axes; none for a matrix.
    """

    outs: tuple[Pair, ...]
    ins: dict[Axes, tuple[Pair, ...]]
    kernel: tuple[int, ...] = ()

    def specs(self) -> Iterator[FactorSpec]:
        """Yield all of them, with one term."""
        for axes, pairs in self.ins.items():
            for inp in pairs:
                for out in self.outs:
                    yield FactorSpec(out=out, inp=inp, axes=axes)


def whole(inputs: int, outputs: int, axes: Axes = ()) -> FactorSpec:
    """Return the spec of a weight that stays as it is: one term whose first factor is a 1."""
    return FactorSpec(out=(1, outputs), inp=(1, inputs), axes=axes)


def matrix_factors(widths: Widths, ask: Ask) -> FactorSpec:
    """Return the spec of a matrix (K, D) where the pair is not named: by share or by policy."""
    inputs, outputs = widths
    if ask.by_share:
        spec = low_rank_factors(inputs, outputs, 1)
    elif ask.pairs == "fast":
        spec = fast_factors(inputs, outputs, 1)
    else:
        spec = paper_factors(inputs, outputs, 1)
    return with_rank(spec, ask.rank, inputs * outputs)


def named_pairs(where: str, pairs: Pairs, widths: Widths) -> FactorSpec:
    """Check explicit pairs against the widths of a matrix.

    Raises:
        PlanError: a product that is not the width.
    """
    inputs, outputs = widths
    for side, pair, width in (("out", pairs.out, outputs), ("in", pairs.inp, inputs)):
        if pair[0] * pair[1] != width:
            raise PlanError(
                where=where,
                found=f"pairs {side} {pair[0]} x {pair[1]} = {pair[0] * pair[1]}",
                allowed=f"two factors of {width}",
                fix=f"give {side} as two numbers whose product is {width}",
            )
    return FactorSpec(out=pairs.out, inp=pairs.inp)


def with_rank(spec: FactorSpec, rank: Rank, dense: int) -> FactorSpec:
    """Give ``spec`` its number of terms; a share counts against the ``dense`` weight's size."""
    terms = rank_for_share(spec, rank * dense) if isinstance(rank, float) else rank
    return spec.model_copy(update={"rank": min(terms, spec.full_rank)})


def prime_reason(widths: Widths, ask: Ask) -> str | None:
    """Say which width has no factor pair, where the pair is the planner's to choose."""
    if isinstance(ask.pairs, Pairs) or ask.by_share:
        return None
    lone = [width for width in widths if lone_prime(width)]
    return f"prime width {lone[0]} has no factor pair" if lone else None
