"""Narrow models in the form of some that are too large for a test."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.models.vgg import VGG, make_layers


def vgg() -> nn.Module:
    """Return VGG with torchvision's names."""
    model = VGG(make_layers([4, "M", 8, "M", 16, "M"]), num_classes=10, init_weights=False)
    model.classifier[0] = nn.Linear(16 * 7 * 7, 64)
    model.classifier[3] = nn.Linear(64, 64)
    model.classifier[6] = nn.Linear(64, 10)
    return model


class SVGG(nn.Module):
    """S-VGG of an eighth of its widths."""

    def __init__(self, in_channels: int, image_size: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        inputs, size = in_channels, image_size
        for outputs in (4, 8, 16):
            for stride in (1, 1, 2):
                layers += [nn.Conv2d(inputs, outputs, 3, stride, 1), nn.ReLU(inplace=True)]
                inputs, size = outputs, -(-size // stride)
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Sequential(
            nn.Linear(inputs * size * size, 24), nn.ReLU(inplace=True), nn.Linear(24, 10)
        )

    def forward(self, images: Tensor) -> Tensor:
        out: Tensor = self.classifier(self.features(images).flatten(1))
        return out


def svgg(in_channels: int = 3, image_size: int = 32) -> nn.Module:
    """Return a narrow S-VGG."""
    return SVGG(in_channels, image_size)


class VoiceEncoder(nn.Module):
    """Resemblyzer's encoder with LSTMs of 24."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(40, 24, 3, batch_first=True)
        self.linear = nn.Linear(24, 24)

    def forward(self, mels: Tensor) -> Tensor:
        _, (hidden, _) = self.lstm(mels)
        raw = F.relu(self.linear(hidden[-1]))
        return raw / raw.norm(dim=1, keepdim=True).clamp(min=1e-6)


def voice_encoder() -> nn.Module:
    """Return a narrow speaker encoder."""
    return VoiceEncoder()


def crepe() -> nn.Module:
    """Return torchcrepe's form with few channels."""
    sys.path.insert(0, str(Path(__file__).parents[2] / "recipes"))
    from assets import Crepe

    class Narrow(Crepe):
        WIDTHS: ClassVar = {"tiny": (16, 4, 4, 4, 8, 8)}

    model: nn.Module = Narrow()
    return model


def digit_cnn() -> nn.Module:
    """Return the digit CNN's form with few channels."""
    stages: list[nn.Module] = []
    for inputs, outputs in ((1, 4), (4, 8), (8, 16)):
        stages += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2, 2)]
    head = [nn.Flatten(), nn.Linear(144, 32), nn.ReLU(), nn.Linear(32, 10)]
    return nn.Sequential(*stages, *head)
