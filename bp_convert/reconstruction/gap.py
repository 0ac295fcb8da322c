"""How far outputs are from those that were wanted, as a share of these."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

TINY = 1e-30
ALIKE = 1e-4  # relative difference of two runs in float32 that are the same


def chosen(values: Sequence[Tensor], mask: Tensor | None) -> list[Tensor]:
    """Return the numbers that count: of tensors (N, T, ...) those of unmasked tokens."""
    if mask is None:
        return list(values)
    there = [mask.to(one.device) if one.shape[:2] == mask.shape else None for one in values]
    return [one if at is None else one[at] for one, at in zip(values, there, strict=True)]


def squares(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return the squared errors, and the squared norms of what was wanted, of each tensor."""
    gaps = [(a.float() - b.float()).square().sum() for a, b in zip(found, wanted, strict=True)]
    sizes = [one.float().square().sum() for one in wanted]
    return torch.stack(gaps), torch.stack(sizes)


def relative(gaps: Tensor, sizes: Tensor, floor: Tensor | float = TINY) -> Tensor:
    """Return squared errors over squared norms, averaged over tensors.

    Args:
        floor: what they are divided by at least.
    """
    return (gaps / sizes.clamp(min=floor)).mean()


def alike(ones: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    """Return whether two runs gave the same but for rounding."""
    if [one.shape for one in ones] != [one.shape for one in others]:
        return False
    gaps, sizes = squares([one.detach() for one in ones], [one.detach() for one in others])
    return bool((gaps <= ALIKE**2 * sizes).all())
