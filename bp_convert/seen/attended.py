"""What each projection of an attention sees in a call: rows, and which of them count."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from bp_convert.attention.attention import biases_of, extra_of, matrices_of
from bp_convert.attention.attention_core import Masks, attend

Seen = tuple[Tensor, bool]  # rows (N, T, D), and whether they are those of keys


@dataclass(frozen=True)
class Attended:
    """What a call is given."""

    query: Tensor
    key: Tensor
    value: Tensor
    masks: Masks
    alone: bool  # queries, keys and values are one tensor

    @classmethod
    def of(
        cls,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> Attended:
        """Read the arguments of a call."""
        masks = Masks.of(
            query, attn_mask, key_padding_mask, is_causal=is_causal, need_weights=need_weights
        )
        return cls(query, key, value, masks, alone=query is key is value)

    def batch_first(self, module: Any) -> Attended:
        """Return the same as (N, L, E), (N, S, kdim) and (N, S, vdim)."""
        if self.query.dim() == 3 and module.batch_first:
            return self
        single = self.query.dim() == 2
        query, key, value = (
            one.unsqueeze(0) if single else one.transpose(0, 1)
            for one in (self.query, self.key, self.value)
        )
        return replace(self, query=query, key=key, value=value)

    @property
    def counts(self) -> Tensor | None:
        """Which keys are no padding, (N, S); None where all are keys."""
        pads = self.masks.keys
        return None if pads is None else pads != float("-inf")

    def seen(self, module: nn.MultiheadAttention) -> dict[str, Seen]:
        """Return what each projection multiplies, by role; call it on what is batch-first."""
        tensors = dict(module.named_parameters())
        weights, biases = matrices_of(tensors), biases_of(tensors)
        given = {"q": self.query, "k": self.key, "v": self.value}
        q, k, v = (F.linear(x, weights[role], biases.get(role)) for role, x in given.items())
        given["out"], _ = attend(
            *(q, k, v, module.num_heads, self.masks),
            extra=extra_of(module),
            zero=module.add_zero_attn,
        )
        return {role: (rows, self.alone or role in "kv") for role, rows in given.items()}
