"""S-VGG: nine convolutions and two Linears for 32x32 images (paper, section IV-B)."""

from __future__ import annotations

from torch import Tensor, nn

STAGES = (32, 64, 128)


class SVGG(nn.Module):
    """Three stages of three 3x3 convolutions, each third one with stride 2; no batch norm.

    Args:
        num_classes: outputs.
        in_channels: 3 for colour, 1 for grey images.
        image_size: height and width of the images.

    Shape:
        images (N, in_channels, image_size, image_size), logits (N, num_classes).
    """

    def __init__(self, num_classes: int = 10, in_channels: int = 3, image_size: int = 32) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        inputs, size = in_channels, image_size
        for outputs in STAGES:
            for stride in (1, 1, 2):
                layers += [nn.Conv2d(inputs, outputs, 3, stride, 1), nn.ReLU(inplace=True)]
                inputs, size = outputs, -(-size // stride)
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Sequential(
            nn.Linear(inputs * size * size, 1024),
            nn.ReLU(inplace=True),
            nn.Linear(1024, num_classes),
        )

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits."""
        logits: Tensor = self.classifier(self.features(images).flatten(1))
        return logits
