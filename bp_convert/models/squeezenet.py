"""SqueezeNet of five fire modules (Iandola et al., 2016; paper, section IV-B)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

# The paper says "5 fire modules of 3 convolutions" and does not publish their widths. These lead
# to its 512 channels before the classifier; the parameter total of its table is not met.
FIRES = ((16, 64, 64), (32, 128, 128), (48, 192, 192), (64, 256, 256), (64, 256, 256))


class _Fire(nn.Module):
    """Squeeze by 1x1, expand by 1x1 and 3x3 side by side."""

    def __init__(self, inputs: int, squeeze: int, point: int, square: int) -> None:
        super().__init__()
        self.squeeze = nn.Conv2d(inputs, squeeze, 1)
        self.point = nn.Conv2d(squeeze, point, 1)
        self.square = nn.Conv2d(squeeze, square, 3, padding=1)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.squeeze(x))
        return torch.cat([self.relu(self.point(x)), self.relu(self.square(x))], 1)


class SqueezeNet(nn.Module):
    """A 3x3 convolution, five fire modules, pooling and a Linear, for 32x32 images.

    Args:
        num_classes: outputs.
        in_channels: 3 for colour, 1 for grey images.

    Shape:
        images (N, in_channels, H, W), logits (N, num_classes).
    """

    def __init__(self, num_classes: int = 10, in_channels: int = 3) -> None:
        super().__init__()
        layers: list[nn.Module] = [
            nn.Conv2d(in_channels, 64, 3, padding=1),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
        ]
        inputs = 64
        for number, (squeeze, point, square) in enumerate(FIRES):
            layers.append(_Fire(inputs, squeeze, point, square))
            inputs = point + square
            if number in (0, 2):
                layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Linear(inputs, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits."""
        logits: Tensor = self.classifier(self.pool(self.features(images)).flatten(1))
        return logits
