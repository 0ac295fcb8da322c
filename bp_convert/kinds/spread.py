"""How the channels of a widened layer stem from those of its source."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Spread:
    """Where the channels of a widened layer come from.

    Attributes:
        inputs: for each new input, the old input that it repeats; None where nothing changed.
        outputs: for each new output, the old output that it repeats; None where nothing changed.
    """

    inputs: Tensor | None = None  # (D',)
    outputs: Tensor | None = None  # (K',)

    def rows(self, weight: Tensor, axis: int = 0) -> Tensor:
        """Repeat outputs along ``axis``."""
        if self.outputs is None:
            return weight
        return weight.index_select(axis, self.outputs.to(weight.device))

    def columns(self, weight: Tensor, axis: int = 1) -> Tensor:
        """Repeat inputs along ``axis`` and share each old weight among its repeats."""
        if self.inputs is None:
            return weight
        return self.shares(weight, axis).index_select(axis, self.inputs.to(weight.device))

    def shares(self, weight: Tensor, axis: int = 1) -> Tensor:
        """Divide each old weight by the number of its input's repeats along ``axis``."""
        if self.inputs is None:
            return weight
        inputs = self.inputs.to(weight.device)
        times = torch.bincount(inputs, minlength=weight.shape[axis])  # (D,)
        shape = [1] * weight.dim()
        shape[axis] = -1
        return weight * times.clamp(min=1).to(weight.dtype).reciprocal().view(shape)

    def indices(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Return for each row and each column of a widened weight (K, C, *kernel), laid out as a
        matrix, the old one: (K',), (C'*places,)."""
        every = [torch.arange(size, device=weight.device) for size in weight.shape[:2]]
        rows, channels = (
            own if one is None else one.to(weight.device)
            for one, own in zip((self.outputs, self.inputs), every, strict=True)
        )
        places = weight[:1, :1].numel()
        inside = torch.arange(places, device=weight.device)
        return rows, (channels[:, None] * places + inside).flatten()
