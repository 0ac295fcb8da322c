"""Models whose weights have falling spectra, as trained ones do, and data for them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from bp_convert.data import Examples, from_tensors
from bp_convert.values.tensors import TensorSpec


@torch.no_grad()
def falling_(model: nn.Module, power: float = 0.7) -> nn.Module:
    """Give every weight matrix singular values that fall with a power of their place."""
    for parameter in model.parameters():
        if parameter.dim() < 2:
            continue
        flat = parameter.flatten(1)
        u, s, vt = torch.linalg.svd(flat, full_matrices=False)
        fall = torch.arange(1, len(s) + 1) ** -power
        parameter.copy_((u * (fall * s.norm() / fall.norm()) @ vt).view_as(parameter))
    return model


def mlp(*widths: int) -> nn.Sequential:
    """Linear layers with ReLU between."""
    layers: list[nn.Module] = []
    for i in range(len(widths) - 1):
        layers += [nn.Linear(widths[i], widths[i + 1]), nn.ReLU()]
    model = nn.Sequential(*layers[:-1])
    falling_(model)
    return model


class Cnn(nn.Module):
    """Convolutions without biases before batch norms, as in ResNets, and a linear head."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1, bias=False)
        self.first_norm = nn.BatchNorm2d(width)
        self.inner = nn.Conv2d(width, 2 * width, 3, padding=1, stride=2, bias=False)
        self.second_norm = nn.BatchNorm2d(2 * width)
        self.outer = nn.Conv2d(2 * width, 2 * width, (3, 1), padding="same")
        self.head = nn.Linear(2 * width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first_norm(self.stem(x)).relu()
        x = self.second_norm(self.inner(x)).relu()
        return self.head(self.outer(x).relu().mean((2, 3)))


def cnn(width: int = 16) -> Cnn:
    """A convolutional network whose norms have seen data."""
    model = Cnn(width)
    falling_(model)
    model.train()
    with torch.no_grad():
        for _ in range(30):
            model(images(32))
    return model.eval()


class Words(nn.Module):
    """Embedding, LSTM and head."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(90, 12, padding_idx=0)
        self.lstm = nn.LSTM(12, 10, batch_first=True, bidirectional=True)
        self.head = nn.Linear(20, 7)
        falling_(self)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.lstm(self.words(tokens))[0].mean(1))


def images(count: int) -> Tensor:
    """Smooth images, so that neighbouring pixels have much in common."""
    coarse = torch.randn(count, 3, 4, 4)
    fine = nn.functional.interpolate(coarse, (12, 12), mode="bilinear")
    return fine + 0.1 * torch.randn(count, 3, 12, 12) + torch.tensor([1.0, 0, -1])[:, None, None]


def vectors(count: int, size: int) -> Tensor:
    """Rows that vary in few directions, about a mean."""
    turn = torch.linalg.qr(torch.randn(size, size, generator=torch.Generator().manual_seed(7)))[0]
    scale = torch.arange(1, size + 1) ** -0.8
    return torch.randn(count, size) * scale @ turn + 0.3


def examples(x: Tensor, *, batch: int = 32) -> Examples:
    """Put inputs into batches."""
    return from_tensors(x, specs=(), count=len(x), batch=batch)


def spec(*shape: int) -> TensorSpec:
    """Describe an input."""
    return TensorSpec(shape=shape)
