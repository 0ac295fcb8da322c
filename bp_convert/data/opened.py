"""Sources opened: rows that can be read by number, or a stream that is read from its start."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from bp_convert.data.columns import ColumnRows, of_tensors, open_columns
from bp_convert.data.fit import assign
from bp_convert.data.loader import (
    Item,
    ItemRows,
    is_item,
    is_plain,
    is_single,
    is_stream,
    name_inputs,
    split_item,
)
from bp_convert.data.rows import Part, Rows
from bp_convert.data.source import FORMS, Source
from bp_convert.errors import DataError
from bp_convert.values.tensors import TensorSpec

_ARRAYS = {".npy", ".npz", ".safetensors"}


def open_source(
    source: Source,
    specs: Sequence[TensorSpec],
    *,
    part: Part,
    tokenizer: str | Path | None = None,
    download: bool = False,
) -> Rows:
    """Open a folder, a file or a torchvision data set; nothing of its examples is read yet.

    Args:
        source: any form but FILE.py:LOADER.
        specs: the model's inputs; empty where nothing is known of it.
        part: torchvision's and other sets have a split for each.
        tokenizer: folder of a transformers tokenizer, for text.
        download: let torchvision fetch a data set that is not there.

    Raises:
        DataError: the source cannot be read or does not fit the model.
    """
    path = source.path
    if path.is_dir():
        return _folder(source, specs, part, tokenizer)
    if path.suffix in _ARRAYS and path.is_file():
        source.admit(())
        columns = open_columns(path, source.where)
        inputs, labels = assign(list(columns), specs, source.where)
        return ColumnRows(columns, inputs, labels, source.where)
    if path.suffix == ".txt" and path.is_file():
        from bp_convert.data.text import TextLines

        return TextLines(source, specs, tokenizer)
    from bp_convert.data import vision_sets

    if source.name in vision_sets.names():
        return vision_sets.VisionSet(source, specs, part, download=download)
    near = difflib.get_close_matches(source.name, vision_sets.names(), n=2)
    raise DataError(
        where=source.where,
        found=f"a file of an unknown kind, {path.suffix or 'without a suffix'}"
        if path.is_file()
        else "nothing with that path or name",
        allowed=FORMS,
        fix=f"did you mean {' or '.join(near)}?"
        if near
        else "check the path; other kinds of data come through FILE.py:LOADER",
    )


def _folder(
    source: Source, specs: Sequence[TensorSpec], part: Part, tokenizer: str | Path | None
) -> Rows:
    """Open a folder: a published layout that is known, or images."""
    from bp_convert.data import disk_sets, flickr
    from bp_convert.data.image_folder import ImageFolder

    if disk_sets.is_here(source.path):
        return disk_sets.open_set(source, specs, part, tokenizer)
    if flickr.is_here(source.path):
        return flickr.Captions(source, specs, part)
    half = _half(source.path, part)
    if half is None:
        return ImageFolder(source, specs)
    rows = ImageFolder(Source(source.text, str(half), source.options), specs)
    rows.split = half.name
    return rows


def _half(folder: Path, part: Part) -> Path | None:
    """Return the part of a folder that is laid out as ImageNet's is: train and val, or test."""
    learnt = folder / "train"
    held = [folder / name for name in ("val", "valid", "test") if (folder / name).is_dir()]
    if not learnt.is_dir() or not held:
        return None
    return learnt if part == "calibrate" else held[0]


def open_object(found: Any, specs: Sequence[TensorSpec], where: str) -> Rows | Iterable[object]:
    """Open what the user's code made, or a function that makes it.

    Raises:
        DataError: it does not fit the model. The user's own errors come through as they are.
    """
    readable = hasattr(found, "__iter__") or hasattr(found, "__getitem__")
    if isinstance(found, type) or (callable(found) and not readable):
        found = found()
    if is_item(found):
        return columns_of(split_item(found, specs, where), where)
    if is_stream(found) or _holds_batches(found, specs, where):
        stream: Iterable[object] = found
        return stream
    return ItemRows(found, specs, where)


def tensor_rows(
    inputs: Tensor | Mapping[str, Tensor] | Sequence[Tensor],
    labels: Tensor | None,
    specs: Sequence[TensorSpec],
    where: str,
) -> ColumnRows:
    """Return rows of tensors in memory, as ``from_tensors`` takes them.

    Raises:
        DataError: the tensors do not fit each other.
    """
    if isinstance(inputs, Mapping):
        item: Item = ((), dict(inputs), labels)
    else:
        values = (inputs,) if isinstance(inputs, Tensor) else tuple(inputs)
        item = name_inputs(values, specs, labels)
    return columns_of(item, where)


def columns_of(item: Item, where: str) -> ColumnRows:
    """Return rows of tensors that hold all examples at once."""
    args, kwargs, labels = item
    inputs: dict[str, str | None] = {f"input {i + 1}": None for i in range(len(args))}
    inputs |= {key: key for key in kwargs}
    tensors = dict(zip(inputs, [*args, *kwargs.values()], strict=True))
    name = None if labels is None else "the labels"
    if labels is not None:
        tensors["the labels"] = labels
    return ColumnRows(of_tensors(tensors, where), inputs, name, where)


def _holds_batches(found: Any, specs: Sequence[TensorSpec], where: str) -> bool:
    if not len(found):
        return False
    item = split_item(found[0], specs, where)
    return not is_plain(item[:2]) or (bool(specs) and not is_single(item, specs))
