"""The smallest layers of every kind, beside each other in one model."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import torch
from torch import Tensor, nn

SIZES = range(1, 5)
FEW = range(1, 4)
KERNELS = (1, 2)


class Beside(nn.Module):
    """Layers that each read a part of the input; their outputs are summed."""

    def __init__(self, layers: list[nn.Module], part: Callable[[nn.Module, Tensor], Tensor]):
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.part = part

    def forward(self, x: Tensor) -> Tensor:
        total = torch.zeros(len(x), device=x.device)
        for layer in self.layers:
            y = layer(self.part(layer, x))
            y = y[0] if isinstance(y, tuple) else y
            total = total + y.flatten(1).sum(1)
        return total


def _channels(layer: nn.Module, x: Tensor) -> Tensor:
    return x[:, : layer.in_channels]


def _linear() -> nn.Module:
    layers: list[nn.Module] = [nn.Linear(d, k) for d in SIZES for k in SIZES]
    return Beside(layers, lambda layer, x: x[:, : layer.in_features])


def _conv1d() -> nn.Module:
    return Beside([nn.Conv1d(*one) for one in product(FEW, FEW, KERNELS)], _channels)


def _conv2d() -> nn.Module:
    kernels = list(product(KERNELS, KERNELS))
    return Beside([nn.Conv2d(*one) for one in product(FEW, FEW, kernels)], _channels)


def _conv3d() -> nn.Module:
    kernels = [(1, 1, 1), (2, 1, 1), (1, 2, 2), (2, 2, 2)]
    return Beside([nn.Conv3d(*one) for one in product(FEW, FEW, kernels)], _channels)


def _embedding() -> nn.Module:
    layers: list[nn.Module] = [nn.Embedding(v, e) for v in SIZES for e in SIZES]
    return Beside(layers, lambda layer, x: x % layer.num_embeddings)


def _lstm() -> nn.Module:
    layers: list[nn.Module] = [
        nn.LSTM(d, h, batch_first=True, bidirectional=both)
        for d, h, both in product(FEW, FEW, (False, True))
    ]
    return Beside(layers, lambda layer, x: x[..., : layer.input_size])


# By kind: the model, and its inputs.
SMALLEST: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Tensor]]] = {
    "Linear": (_linear, lambda count: torch.randn(count, 4)),
    "Conv1d": (_conv1d, lambda count: torch.randn(count, 3, 4)),
    "Conv2d": (_conv2d, lambda count: torch.randn(count, 3, 3, 3)),
    "Conv3d": (_conv3d, lambda count: torch.randn(count, 3, 2, 2, 2)),
    "Embedding": (_embedding, lambda count: torch.randint(0, 4, (count, 5))),
    "LSTM": (_lstm, lambda count: torch.randn(count, 4, 3)),
}
