"""Small files of every kind that examples are loaded from."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from torch import nn

from bp_convert.data import Examples, Uses, examples_for, split_for
from bp_convert.errors import DataError
from bp_convert.values.settings import Settings
from bp_convert.values.tensors import TensorSpec


def spec(text: str) -> TensorSpec:
    return TensorSpec.parse(text)


def refuses(*words: str) -> pytest.RaisesExc[DataError]:
    """Expect a DataError whose four parts are filled and whose text holds all the words."""

    def has_all(problem: DataError) -> bool:
        parts = (problem.where, problem.found, problem.allowed, problem.fix)
        return all(parts) and all(word in str(problem) for word in words)

    return pytest.RaisesExc(DataError, check=has_all)


class Unknown(nn.Module):
    """A model of which nothing is known, and that runs on nothing."""

    def forward(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError


def load_examples(data: Any, specs: Sequence[TensorSpec] = (), **asked: Any) -> Examples:
    """Load examples for a model that takes ``specs``."""
    settings = Settings(inputs=tuple(specs), seed=asked.pop("seed", 0))
    return examples_for(Unknown(), data, settings, **asked)


def scored(
    source: Any, specs: Sequence[TensorSpec], *, taken: int, count: int = 512, **asked: Any
) -> Examples:
    """Return what is left to a score where calibration has taken some examples of a source."""
    uses = Uses(source, taken, evaluate=source, scored=count)
    settings = Settings(inputs=tuple(specs), seed=asked.pop("seed", 0))
    split = split_for(Unknown(), uses, settings, **asked)
    assert split.evaluate is not None
    return split.evaluate.examples


def first_column(examples: Examples) -> list[float]:
    """Return the first number of every example, which the tests use as its name."""
    found: list[float] = []
    for args, kwargs in examples.batches:
        tensor = args[0] if args else next(iter(kwargs.values()))
        found += tensor.flatten(1)[:, 0].tolist()
    return found


def numbered(count: int, *shape: int) -> np.ndarray:
    """Return (count, *shape), float32; every number of an example is its row."""
    rows = np.arange(count, dtype=np.float32).reshape(count, *[1] * len(shape))
    return np.broadcast_to(rows, (count, *shape)).copy()


def image(path: Path, colour: int | tuple[int, int, int], size: tuple[int, int] = (8, 8)) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("L" if isinstance(colour, int) else "RGB", size, colour).save(path)
    return path


def tokenizer(folder: Path, words: Sequence[str], *, pad: bool = True, most: int = 512) -> Path:
    """Write a tokenizer that cuts at spaces; ids are the words' places after the special ones."""
    special = ["[PAD]", "[UNK]"] if pad else ["[UNK]"]
    vocabulary = {word: i for i, word in enumerate([*special, *words])}
    folder.mkdir()
    (folder / "tokenizer.json").write_text(
        json.dumps(
            {
                "version": "1.0",
                "truncation": None,
                "padding": None,
                "added_tokens": [],
                "normalizer": None,
                "pre_tokenizer": {"type": "WhitespaceSplit"},
                "post_processor": None,
                "decoder": None,
                "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "[UNK]"},
            }
        )
    )
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "[UNK]"}
    settings |= {"pad_token": "[PAD]"} if pad else {}
    (folder / "tokenizer_config.json").write_text(
        json.dumps({**settings, "model_max_length": most})
    )
    return folder


def fashion(root: Path, train: Sequence[int], test: Sequence[int]) -> Path:
    """Write FashionMNIST's files: each image is of one grey, and its label is grey modulo 10."""
    folder = root / "FashionMNIST" / "raw"
    folder.mkdir(parents=True)
    for split, greys in (("train", train), ("t10k", test)):
        pixels = np.repeat(np.array(greys, dtype=np.uint8), 28 * 28)
        head = bytes([0, 0, 8, 3, *len(greys).to_bytes(4, "big"), 0, 0, 0, 28, 0, 0, 0, 28])
        (folder / f"{split}-images-idx3-ubyte").write_bytes(head + pixels.tobytes())
        labels = bytes(grey % 10 for grey in greys)
        head = bytes([0, 0, 8, 1, *len(greys).to_bytes(4, "big")])
        (folder / f"{split}-labels-idx1-ubyte").write_bytes(head + labels)
    for file in list(folder.iterdir()):  # torchvision looks for both
        (folder / f"{file.name}.gz").write_bytes(gzip.compress(file.read_bytes()))
    return root
