"""A module type of a program's own, with all that the tool has to know of it: one file.

``y = gain * (W x) + b``; its twin computes the same from factors of W.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bp_convert.kinds import Kind
from bp_convert.kron.contract import bilinear
from bp_convert.layers.common import BilinearLayer
from bp_convert.values.factors import FactorSpec


class Scaled(nn.Module):
    """A layer that the tool does not know by itself."""

    def __init__(
        self, inputs: int, outputs: int, gain: float = 1.0, device: Any = None, dtype: Any = None
    ) -> None:
        super().__init__()
        self.inputs, self.outputs, self.gain = inputs, outputs, gain
        self.weight = nn.Parameter(torch.randn(outputs, inputs, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.randn(outputs, device=device, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., D) to (..., K)."""
        return self.gain * F.linear(x, self.weight) + self.bias


class BPScaled(BilinearLayer):
    """Its bilinear twin; w1 (R, k1, d1), w2 (R, d2, k2)."""

    FIELDS: ClassVar = ("inputs", "outputs", "gain")
    DENSE: ClassVar = Scaled

    def __init__(
        self,
        inputs: int,
        outputs: int,
        gain: float = 1.0,
        *,
        factors: FactorSpec,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        self.inputs, self.outputs, self.gain = inputs, outputs, gain
        self.hold_(factors, bias=True, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., D) to (..., K)."""
        return self.gain * bilinear(x, self.w1, self.w2) + self.bias


class ScaledKind(Kind):
    """All that the tool knows of it; what is not said is as in a Linear layer."""

    name = "Scaled"
    twin = BPScaled

    def shift(self, twin: Any, role: str, index: int, change: Tensor) -> bool:
        return super().shift(twin, role, index, twin.gain * change)


class Net(nn.Module):
    """A model of such layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Scaled(24, 48, 0.2)
        self.second = Scaled(48, 36, 0.1)
        self.head = nn.Linear(36, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, 24) to (N, 10)."""
        hidden: Tensor = self.second(torch.relu(self.first(x)))
        scores: Tensor = self.head(torch.relu(hidden))
        return scores
