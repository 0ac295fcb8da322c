"""Random starts whose weight, a sum of products, varies as the dense layer's would."""

from __future__ import annotations

from torch import Tensor, nn


def init_factors_(w1: Tensor, w2: Tensor, rank: int, variance: float) -> None:
    """Fill factors so that each entry of their Kronecker sum has the given variance.

    An entry of the weight is a sum of R products of two independent entries, so its variance is
    R * var(w1) * var(w2); both factors get the same.
    """
    bound = (9 * variance / rank) ** 0.25  # var of uniform(-b, b) is b^2 / 3
    nn.init.uniform_(w1, -bound, bound)
    nn.init.uniform_(w2, -bound, bound)
