"""The door to examples: from a source in words, from the user's own loader, from tensors."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from bp_convert.data.code import is_code, load_object
from bp_convert.data.columns import ColumnRows, of_tensors, open_columns
from bp_convert.data.examples import Examples
from bp_convert.data.fit import assign
from bp_convert.data.gather import Request
from bp_convert.data.loader import (
    Item,
    ItemRows,
    is_item,
    is_single,
    is_stream,
    name_inputs,
    seeded,
    split_item,
)
from bp_convert.data.rows import Part, Rows
from bp_convert.data.source import FORMS, Source
from bp_convert.errors import BpConvertError, DataError
from bp_convert.values.tensors import TensorSpec

_ARRAYS = {".npy", ".npz", ".safetensors"}


def load_examples(
    source: str | Path,
    specs: Sequence[TensorSpec],
    *,
    count: int = 512,
    batch: int = 32,
    seed: int = 0,
    part: Part = "calibrate",
    tokenizer: str | Path | None = None,
    held_out: int = 0,
) -> Examples:
    """Load examples from a folder, a file, a loader or a torchvision data set.

    Calibration and evaluation on one source never share an example if both have the same
    ``seed`` and evaluation is told in ``held_out`` how many calibration took. Of a source that
    can only be read from its start (a DataLoader, a generator) calibration takes the first
    ``count`` and evaluation those after ``held_out``; of any other a seeded choice.

    Args:
        source: one of ``bp_convert.data.source.FORMS``. A Python file that it names is run.
        specs: the model's inputs; empty where nothing is known of it, and then nothing is checked.
        count: examples wanted; fewer are taken where there are fewer, and ``source`` says so.
        batch: examples in a batch.
        seed: of the choice, and of a loader's own shuffling.
        part: what the examples are for; torchvision's sets have a split for each.
        tokenizer: folder of a transformers tokenizer, for text.
        held_out: ``Examples.count`` of the calibration.

    Raises:
        DataError: the source cannot be read, is empty, or does not fit the model.
    """
    asked = Request(specs, count, batch, seed, part, held_out)
    parsed = Source.parse(source)
    if is_code(parsed.name):
        parsed.admit(())
        with seeded(seed):
            return _from_code(load_object(parsed.name, parsed.where), asked, parsed)
    path = parsed.path
    if path.is_dir():
        from bp_convert.data.images import ImageFolder

        return asked.of_rows(ImageFolder(parsed, specs), parsed.where, parsed.text)
    if path.suffix in _ARRAYS and path.is_file():
        parsed.admit(())
        columns = open_columns(path, parsed.where)
        inputs, labels = assign(list(columns), specs, parsed.where)
        table = ColumnRows(columns, inputs, labels, parsed.where)
        return asked.of_rows(table, parsed.where, parsed.text)
    if path.suffix == ".txt" and path.is_file():
        from bp_convert.data.text import TextLines

        lines = TextLines(parsed, specs, tokenizer)
        return asked.of_rows(lines, parsed.where, parsed.text)
    from bp_convert.data import vision_sets

    if parsed.name in vision_sets.names():
        rows = vision_sets.VisionSet(parsed, specs, part)
        if rows.split:  # the splits are other images already
            asked = Request(specs, count, batch, seed, part, 0)
        return asked.of_rows(rows, parsed.where, parsed.text)
    near = difflib.get_close_matches(parsed.name, vision_sets.names(), n=2)
    raise DataError(
        where=parsed.where,
        found=f"a file of an unknown kind, {path.suffix or 'without a suffix'}"
        if path.is_file()
        else "nothing with that path or name",
        allowed=FORMS,
        fix=f"did you mean {' or '.join(near)}?"
        if near
        else "check the path; other kinds of data come through FILE.py:LOADER",
    )


def from_tensors(
    inputs: Tensor | Mapping[str, Tensor] | Sequence[Tensor],
    labels: Tensor | None = None,
    specs: Sequence[TensorSpec] = (),
    *,
    count: int | None = None,
    batch: int = 32,
    seed: int = 0,
    part: Part = "calibrate",
    held_out: int = 0,
    source: str = "tensors",
) -> Examples:
    """Make examples of tensors in memory.

    Args:
        inputs: (N, ...), for a forward of one input; a mapping by forward's keywords; or a
            sequence of the positional inputs, each (N, ...).
        labels: (N, ...), or None.
        specs: the model's inputs, to check against.
        count: examples to choose as ``load_examples`` does; None takes all, in their order.
        batch: examples in a batch.
        seed: of the choice.
        part: which end of the permutation is taken.
        held_out: as for ``load_examples``.
        source: words for reports.

    Raises:
        DataError: there is no example, or the tensors do not fit each other or the model.
    """
    if isinstance(inputs, Mapping):
        item: Item = ((), dict(inputs), labels)
    else:
        values = (inputs,) if isinstance(inputs, Tensor) else tuple(inputs)
        item = name_inputs(values, specs, labels)
    rows = _columns(item, f"data {source}")
    wanted = max(1, len(rows)) if count is None else count
    asked = Request(specs, wanted, batch, seed, part, held_out)
    return asked.of_rows(rows, f"data {source}", source, in_order=count is None)


def from_loader(
    loader: Any,
    specs: Sequence[TensorSpec] = (),
    *,
    count: int = 512,
    batch: int = 32,
    seed: int = 0,
    part: Part = "calibrate",
    held_out: int = 0,
    source: str = "a loader",
) -> Examples:
    """Take examples from a DataLoader, a data set, an iterable, or a function that makes one.

    Items are tensors, mappings, tuples of the inputs, or (input, label) pairs; arguments are
    those of ``load_examples``.

    Raises:
        DataError: the loader fails, yields nothing, or does not fit the model.
    """
    asked = Request(specs, count, batch, seed, part, held_out)
    with seeded(seed):
        return _from_code(loader, asked, Source(source, source))


def _from_code(found: Any, asked: Request, source: Source) -> Examples:
    """Read whatever the user's code has made; its own errors become ours."""
    where = source.where
    try:
        readable = hasattr(found, "__iter__") or hasattr(found, "__getitem__")
        if isinstance(found, type) or (callable(found) and not readable):
            found = found()
        if is_item(found):
            rows: Rows = _columns(split_item(found, asked.specs, where), where)
            return asked.of_rows(rows, where, source.text)
        if is_stream(found) or _holds_batches(found, asked.specs, where):
            return asked.of_stream(found, where, source.text)
        return asked.of_rows(ItemRows(found, asked.specs, where), where, source.text)
    except BpConvertError:
        raise
    except Exception as problem:
        raise DataError(
            where=where,
            found=f"it fails with {type(problem).__name__}: {problem}",
            allowed="a DataLoader, a data set, an iterable, or a function without arguments that "
            "makes one",
            fix="mend the loader; it must run on its own",
        ) from problem


def _holds_batches(found: Any, specs: Sequence[TensorSpec], where: str) -> bool:
    return (
        bool(specs) and len(found) > 0 and not is_single(split_item(found[0], specs, where), specs)
    )


def _columns(item: Item, where: str) -> ColumnRows:
    """Return rows of tensors that hold all examples at once."""
    args, kwargs, labels = item
    inputs: dict[str, str | None] = {f"input {i + 1}": None for i in range(len(args))}
    inputs |= {key: key for key in kwargs}
    tensors = dict(zip(inputs, [*args, *kwargs.values()], strict=True))
    name = None if labels is None else "the labels"
    if labels is not None:
        tensors["the labels"] = labels
    return ColumnRows(of_tensors(tensors, where), inputs, name, where)
