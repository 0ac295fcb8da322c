"""A narrow model in the form of one that is too large for a test."""

from __future__ import annotations

from torch import nn
from torchvision.models.vgg import VGG, make_layers


def vgg() -> nn.Module:
    """Return VGG with torchvision's names, narrow."""
    model = VGG(make_layers([4, "M", 8, "M", 16, "M"]), num_classes=10, init_weights=False)
    model.classifier[0] = nn.Linear(16 * 7 * 7, 64)
    model.classifier[3] = nn.Linear(64, 64)
    model.classifier[6] = nn.Linear(64, 10)
    return model
