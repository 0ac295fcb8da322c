"""The one factory of sources: whatever holds data becomes Rows or a Stream."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from bp_convert.data.arrays import ArrayRows, array_rows, open_arrays
from bp_convert.data.collate import assign
from bp_convert.data.dataset import Item, Part, Request, Rows, Stream
from bp_convert.data.examples import Examples
from bp_convert.data.items import (
    ItemRows,
    is_item,
    is_plain,
    is_single,
    is_structure,
    name_inputs,
    split_item,
    users_code,
)
from bp_convert.data.locator import FORMS, Locator
from bp_convert.errors import DataError
from bp_convert.randomness import Aside
from bp_convert.scripts import is_code, load_object
from bp_convert.values.tensors import TensorSpec

Data = Examples | Tensor | Mapping[str, Tensor] | Iterable[Any] | str | Path
_ARRAYS = {".npy", ".npz", ".safetensors"}


def open_data(
    data: Any,
    specs: Sequence[TensorSpec] = (),
    *,
    part: Part = "train",
    seed: int = 0,
    tokenizer: str | Path | None = None,
    download: bool = False,
    text: str = "",
) -> Rows | Stream:
    """Open a source; nothing of its examples is read yet.

    Args:
        data: a source as ``bp_convert.data.locator.FORMS`` says, of which a Python file is run;
            Examples, tensors, a mapping by forward's keywords, a data set, a loader, an iterable,
            or a function that makes one.
        specs: the model's inputs; empty where nothing is known of it, and then nothing is checked.
        part: torchvision's and other sets have a split for each.
        seed: that the user's own code draws from.
        tokenizer: folder of a transformers tokenizer, for text.
        download: let torchvision fetch a data set that is not there.
        text: what reports call it; its own name, if empty.

    Raises:
        DataError: the source cannot be read or does not fit the model.
    """
    if isinstance(data, str | Path):
        locator = Locator.parse(data)
        if is_code(locator.name):
            locator.admit(())
            draws = Aside(seed)
            with draws:
                data = load_object(locator.name, locator.where)
            return _of_code(data, specs, locator.where, locator.text, draws)
        rows = _open_source(Request(locator, specs, part, tokenizer, download))
        rows.text, rows.specs, rows.part = locator.text, specs, part
        return rows
    if isinstance(data, Examples):
        return _of_examples(data, specs)
    if isinstance(data, Mapping) and len(data) == len(specs) == 1 and specs[0].name is None:
        data = next(iter(data.values()))  # the only input, whatever forward calls it
    data = [data] if is_structure(data) else data
    words = text or ("tensors" if is_item(data) else "a loader")
    return _of_code(data, specs, "data" if text else f"data {words}", words, Aside(seed))


def is_arrays(data: str | Path) -> bool:
    """Tell whether a source is a file of arrays."""
    path = Locator.parse(data).path
    return path.suffix in _ARRAYS and path.is_file()


def has_parts(data: str | Path) -> bool | None:
    """Tell whether a source brings parts of its own; None where opening it has to tell."""
    from bp_convert.data import disk_sets

    locator = Locator.parse(data)
    if is_code(locator.name):
        return None
    path = locator.path
    if path.is_dir():
        return (path / disk_sets.PARTS).is_file() or _half(path, "train") is not None
    return not path.exists()  # a data set by name


def _open_source(request: Request) -> Rows:
    """Open a folder, a file or a torchvision data set."""
    locator = request.source
    path = locator.path
    if path.is_dir():
        return _open_folder(request)
    if is_arrays(path):
        locator.admit(())
        columns = open_arrays(path, locator.where)
        inputs, labels = assign(list(columns), request.specs, locator.where)
        return ArrayRows(columns, inputs, labels, locator.where)
    if path.suffix == ".txt" and path.is_file():
        from bp_convert.data.text_lines import TextLines

        return TextLines(request)
    from bp_convert.data import vision_sets

    if locator.name in vision_sets.names():
        return vision_sets.VisionSet(request)
    near = difflib.get_close_matches(locator.name, vision_sets.names(), n=2)
    raise locator.bad(
        f"a file of an unknown kind, {path.suffix or 'without a suffix'}"
        if path.is_file()
        else "nothing with that path or name",
        FORMS,
        f"did you mean {' or '.join(near)}?"
        if near
        else "check the path; other kinds of data come through FILE.py:LOADER",
    )


def _open_folder(request: Request) -> Rows:
    """Open a folder: a published layout that is known, or images."""
    from bp_convert.data import disk_sets
    from bp_convert.data.image_folder import ImageFolder

    source = request.source
    if disk_sets.is_here(source.path):
        return disk_sets.open_set(request)
    half = _half(source.path, request.part)
    if half is None:
        return ImageFolder(request)
    rows = ImageFolder(replace(request, source=replace(source, name=str(half))))
    rows.split = half.name
    return rows


def _half(folder: Path, part: Part) -> Path | None:
    """Return the part of a folder that is laid out as ImageNet's is: train and val, or test."""
    learnt = folder / "train"
    held = [folder / name for name in ("val", "valid", "test") if (folder / name).is_dir()]
    if not learnt.is_dir() or not held:
        return None
    return learnt if part == "train" else held[0]


def _of_code(
    found: Any, specs: Sequence[TensorSpec], where: str, text: str, draws: Aside
) -> Rows | Stream:
    """Open what the user's code has made, or a function that makes it."""
    with draws, users_code(where):
        readable = hasattr(found, "__iter__") or hasattr(found, "__getitem__")
        make = found if callable(found) and not readable else None
        opened: Any = found() if make is not None or isinstance(found, type) else found
        indexed = hasattr(opened, "__getitem__") and hasattr(opened, "__len__")
        if is_item(opened):
            rows: Rows | Stream = array_rows(split_item(opened, specs, where), where)
        elif (
            isinstance(opened, DataLoader | IterableDataset)
            or not indexed
            or _holds_batches(opened, specs, where)
        ):
            rows = Stream(opened, make)
        else:
            rows = ItemRows(opened, specs, where)
    rows.where, rows.text, rows.specs = where, text, specs
    rows.draws = None if isinstance(rows, ArrayRows) else draws
    return rows


def _holds_batches(found: Any, specs: Sequence[TensorSpec], where: str) -> bool:
    if not len(found):
        return False
    item = split_item(found[0], specs, where)
    return not is_plain(item[:2]) or (bool(specs) and not is_single(item, specs))


def _of_examples(data: Examples, specs: Sequence[TensorSpec]) -> Rows:
    try:
        args = tuple(torch.cat(ones) for ones in zip(*(b[0] for b in data.batches), strict=True))
        kwargs = {key: torch.cat([b[1][key] for b in data.batches]) for key in data.batches[0][1]}
    except RuntimeError as problem:
        raise DataError(
            where="data",
            found=f"examples of several shapes: {problem}",
            allowed="examples of one shape",
            fix="give the source that they come from instead",
        ) from None
    return tensor_rows(kwargs or args, data.labels, specs, "data", data.source)


def tensor_rows(
    inputs: Tensor | Mapping[str, Tensor] | Sequence[Tensor],
    labels: Tensor | None,
    specs: Sequence[TensorSpec],
    where: str,
    text: str,
) -> ArrayRows:
    """Return rows of tensors in memory; arguments as for ``from_tensors``.

    Raises:
        DataError: the tensors do not fit each other.
    """
    if isinstance(inputs, Mapping):
        item: Item = (), dict(inputs), labels
    else:
        values = (inputs,) if isinstance(inputs, Tensor) else tuple(inputs)
        item = name_inputs(values, specs, labels)
    rows = array_rows(item, where)
    rows.text, rows.specs = text, specs
    return rows
