"""Layers on nested tensors: sequences of unequal length, as attention's fused path passes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def over_nested(layer: Callable[[Tensor], Tensor], input: Any) -> Tensor:
    """Apply a layer that maps (..., D) to (..., K) to all sequences (T_n, D) at once."""
    if input.layout == torch.jagged:
        made: Tensor = torch.nested.nested_tensor_from_jagged(
            layer(input.values()), input.offsets(), input.lengths()
        )
        return made
    parts = input.unbind()  # (T_n, D) each
    rows = layer(torch.cat(parts))  # (sum of T_n, K)
    apart = torch.split(rows, [len(one) for one in parts])
    return torch.nested.as_nested_tensor(list(apart))
