"""The patches of its input that a convolution's weight multiplies."""

from __future__ import annotations

from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bp_convert.kinds.pick import Pick
from bp_convert.kron.conv_layout import out_sizes, split_padding


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
