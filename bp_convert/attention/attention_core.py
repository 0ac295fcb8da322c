"""What attention computes between its projections: masks, scores, and the mix of values."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Masks:
    """What queries may look at, as numbers that are added to scores.

    Attributes:
        scores: (L, S) or (N*H, L, S); None where all may be looked at.
        keys: (N, S), of keys that are padding.
        causal: no query looks at what comes later, and there is no other mask.
    """

    scores: Tensor | None = None
    keys: Tensor | None = None
    causal: bool = False

    @classmethod
    def of(
        cls,
        query: Tensor,
        attn_mask: Tensor | None,
        key_padding_mask: Tensor | None,
        *,
        is_causal: bool,
        need_weights: bool,
    ) -> Masks:
        """Read the masks of a call as torch's attention does.

        Raises:
            ValueError: a mask of neither booleans nor floats; ``is_causal`` without a mask.
        """
        if is_causal and attn_mask is None:
            raise ValueError("is_causal is a hint on attn_mask: give that mask, too")
        if is_causal and key_padding_mask is None and not need_weights:
            return cls(causal=True)
        given = (("attn_mask", attn_mask), ("key_padding_mask", key_padding_mask))
        scores, keys = (_added(name, mask, query.dtype) for name, mask in given)
        if keys is not None and keys.dim() == 1:
            keys = keys.unsqueeze(0)  # of one sequence
        return cls(scores, keys)

    def merged(self, heads: int, more: int) -> Tensor | None:
        """Return one mask that fits (N, H, L, S + more), the keys beyond S open to all."""
        scores = None if self.scores is None else F.pad(self.scores, (0, more))
        if scores is not None:
            each = (1, 1) if scores.dim() == 2 else (-1, heads)
            scores = scores.reshape(*each, *scores.shape[-2:])
        if self.keys is None:
            return scores
        keys = F.pad(self.keys, (0, more))[:, None, None]  # (N, 1, 1, S)
        return keys if scores is None else scores + keys


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    heads: int,
    masks: Masks,
    *,
    extra: tuple[Tensor, Tensor] | None = None,
    zero: bool = False,
    dropout: float = 0.0,
    need_weights: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Mix values by how queries match keys, in each head.

    Without weights it is torch's own ``scaled_dot_product_attention``.

    Args:
        extra: one more key and value for all, (1, 1, E) each.
        zero: append a key and a value of zeros.

    Shape:
        q: (N, L, E); k, v: (N, S, E); result: (N, L, E) and weights (N, H, L, S).
    """
    many, _, width = q.shape
    if extra is not None:
        ends = (one.expand(many, 1, width) for one in extra)
        k, v = (torch.cat(pair, 1) for pair in zip((k, v), ends, strict=True))
    if zero:
        k, v = (torch.cat([x, x.new_zeros(many, 1, width)], 1) for x in (k, v))
    mask = masks.merged(heads, (extra is not None) + zero)
    size = width // heads
    q, k, v = (x.view(many, x.shape[1], heads, size).transpose(1, 2) for x in (q, k, v))
    weights = None
    if need_weights:
        scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-2, -1)  # (N, H, L, S)
        weights = F.dropout((scores if mask is None else scores + mask).softmax(-1), dropout)
        mixed = weights @ v
    else:
        mixed = F.scaled_dot_product_attention(q, k, v, mask, dropout, masks.causal)
    # In memory by steps, as torch's own: dropout on what follows draws in that order.
    return mixed.permute(2, 0, 1, 3).flatten(2).transpose(0, 1), weights


def _added(name: str, mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    if mask is None or mask.is_floating_point():
        return mask
    if mask.dtype != torch.bool:
        raise ValueError(f"{name}: booleans or floats are taken, not {mask.dtype}")
    return torch.zeros_like(mask, dtype=dtype).masked_fill(mask, float("-inf"))
