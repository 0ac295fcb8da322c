"""Flickr8k as it was published, for captioners: features of an image and the words so far, and the
next word as the label (paper, section IV-C).

    data: recipes/flickr8k.py:train     evaluate: recipes/flickr8k.py:dev

FOLDER holds ``Flickr8k.token.txt`` and ``Flickr_8k.trainImages.txt`` (``dev``), in
``Flickr8k_text`` or right there, the images in ``Flicker8k_Dataset`` or ``Flickr8k_Dataset``, and
what ``compute_features`` makes of them. Copy this file to change the constants.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

FOLDER = Path("data/flickr8k")
LENGTH = 34  # words of the longest caption that is learnt, with both marks
VOCABULARY = 8256  # words, of which two are PAD and UNKNOWN
FEATURES = "features.npz"  # arrays ``names`` and ``features`` (n, 4096)
TOKENS = "Flickr8k.token.txt"
START, END = "<start>", "<end>"
PAD, UNKNOWN = 0, 1
_WORD = re.compile(r"[a-z]+")


def train() -> Captions:
    """Return what is learnt."""
    return Captions("train")


def dev() -> Captions:
    """Return what is scored."""
    return Captions("dev")


class Captions(Dataset[tuple[Tensor, Tensor, int]]):
    """Every place in every caption is an example: features (4096,), the words so far (LENGTH,),
    padded in front, and the number of the next word.

    Args:
        part: of the images: ``train``, ``dev`` or ``test``.

    Attributes:
        words: the vocabulary: padding, unknown, then the training captions' most frequent words.

    Raises:
        FileNotFoundError: texts, image lists or features are missing.
    """

    def __init__(self, part: str) -> None:
        texts = next(
            (one for one in (FOLDER, FOLDER / "Flickr8k_text") if (one / TOKENS).is_file()), FOLDER
        )
        captions = _captions(texts / TOKENS)
        counts: Counter[str] = Counter()
        for name in _names(texts, "train"):
            for line in captions.get(name, []):
                counts.update(line)
        order = sorted(counts, key=lambda one: (-counts[one], one))
        self.words = ["<pad>", "<unknown>", *order][:VOCABULARY]
        numbers = {word: i for i, word in enumerate(self.words)}
        with np.load(FOLDER / FEATURES, allow_pickle=False) as archive:
            self._features: Any = archive["features"]
            rows = {str(name): i for i, name in enumerate(archive["names"])}
        ids: list[list[int]] = []
        pictures: list[int] = []
        for name in _names(texts, part):
            for line in captions.get(name, []) if name in rows else ():
                ids.append([numbers.get(word, UNKNOWN) for word in line[:LENGTH]])
                pictures.append(rows[name])
        # One number a word and two a caption: the examples are cut out when they are read.
        self._starts = np.cumsum([0, *(len(one) - 1 for one in ids)])
        self._ids = np.array([n for one in ids for n in one], dtype=np.int32)
        self._offsets = np.cumsum([0, *(len(one) for one in ids)])
        self._pictures = np.array(pictures)

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, row: int) -> tuple[Tensor, Tensor, int]:
        caption = int(np.searchsorted(self._starts, row, side="right")) - 1
        start = self._offsets[caption]
        stop = start + row - self._starts[caption] + 1
        tokens = np.full(LENGTH, PAD, dtype=np.int64)
        tokens[LENGTH - (stop - start) :] = self._ids[start:stop]
        features = torch.from_numpy(self._features[self._pictures[caption]]).float()
        return features, torch.from_numpy(tokens), int(self._ids[stop])


def _names(texts: Path, part: str) -> list[str]:
    lines = (texts / f"Flickr_8k.{part}Images.txt").read_text(encoding="utf-8").splitlines()
    return [one.strip() for one in lines if one.strip()]


def _captions(path: Path) -> dict[str, list[list[str]]]:
    """Read ``NAME.jpg#0<TAB>words``; return the words of each image's captions, with marks."""
    found: dict[str, list[list[str]]] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        name, tab, text = line.partition("\t")
        if tab:
            words = [START, *_WORD.findall(text.lower()), END]
            found.setdefault(name.partition("#")[0], []).append(words)
    return found


@torch.no_grad()
def compute_features(vgg: nn.Module, batch: int = 16) -> Path:
    """Compute what VGG-19 makes of each image before its last layer, and write ``features.npz``.

    Args:
        vgg: torchvision's vgg19 with its trained weights.

    Raises:
        FileNotFoundError: there are no images.
    """
    from PIL import Image

    from bp_convert.data.images import IMAGENET, Look

    places = (FOLDER / "Flicker8k_Dataset", FOLDER / "Flickr8k_Dataset", FOLDER)
    files = next((f for one in places if (f := sorted(one.glob("*.jpg")))), [])
    if not files:
        raise FileNotFoundError(f"no .jpg image in {places[0]}: unpack the published images")
    look = Look((3, 224, 224), *IMAGENET)
    model: Any = vgg.eval()
    found = []
    for start in range(0, len(files), batch):
        pictures = []
        for path in files[start : start + batch]:
            with Image.open(path) as image:
                pictures.append(look.tensor(image))
        hidden = model.avgpool(model.features(torch.stack(pictures))).flatten(1)
        found.append(model.classifier[:-1](hidden))  # (n, 4096)
    path = FOLDER / FEATURES
    part = path.with_name(f".{path.stem}-part.npz")  # whole, or not under its name
    np.savez(part, features=torch.cat(found).numpy(), names=np.array([one.name for one in files]))
    return part.replace(path)
