"""ResNet v2 of bottleneck blocks, depth 9n + 2 (He et al., 2016; paper, section IV-B)."""

from __future__ import annotations

from torch import Tensor, nn


class _Block(nn.Module):
    """1x1, 3x3, 1x1, each after batch norm and ReLU; added to its input or to a 1x1 shortcut."""

    def __init__(
        self, inputs: int, inner: int, outputs: int, stride: int, *, activate: bool, shortcut: bool
    ) -> None:
        super().__init__()
        first = [nn.BatchNorm2d(inputs), nn.ReLU()] if activate else []
        self.body = nn.Sequential(
            *first,
            nn.Conv2d(inputs, inner, 1, stride),
            nn.BatchNorm2d(inner),
            nn.ReLU(),
            nn.Conv2d(inner, inner, 3, 1, 1),
            nn.BatchNorm2d(inner),
            nn.ReLU(),
            nn.Conv2d(inner, outputs, 1),
        )
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride) if shortcut else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.body(x) + self.shortcut(x)
        return y


class ResNetV2(nn.Module):
    """A pre-activation bottleneck network for 32x32 images.

    Args:
        depth: 9n + 2 layers.
        num_classes: outputs.
        in_channels: 3 for colour, 1 for grey images.
        width: channels of the first convolution.

    Shape:
        images (N, in_channels, H, W), logits (N, num_classes).
    """

    def __init__(
        self, depth: int = 56, num_classes: int = 10, in_channels: int = 3, width: int = 16
    ) -> None:
        super().__init__()
        if depth < 11 or (depth - 2) % 9:
            raise ValueError(f"depth must be 9n + 2 (11, 20, 29, 56, ...), got {depth}")
        self.stem = nn.Sequential(
            nn.Conv2d(in_channels, width, 3, 1, 1), nn.BatchNorm2d(width), nn.ReLU()
        )
        blocks: list[nn.Module] = []
        inputs = width
        for stage in range(3):
            inner = width if stage == 0 else inputs
            outputs = 4 * width if stage == 0 else 2 * inputs
            for block in range((depth - 2) // 9):
                first = block == 0
                blocks.append(
                    _Block(
                        inputs,
                        inner,
                        outputs,
                        2 if first and stage > 0 else 1,
                        activate=not (first and stage == 0),
                        shortcut=first,
                    )
                )
                inputs = outputs
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Sequential(nn.BatchNorm2d(inputs), nn.ReLU(), nn.AdaptiveAvgPool2d(1))
        self.classifier = nn.Linear(inputs, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits."""
        logits: Tensor = self.classifier(self.head(self.blocks(self.stem(images))).flatten(1))
        return logits


def resnet56(num_classes: int = 10, in_channels: int = 3) -> ResNetV2:
    """Return the paper's ResNet-56."""
    return ResNetV2(56, num_classes, in_channels)
