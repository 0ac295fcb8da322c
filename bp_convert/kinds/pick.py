"""Which rows of a call are looked at: what a weight multiplies, without what is padding.

Of a convolution's input these are patches.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bp_convert.kron.conv_layout import out_sizes, split_padding


@dataclass(frozen=True)
class Pick:
    """Which rows of a call are looked at.

    Attributes:
        limit: rows to take at most; the choice is random and the same for equal seeds.
        seed: of that choice.
        mask: (N, T) of which tokens count; None where all do.
    """

    limit: int
    seed: int = 0
    mask: Tensor | None = None

    def some(self, count: int, limit: int | None = None) -> Tensor | None:
        """Return indices of at most ``limit`` of ``count`` things; None for all of them."""
        limit = self.limit if limit is None else limit
        if count <= limit:
            return None
        generator = torch.Generator().manual_seed(self.seed)
        return torch.randperm(count, generator=generator)[:limit].sort().values


def linear_rows(x: Tensor, pick: Pick) -> Tensor:
    """Return rows (n, D) of inputs (..., D), without those of padding tokens."""
    rows = x.reshape(-1, x.shape[-1])
    if pick.mask is not None and x.shape[:-1] == pick.mask.shape:
        rows = rows[pick.mask.reshape(-1).to(x.device, torch.bool)]
    chosen = pick.some(len(rows))
    return rows if chosen is None else rows[chosen.to(rows.device)]


def conv_rows(module: Any, x: Tensor, pick: Pick) -> Tensor:
    """Return patches (n, C * places) of inputs (N, C, *size) or (C, *size).

    Only the patches that are picked are ever laid out.
    """
    axes = len(module.kernel_size)
    if x.dim() == axes + 1:
        x = x.unsqueeze(0)
    x = _padded(module, x)
    sizes = out_sizes(x.shape[2:], module.kernel_size, module.stride, 0, module.dilation)
    chosen = pick.some(prod(sizes), max(1, pick.limit // max(1, len(x))))
    flat = torch.arange(prod(sizes)) if chosen is None else chosen
    where = torch.unravel_index(flat, sizes)
    index: list[Any] = [slice(None), slice(None)]
    for axis, (at, k, s, d) in enumerate(
        zip(where, module.kernel_size, module.stride, module.dilation, strict=True)
    ):
        shape = [len(flat)] + [1] * axes
        shape[axis + 1] = k
        reach = at[:, None] * s + torch.arange(k) * d  # (P, k)
        index.append(reach.view(shape).to(x.device))
    patches = x[tuple(index)]  # (N, C, P, *kernel)
    columns = x.shape[1] * prod(module.kernel_size)
    return patches.transpose(1, 2).reshape(len(x) * len(flat), columns)


def _padded(module: Any, x: Tensor) -> Tensor:
    """Put a convolution's padding onto its input."""
    front, own = split_padding(
        module.kernel_size, module.padding, module.dilation, module.padding_mode
    )
    both = reversed([*zip(front, own, strict=True)])  # F.pad: last axis first
    sides = [side + more for pair, more in both for side in pair]
    mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
    return F.pad(x, sides, mode=mode) if any(sides) else x
