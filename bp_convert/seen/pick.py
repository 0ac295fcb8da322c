"""Which rows of a call are looked at: what a weight multiplies, without what is padding.

Of a convolution's input these are patches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bp_convert.kron.conv_layout import out_sizes, split_padding
from bp_convert.kron.transposed_layout import transposed_sizes


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
    """Return patches (n, C * places) of inputs (N, C, *size) or (C, *size): what each place of
    the output is a product of.

    Only the patches that are picked are ever laid out.
    """
    axes = len(module.kernel_size)
    if x.dim() == axes + 1:
        x = x.unsqueeze(0)
    if not module.transposed:
        x = _padded(module, x)
    sizes = _out_sizes(module, x.shape[2:])
    chosen = pick.some(prod(sizes), max(1, pick.limit // max(1, len(x))))
    flat = torch.arange(prod(sizes)) if chosen is None else chosen
    where = torch.unravel_index(flat, sizes)
    index: list[Any] = [slice(None), slice(None)]
    there = torch.ones(len(flat), *[1] * axes, dtype=torch.bool, device=x.device)
    for axis, at in enumerate(where):
        shape = [len(flat)] + [1] * axes
        shape[axis + 1] = module.kernel_size[axis]
        reach, inside = _reach(module, axis, at, x.shape[2 + axis])
        index.append(reach.view(shape).to(x.device))
        if inside is not None:
            there = there & inside.view(shape).to(x.device)
    patches = x[tuple(index)]  # (N, C, P, *kernel)
    if module.transposed:
        patches = patches * there
    columns = x.shape[1] * prod(module.kernel_size)
    return patches.transpose(1, 2).reshape(len(x) * len(flat), columns)


def _out_sizes(module: Any, sizes: Sequence[int]) -> tuple[int, ...]:
    kernel, stride, dilation = module.kernel_size, module.stride, module.dilation
    if module.transposed:
        more = module.output_padding
        return transposed_sizes(sizes, kernel, stride, module.padding, dilation, more)
    return out_sizes(sizes, kernel, stride, 0, dilation)


def _reach(module: Any, axis: int, at: Tensor, size: int) -> tuple[Tensor, Tensor | None]:
    """Return along one axis which input (P, k) each kernel place multiplies for the outputs
    ``at`` (P), and of a transposed convolution which of them there are; the others are zeros."""
    places = torch.arange(module.kernel_size[axis]) * module.dilation[axis]
    stride = module.stride[axis]
    if not module.transposed:
        return at[:, None] * stride + places, None
    from_ = at[:, None] + module.padding[axis] - places
    found = torch.div(from_, stride, rounding_mode="floor")
    inside = (from_ % stride == 0) & (found >= 0) & (found < size)
    return found.clamp(0, max(0, size - 1)), inside


def _padded(module: Any, x: Tensor) -> Tensor:
    """Put a convolution's padding onto its input."""
    front, own = split_padding(
        module.kernel_size, module.padding, module.dilation, module.padding_mode
    )
    both = reversed([*zip(front, own, strict=True)])  # F.pad: last axis first
    sides = [side + more for pair, more in both for side in pair]
    mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
    return F.pad(x, sides, mode=mode) if any(sides) else x
