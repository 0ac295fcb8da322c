"""Tensors on a grid as bytes, and back."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from bp_convert.bits.grid import SCALE, Cast, Form, Grid, found_again


def pack(tensor: Tensor, form: Form) -> dict[str, Tensor] | None:
    """Return the parts that a tensor is stored in, by a short name; None where its numbers do not
    lie on the grid.

    A grid's codes are one row of bytes: for each width of ``Grid.planes``, these bits of all codes,
    the first in the lowest. Its scales are (rows, groups).
    """
    if isinstance(form, Cast):
        near = tensor.detach().to(form.dtype)
        return {"numbers": near} if torch.equal(near.to(tensor.dtype), tensor.detach()) else None
    found = found_again(tensor, form)
    if found is None:
        return None
    codes, scales = found
    whole = form.flat(codes, tensor.shape).reshape(-1)
    return {"codes": packed(whole, form), "scales": scales.squeeze(2).to(SCALE)}


def packed(codes: Tensor, grid: Grid) -> Tensor:
    """Return codes (n) as bytes."""
    raw = (codes - grid.low).to(torch.uint8)
    planes = []
    shift = 0
    for width in grid.planes():
        each = 8 // width
        part = (raw >> shift) & ((1 << width) - 1)
        part = torch.nn.functional.pad(part, (0, -len(part) % each)).view(-1, each)
        places = torch.arange(each, dtype=torch.uint8) * width
        planes.append((part << places).sum(1, dtype=torch.uint8))
        shift += width
    return torch.cat(planes)


def unpacked(data: Tensor, grid: Grid, count: int) -> Tensor:
    """Return ``count`` codes (n), int8."""
    raw = torch.zeros(count, dtype=torch.uint8, device=data.device)
    shift = start = 0
    for width in grid.planes():
        each = 8 // width
        size = -(-count // each)
        places = torch.arange(each, dtype=torch.uint8, device=data.device) * width
        part = (data[start : start + size, None] >> places) & ((1 << width) - 1)
        raw |= part.reshape(-1)[:count] << shift
        start, shift = start + size, shift + width
    return (raw.to(torch.int16) + grid.low).to(torch.int8)


def unpack(
    parts: dict[str, Tensor], form: Form, shape: Sequence[int], dtype: torch.dtype
) -> Tensor:
    """Undo ``pack``.

    Raises:
        ValueError: parts of other sizes.
    """
    if isinstance(form, Cast):
        return parts["numbers"].to(dtype)
    rows, many, each = form.layout(shape)
    count = 1
    for size in shape:
        count *= size
    codes, scales = parts["codes"], parts["scales"]
    sizes = sum(-(-count * width // 8) for width in form.planes())
    if codes.shape != (sizes,) or scales.shape != (rows, many):
        raise ValueError(f"codes {tuple(codes.shape)} and scales {tuple(scales.shape)}")
    flat = unpacked(codes, form, count).view(rows, -1)
    each_scale = scales.float().repeat_interleave(each, 1)[:, : flat.shape[1]]
    return form.numbers(flat, each_scale).view(*shape).to(dtype)
