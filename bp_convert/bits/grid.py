"""Grids of few bits: numbers of a weight that share a scale, and the codes that they round to.

A weight of shape (A, ..., Z) is read as rows: its last axes, as many as hold 32 numbers, but never
the first. int8 has a scale a row; int4 and int3 have one for each group of about 32 numbers of a
row. A scale has the sign that lets the number of the largest size take the code
``-2^(bits - 1)``, which has no positive counterpart, and is a bfloat16: its product with a code is
a float32 without rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, prod

import torch
from torch import Tensor

GROUP = 32
LEAST = 512  # numbers below which a tensor stays as it is: its scales and its place cost as much
SHRUNK = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7)  # times the scale that clips nothing
SCALE = torch.bfloat16
COARSE = 8  # bits below which rounding is made up for; with more too little is lost
SNAP = 2e-3  # of a step, by which numbers may miss a grid that they are taken to lie on


@dataclass(frozen=True)
class Grid:
    """Codes of so many bits, with a scale for each ``group`` numbers of a row; 0 for each row."""

    bits: int
    group: int = 0

    @property
    def low(self) -> int:
        """The least code; the largest is one less than its size."""
        return -(1 << (self.bits - 1))

    def layout(self, shape: Sequence[int]) -> tuple[int, int, int]:
        """Return the rows of a tensor, the groups of each, and the numbers of a group; the last
        group may be shorter."""
        length = 1
        for size in reversed(shape[1:]):
            length *= size
            if length >= GROUP:
                break
        many = max(1, round(length / self.group)) if self.group else 1
        each = ceil(length / many)
        return prod(shape) // max(1, length), ceil(length / each), each

    def nbytes(self, shape: Sequence[int]) -> int:
        """Count the bytes of codes and scales."""
        rows, many, _ = self.layout(shape)
        return sum(-(-prod(shape) * width // 8) for width in self.planes()) + 2 * rows * many

    def planes(self) -> tuple[int, ...]:
        """Return the widths that a code's bits are packed in: those that share bytes evenly."""
        return tuple(width for width in (8, 4, 2, 1) if self.bits & width)

    def grouped(self, tensor: Tensor) -> Tensor:
        """Return a tensor's numbers by group, (rows, groups, numbers), short ones filled up with
        zeros."""
        rows, many, each = self.layout(tensor.shape)
        flat = tensor.reshape(rows, -1)
        spare = many * each - flat.shape[1]
        return torch.nn.functional.pad(flat, (0, spare)).view(rows, many, each)

    def flat(self, groups: Tensor, shape: Sequence[int]) -> Tensor:
        """Undo ``grouped``."""
        rows = self.layout(shape)[0]
        length = prod(shape) // max(1, rows)
        return groups.flatten(1)[:, :length].reshape(*shape)

    def codes(self, numbers: Tensor, scales: Tensor) -> Tensor:
        """Return the nearest codes, as floating-point numbers; 0 where the scale is 0."""
        safe = torch.where(scales == 0, torch.ones_like(scales), scales)
        found = (numbers / safe).round().clamp(self.low, -self.low - 1)
        return torch.where(scales == 0, torch.zeros_like(found), found)

    @staticmethod
    def numbers(codes: Tensor, scales: Tensor) -> Tensor:
        """Return what codes stand for; zeros have no sign."""
        return codes * scales + 0.0

    def nearest(self, numbers: Tensor, scales: Tensor) -> Tensor:
        """Return the nearest numbers on the grid."""
        return self.numbers(self.codes(numbers, scales), scales)

    def scales(self, tensor: Tensor) -> Tensor:
        """Return for each number the scale that rounds its group with the least squared error."""
        groups = self.grouped(tensor.detach().float())
        at = groups.abs().argmax(2, keepdim=True)
        whole = groups.gather(2, at) / self.low  # (rows, groups, 1)
        best = torch.full_like(whole, float("inf"))
        found = torch.zeros_like(whole)
        for shrunk in SHRUNK if self.bits < 8 else SHRUNK[:1]:
            tried = (whole * shrunk).to(SCALE).float()
            gap = (self.codes(groups, tried) * tried - groups).square().sum(2, keepdim=True)
            better = gap < best
            best, found = torch.where(better, gap, best), torch.where(better, tried, found)
        return self.flat(found.expand_as(groups), tensor.shape)

    def rounded(self, tensor: Tensor, scales: Tensor | None = None) -> Tensor:
        """Return the nearest numbers on the grid, in the tensor's own dtype.

        Args:
            scales: of each number; None takes those of ``scales``.
        """
        scales = self.scales(tensor) if scales is None else scales
        return self.nearest(tensor.detach().float(), scales).to(tensor.dtype)


@dataclass(frozen=True)
class Cast:
    """A floating type of 16 bits, as a grid."""

    dtype: torch.dtype
    bits: int = 16

    def nbytes(self, shape: Sequence[int]) -> int:
        """Count the bytes."""
        return 2 * prod(shape)

    def rounded(self, tensor: Tensor) -> Tensor:
        """Return the nearest numbers of the type, in the tensor's own dtype."""
        return tensor.detach().to(self.dtype).to(tensor.dtype)


Form = Grid | Cast
FORMS: dict[str, Form] = {
    "int8": Grid(8),
    "int4": Grid(4, GROUP),
    "int3": Grid(3, GROUP),
    "bf16": Cast(torch.bfloat16),
    "fp16": Cast(torch.float16),
}


def takes(tensor: Tensor) -> bool:
    """Return whether a tensor is worth storing in few bits: a weight, of some size."""
    return tensor.dim() > 1 and tensor.is_floating_point() and tensor.numel() >= LEAST


def form_of(store: str, tensor: Tensor) -> Form | None:
    """Return how a tensor of a layer is stored; None as it is."""
    form = FORMS.get(store)
    if form is None or not takes(tensor) or 8 * tensor.element_size() <= form.bits:
        return None
    return form


def nbytes(store: str | None, tensor: Tensor) -> int:
    """Count the bytes of a tensor of a layer that is stored so."""
    form = form_of(store or "", tensor)
    return tensor.numel() * tensor.element_size() if form is None else form.nbytes(tensor.shape)


def found_again(tensor: Tensor, grid: Grid, *, exact: bool = True) -> tuple[Tensor, Tensor] | None:
    """Return codes and scales, both (rows, groups, numbers or 1), of numbers that lie on a grid;
    None where they do not.

    Args:
        exact: to the last bit; else to a small share of a step.
    """
    groups = grid.grouped(tensor.detach().double().cpu())
    rows = groups.reshape(-1, groups.shape[2])  # (all groups, numbers)
    largest = rows.gather(1, rows.abs().argmax(1, keepdim=True))
    scales, codes = torch.zeros_like(largest), torch.zeros_like(rows)
    open_ = (largest != 0).squeeze(1).nonzero().squeeze(1)
    near = (0, 1, -1) if tensor.element_size() < 4 else (0,)
    for size in range(-grid.low, 0, -1):
        if not len(open_):
            break
        of = largest[open_] / grid.low if size == -grid.low else largest[open_].abs() / size
        for ulps in near:
            tried = _moved(of, ulps)
            own = grid.codes(rows[open_], tried)
            if exact:
                back = (own * tried).float().to(tensor.dtype).double()
                fits = (back == rows[open_]).all(1)
            else:
                fits = ((own * tried - rows[open_]).abs() <= SNAP * tried.abs()).all(1)
            scales[open_[fits]], codes[open_[fits]] = tried[fits], own[fits]
            open_, of = open_[~fits], of[~fits]
    if len(open_):
        return None
    shape = (*groups.shape[:2], -1)
    return codes.view(shape), scales.view(shape)


def _moved(scales: Tensor, ulps: int) -> Tensor:
    """Return the nearest scales of their type, or those so many places further."""
    near = scales.to(SCALE)
    if ulps:
        near = (near.view(torch.int16) + ulps).view(SCALE)
    return near.double()
