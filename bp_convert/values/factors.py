"""How one weight matrix is factored."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from bp_convert.values.base import Value

Natural = Annotated[int, Field(ge=1)]
Pair = tuple[Natural, Natural]


class FactorSpec(Value):
    """The pairs and the number of terms of ``weight = sum_r kron(w1[r], w2[r]^T)``.

    ``w1`` is (rank, k1, d1) and ``w2`` is (rank, d2, k2), with ``out = (k1, k2)`` and
    ``in = (d1, d2)``; paper, eq. (4) for ``rank = 1``.

    For a convolution, ``axes`` says which factor (1 or 2) owns each spatial axis of the kernel:
    ``d1 = c1 * s1`` and ``d2 = c2 * s2`` where ``s1`` and ``s2`` are the products of the kernel
    sizes that each factor owns and ``c1 * c2`` is the number of input channels. ``axes`` is empty
    for everything else.
    """

    out: Pair
    inp: Pair = Field(alias="in")
    rank: Natural = 1
    axes: tuple[Literal[1, 2], ...] = ()

    @property
    def params(self) -> int:
        """Numbers held by the factors, without the bias."""
        (k1, k2), (d1, d2) = self.out, self.inp
        return self.rank * (k1 * d1 + d2 * k2)

    @property
    def full_rank(self) -> int:
        """The number of terms that makes any weight exact: min(k1*d1, k2*d2)."""
        (k1, k2), (d1, d2) = self.out, self.inp
        return min(k1 * d1, k2 * d2)

    @property
    def reach(self) -> int:
        """The largest matrix rank that one term can have: min(k1, d1) * min(k2, d2).

        A pair such as 1x512 with 512x1 has few parameters and runs fast, but squeezes everything
        through a single number.
        """
        (k1, k2), (d1, d2) = self.out, self.inp
        return min(k1, d1) * min(k2, d2)

    def __str__(self) -> str:
        (k1, k2), (d1, d2) = self.out, self.inp
        return f"{k1}x{k2}|{d1}x{d2} R{self.rank}"
