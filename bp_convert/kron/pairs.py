"""Factor pairs of a width."""

from __future__ import annotations

from functools import lru_cache
from math import isqrt

from bp_convert.errors import FactorError
from bp_convert.values.factors import Pair


@lru_cache(maxsize=4096)
def nearest_pair(n: int) -> Pair:
    """Return the factor pair (a, b) of ``n`` nearest to square: a * b = n, a <= b.

    ``a`` is the largest divisor not above the square root (paper, section III-A: "the closest
    positive integers"); a prime p gives (1, p).

    Raises:
        FactorError: ``n`` is not a positive integer.
    """
    check_positive(n, "width")
    a = next(a for a in range(isqrt(n), 0, -1) if n % a == 0)
    return a, n // a


@lru_cache(maxsize=4096)
def divisor_pairs(n: int) -> tuple[Pair, ...]:
    """Return every ordered pair (a, b) with a * b = n, by rising a.

    Raises:
        FactorError: ``n`` is not a positive integer.
    """
    check_positive(n, "width")
    small = [a for a in range(1, isqrt(n) + 1) if n % a == 0]
    large = [n // a for a in reversed(small) if a * a != n]
    return tuple((a, n // a) for a in (*small, *large))


@lru_cache(maxsize=4096)
def covering_pair(n: int) -> Pair:
    """Return the pair (a, b), a <= b, of smallest a + b whose product is at least ``n``.

    For tables whose row number may be padded, such as a vocabulary with a large prime factor.

    Raises:
        FactorError: ``n`` is not a positive integer.
    """
    check_positive(n, "width")
    a = isqrt(n)
    b = -(-n // a)
    return (a, b) if a <= b else (b, a)


def check_positive(n: int, what: str) -> None:
    """Refuse a width, or a number of terms, below 1.

    Raises:
        FactorError: ``n`` is not a positive integer.
    """
    if not isinstance(n, int) or n < 1:
        raise FactorError(
            where="factors",
            found=f"a {what} of {n}",
            allowed="a positive integer",
            fix="give the layer at least one input, one output and one Kronecker term",
        )
