"""Flickr8k as it was published, for captioners: features of an image and the words so far, and the
next word as the label (paper, section IV-C).

The folder holds ``Flickr8k.token.txt`` and ``Flickr_8k.trainImages.txt`` (``dev``, ``test``), in
``Flickr8k_text`` or right there, and the images in ``Flicker8k_Dataset`` or ``Flickr8k_Dataset``.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from bp_convert.data.dataset import Item, Part, Rows, chunks
from bp_convert.data.locator import Locator
from bp_convert.errors import DataError
from bp_convert.values.tensors import TensorSpec

TOKENS = "Flickr8k.token.txt"
FEATURES = "features.npz"  # made by compute_features, beside the texts
START, END = "<start>", "<end>"
LENGTH = 34  # words of the longest caption that is learnt, with both marks
PAD, UNKNOWN = 0, 1
_WORD = re.compile(r"[a-z]+")


def is_here(folder: Path) -> bool:
    """Tell whether a folder holds Flickr8k's captions."""
    return _texts(folder) is not None


def _texts(folder: Path) -> Path | None:
    places = (folder, folder / "Flickr8k_text")
    return next((one for one in places if (one / TOKENS).is_file()), None)


class Captions(Rows):
    """Every place in every caption is an example.

    Args:
        source: the folder, with the options ``features`` (a .npz file with arrays ``names`` and
            ``features`` (n, 4096); by default ``features.npz`` in the folder, which
            ``compute_features`` makes), ``length`` (words of a caption at most, 34) and
            ``vocabulary`` (words, 8256).
        specs: the model's inputs, features and token ids, in this order.
        part: calibration reads the training images, evaluation those for development.

    Attributes:
        split: words for the images that are read.
        words: the vocabulary: padding, unknown, then the training captions' most frequent words.

    Raises:
        DataError: features or image lists are missing.
    """

    def __init__(self, source: Locator, specs: Sequence[TensorSpec], part: Part) -> None:
        source.admit(("features", "length", "vocabulary"))
        self.where = source.where
        folder = _texts(source.path)
        assert folder is not None
        self.split = "train" if part == "train" else "dev"
        self._length = int((source.numbers("length") or (LENGTH,))[0])
        size = int((source.numbers("vocabulary") or (8256,))[0])
        captions = _captions(folder / TOKENS)
        learnt = set(self._names(folder, "train"))
        counts = Counter(
            word for name, lines in captions.items() if name in learnt for w in lines for word in w
        )
        order = sorted(counts, key=lambda one: (-counts[one], one))
        self.words = ["<pad>", "<unknown>", *order][:size]
        numbers = {word: i for i, word in enumerate(self.words)}
        file = Path(source.options.get("features", source.path / FEATURES)).expanduser()
        self._features, rows = self._read(file)
        ids: list[list[int]] = []
        pictures: list[int] = []
        for name in self._names(folder, self.split):
            if name not in rows or name not in captions:
                continue
            for line in captions[name]:
                ids.append([numbers.get(word, UNKNOWN) for word in line[: self._length]])
                pictures.append(rows[name])
        if not ids:
            raise self._bad(f"no caption of a {self.split} image with features", "check the files")
        # One number a word and two a caption: the examples are cut out when they are read.
        self._starts = np.cumsum([0, *(len(one) - 1 for one in ids)])
        self._ids = np.array([n for one in ids for n in one], dtype=np.int32)
        self._offsets = np.cumsum([0, *(len(one) for one in ids)])
        self._pictures = np.array(pictures)
        names = [spec.name for spec in specs]
        self._names_of = names if len(names) == 2 else [None, None]

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitems__(self, rows: Sequence[int]) -> Item:
        """Read examples: features (N, 4096) and the words so far (N, length), padded in front."""
        tokens = np.full((len(rows), self._length), PAD, dtype=np.int64)
        captions = self._caption(rows)
        for i, (caption, row) in enumerate(zip(captions, rows, strict=True)):
            start = self._offsets[caption]
            stop = start + row - self._starts[caption] + 1
            tokens[i, self._length - (stop - start) :] = self._ids[start:stop]
        features = torch.from_numpy(self._features[self._pictures[captions]]).float()
        values = (features, torch.from_numpy(tokens))
        named = list(zip(self._names_of, values, strict=True))
        return (
            tuple(value for name, value in named if name is None),
            {name: value for name, value in named if name is not None},
            self._labels_of(rows),
        )

    def _labels_of(self, rows: Sequence[int]) -> Tensor:
        captions = self._caption(rows)
        places = self._offsets[captions] + np.array(rows) - self._starts[captions] + 1
        return torch.from_numpy(self._ids[places].astype(np.int64))

    def _caption(self, rows: Sequence[int]) -> Any:
        return np.searchsorted(self._starts, np.array(rows), side="right") - 1

    def _names(self, folder: Path, split: str) -> list[str]:
        path = folder / f"Flickr_8k.{split}Images.txt"
        if not path.is_file():
            raise self._bad(f"no {path.name}", "unpack the published texts whole")
        return [one.strip() for one in path.read_text(encoding="utf-8").splitlines() if one.strip()]

    def _read(self, file: Path) -> tuple[Any, dict[str, int]]:
        if not file.is_file():
            raise self._bad(
                f"no features in {file}",
                "make them once: bp_convert.data.flickr.compute_features(folder, vgg), or name "
                "them: ?features=FILE.npz",
            )
        try:
            with np.load(file, allow_pickle=False) as archive:
                found, names = archive["features"], archive["names"]
        except (OSError, KeyError, ValueError) as problem:
            raise self._bad(
                f"{file} cannot be read: {problem}", "make the features again"
            ) from None
        return found, {str(name): i for i, name in enumerate(names)}

    def _bad(self, found: str, fix: str) -> DataError:
        return DataError(
            where=self.where,
            found=found,
            allowed="Flickr8k's published files, and features of its images",
            fix=fix,
        )


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
def compute_features(folder: str | Path, vgg: nn.Module, batch: int = 16) -> Path:
    """Compute what VGG-19 makes of each image before its last layer, and write ``features.npz``.

    Args:
        folder: Flickr8k's.
        vgg: torchvision's vgg19 with its trained weights.

    Raises:
        DataError: there are no images.
    """
    from PIL import Image

    from bp_convert.data.images import IMAGENET, Look

    home = Path(folder)
    places = (home / "Flicker8k_Dataset", home / "Flickr8k_Dataset", home)
    files = next((f for one in places if (f := sorted(one.glob("*.jpg")))), [])
    if not files:
        raise DataError(
            where=f"data {folder}",
            found="no .jpg image",
            allowed="the images in Flicker8k_Dataset",
            fix="unpack the published images",
        )
    look = Look((3, 224, 224), *IMAGENET)
    model: Any = vgg.eval()
    found = []
    for part in chunks(range(len(files)), batch):
        pictures = []
        for i in part:
            with Image.open(files[i]) as image:
                pictures.append(look.tensor(image))
        hidden = model.avgpool(model.features(torch.stack(pictures))).flatten(1)
        found.append(model.classifier[:-1](hidden))  # (n, 4096)
    path = home / FEATURES
    part_path = path.with_name(f".{path.stem}-part.npz")  # whole, or not under its name
    np.savez(
        part_path,
        features=torch.cat(found).numpy(),
        names=np.array([one.name for one in files]),
    )
    return part_path.replace(path)
