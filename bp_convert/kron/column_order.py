"""How the columns of a weight are shared between the two factors of a pair."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch
from torch import Tensor

from bp_convert.values.factors import FactorSpec, Pair


@dataclass(frozen=True)
class Columns:
    """Columns that count channels times kernel places, (C, *kernel) row-wise.

    Attributes:
        channels: the pair (c1, c2) of channels.
        kernel: sizes of the kernel's axes; none for a matrix without a kernel.
        axes: which factor owns each axis of the kernel.
    """

    channels: Pair
    kernel: tuple[int, ...] = ()
    axes: tuple[int, ...] = ()

    @classmethod
    def of(cls, spec: FactorSpec, kernel: tuple[int, ...] = ()) -> Columns:
        """Return the columns that ``spec`` stands for."""
        own = [prod(n for n, o in zip(kernel, spec.axes, strict=True) if o == f) for f in (1, 2)]
        return cls((spec.inp[0] // own[0], spec.inp[1] // own[1]), kernel, spec.axes)

    @property
    def inp(self) -> Pair:
        """The pair (d1, d2) of columns."""
        one, two = self.places
        return self.channels[0] * one, self.channels[1] * two

    @property
    def places(self) -> Pair:
        """The numbers of kernel places (s1, s2) of the two factors."""
        one = prod(n for n, owner in zip(self.kernel, self.axes, strict=True) if owner == 1)
        return one, prod(self.kernel) // one

    @cached_property
    def order(self) -> Tensor | None:
        """For each column as the pair counts them, (c1, s1, c2, s2), its place among (C, *kernel);
        None where nothing moves."""
        if all(owner == 2 for owner, size in zip(self.axes, self.kernel, strict=True) if size > 1):
            return None
        sizes = (*self.channels, *self.kernel)
        moved = torch.arange(prod(sizes)).view(sizes).permute(self._axes())
        return moved.reshape(-1)

    @property
    def kernel_order(self) -> Tensor:
        """The same for the kernel's places alone, as (s1, s2)."""
        axes = [axis - 2 for axis in self._axes() if axis >= 2]
        return torch.arange(prod(self.kernel)).view(self.kernel).permute(axes).reshape(-1)

    def _axes(self) -> list[int]:
        first = [2 + i for i, owner in enumerate(self.axes) if owner == 1]
        second = [2 + i for i, owner in enumerate(self.axes) if owner == 2]
        return [0, *first, 1, *second]
