"""Folders that Hugging Face's ``datasets`` has saved with ``save_to_disk``; nothing is fetched."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from bp_convert.data.arrays import ArrayRows, Column
from bp_convert.data.collate import LABELS, assign
from bp_convert.data.dataset import Request, Rows
from bp_convert.data.images import Pictures, look_for
from bp_convert.data.text_lines import TextLines
from bp_convert.errors import DataError

PARTS = "dataset_dict.json"  # in a folder of several sets
_HELD = ("validation", "valid", "val", "test")
TEXT = ("text", "sentence", "content")


def is_here(folder: Path) -> bool:
    """Tell whether a folder was written by ``save_to_disk``."""
    whole = (folder / "dataset_info.json").is_file() and (folder / "state.json").is_file()
    return whole or (folder / PARTS).is_file()


def open_set(request: Request) -> Rows:
    """Open a saved set: images and text are read as such, other columns as arrays.

    Raises:
        DataError: datasets is not installed, or no column fits the model.
    """
    source = request.source
    try:
        import datasets
    except ImportError as problem:
        raise source.bad(
            "a folder of datasets, which is not installed",
            "datasets installed",
            "pip install 'bp-convert[datasets]'",
        ) from problem
    try:
        found: Any = datasets.load_from_disk(str(source.path))
    except Exception as problem:  # the library raises of every kind
        lines = str(problem).strip().splitlines() or ["no message"]
        raise source.bad(
            f"a set that cannot be read: {type(problem).__name__}: {lines[0]}",
            "a folder that save_to_disk wrote",
            "save it again",
        ) from problem
    split = ""
    if isinstance(found, dict):
        wanted = ["train"] if request.part == "train" else list(_HELD)
        split = next((one for one in wanted if one in found), "")
        if not split:
            raise source.bad(
                f"splits {', '.join(found)}",
                f"one named {' or '.join(wanted)}",
                "name one of its folders instead",
            )
        found = found[split]
    kinds = {name: type(feature).__name__ for name, feature in found.features.items()}
    picture = next((name for name, kind in kinds.items() if kind == "Image"), None)
    if picture is not None:
        return _Images(request, found, picture, split)
    words = next((name for name in TEXT if name in kinds), None)
    if words is not None:
        return _Lines(request, found, words, split)
    return _arrays(request, found, split)


class _Labelled(Rows):
    """A saved set that may have a column of class numbers."""

    _data: Any

    def _labels_of(self, rows: Sequence[int]) -> Tensor | None:
        label = next((one for one in LABELS if one in self._data.features), None)
        if label is None:
            return None
        return torch.tensor(self._data.select_columns([label])[list(rows)][label])


class _Images(_Labelled, Pictures):
    """A column of images, and one of labels."""

    def __init__(self, request: Request, found: Any, column: str, split: str) -> None:
        super().__init__(request)
        self.split = split
        self._data, self._column = found, column
        self._look = look_for(request, self._first())

    def __len__(self) -> int:
        return len(self._data)

    def _picture(self, row: int) -> Image.Image:
        found: Image.Image = self._data[row][self._column]
        return found


class _Lines(_Labelled, TextLines):
    """A column of text, cut by the model's tokenizer."""

    def __init__(self, request: Request, found: Any, column: str, split: str) -> None:
        self.split = split
        self._data, self._column = found, column
        super().__init__(request)

    def _index(self) -> None:
        self._starts = array("q", range(len(self._data)))
        self._labels = None

    def _text(self, row: int) -> str:
        return str(self._data[row][self._column])


def _arrays(request: Request, found: Any, split: str) -> Rows:
    """Open columns of numbers."""
    source = request.source
    source.admit(())
    inputs, label = assign(list(found.features), request.specs, source.where)

    def column(name: str) -> Column:
        held = found.select_columns([name]).with_format("torch")

        def take(rows: Sequence[int]) -> Tensor:
            value = held[list(rows)][name]
            if isinstance(value, Tensor):
                return value
            raise DataError(
                where=f"{source.where}, {name}",
                found="rows of different lengths, or no numbers",
                allowed="numbers of one shape in every row",
                fix="pad them, or leave the column out",
            )

        return Column(len(found), take)

    rows = ArrayRows({name: column(name) for name in found.features}, inputs, label, source.where)
    rows.split = split
    return rows
