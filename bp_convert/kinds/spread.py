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
        inputs = self.inputs.to(weight.device)
        times = torch.bincount(inputs, minlength=weight.shape[axis])  # (D,)
        shape = [1] * weight.dim()
        shape[axis] = -1
        share = times.clamp(min=1).to(weight.dtype).reciprocal().view(shape)
        return (weight * share).index_select(axis, inputs)
