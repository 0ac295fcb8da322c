"""Scales: of weights, so that squares stay within float32, and of the two factors of each term."""

from __future__ import annotations

from math import isfinite, log2

import torch
from torch import Tensor

EVEN = 2.0**20  # entries up to this, and down to one over it, are left as they are
FARTHEST = 60  # a scale is at most 4 to this power, so that it is a float32 itself
SEED = 1993


def unit(tensor: Tensor) -> tuple[Tensor, float]:
    """Return a tensor over a power of four that brings its largest entry near 1, and that power.

    Nothing is rounded. Tensors whose squares and products are safe as they are come back as they
    are, with 1; so do those of zeros, and those that hold what is not finite.
    """
    largest = max(map(abs, map(float, torch.aminmax(tensor)))) if tensor.numel() else 0.0
    power = power_of_four(largest)
    return (tensor if power == 1 else tensor / power), power


def power_of_four(largest: float) -> float:
    """Return the power of four nearest to a size; 1 for sizes that need no scale."""
    if not isfinite(largest) or largest == 0 or 1 / EVEN <= largest <= EVEN:
        return 1.0
    exponent = round(log2(largest) / 2)
    return float(4.0 ** max(-FARTHEST, min(FARTHEST, exponent)))


def balanced(w1: Tensor, w2: Tensor) -> tuple[Tensor, Tensor]:
    """Return the same terms with both factors of each of one norm, as training needs them: a step
    of an optimiser moves all entries about equally far, and beside a factor of large entries that
    throws the weight away.

    Of a term that is zero, w2 stays zero, and w1 gets entries of +1/Z and -1/Z where Z terms are
    zero. So a gradient arrives, and a step of s on w2 moves no entry of the weight by more than s,
    which is what it does to the weight of a dense layer. (Both factors at zero would never move;
    compare Hu et al., LoRA, ICLR 2022, section 4.1, where one is.)

    Shape:
        w1: (R, k1, d1); w2: (R, d2, k2).
    """
    one, two = _norms(w1), _norms(w2)  # (R,)
    zero = (one == 0) | (two == 0)
    ratio = torch.where(zero, 1.0, (two / torch.where(zero, 1.0, one)).sqrt())
    scale = ratio.to(w1.dtype)[:, None, None]
    w1, w2 = w1 * scale, w2 / scale
    count = int(zero.sum())
    if count:
        w1[zero] = _signs((count, *w1.shape[1:])).to(w1) / count
        w2[zero] = 0.0
    return w1, w2


def _norms(factors: Tensor) -> Tensor:
    """Return the norm of each term's factor, in float64: squares of small entries vanish."""
    norms: Tensor = torch.linalg.vector_norm(factors.flatten(1), dim=1, dtype=torch.float64)
    return norms


def _signs(shape: tuple[int, ...]) -> Tensor:
    """Return +1 and -1 at random, always the same."""
    generator = torch.Generator().manual_seed(SEED)
    return torch.randint(0, 2, shape, generator=generator, device="cpu") * 2.0 - 1
