"""The door to examples: from a source in words, from the user's own loader, from tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from bp_convert.data.code import is_code, load_object
from bp_convert.data.columns import ColumnRows
from bp_convert.data.examples import Examples
from bp_convert.data.fit import Accepts
from bp_convert.data.gather import Request
from bp_convert.data.loader import ItemRows
from bp_convert.data.opened import open_object, open_source, tensor_rows
from bp_convert.data.rows import Part
from bp_convert.data.source import Source
from bp_convert.errors import BpConvertError, DataError
from bp_convert.graph.running import same_draws
from bp_convert.values.tensors import TensorSpec


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
    spare: float | None = None,
    accepts: Accepts | None = None,
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
        spare: share of the source that calibration leaves to training, where that takes the same
            source; evaluation then leaves half of the rest. None where it takes another.
        accepts: tells whether the model runs on another shape than described.

    Raises:
        DataError: the source cannot be read, is empty, or does not fit the model.
    """
    asked = Request(specs, count, batch, seed, part, held_out, spare, accepts)
    parsed = Source.parse(source)
    if is_code(parsed.name):
        parsed.admit(())
        with same_draws(seed):
            return _from_code(load_object(parsed.name, parsed.where), asked, parsed)
    rows = open_source(parsed, specs, part=part, tokenizer=tokenizer)
    if getattr(rows, "split", ""):  # the splits are other examples already
        left = spare if part == "calibrate" else None
        asked = Request(specs, count, batch, seed, part, 0, left, accepts)
    return asked.of_rows(rows, parsed.where, parsed.text)


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
    spare: float | None = None,
    accepts: Accepts | None = None,
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
        held_out, spare, accepts: as for ``load_examples``.
        source: words for reports.

    Raises:
        DataError: there is no example, or the tensors do not fit each other or the model.
    """
    rows = tensor_rows(inputs, labels, specs, f"data {source}")
    wanted = max(1, len(rows)) if count is None else count
    asked = Request(specs, wanted, batch, seed, part, held_out, spare, accepts)
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
    spare: float | None = None,
    accepts: Accepts | None = None,
    source: str = "a loader",
) -> Examples:
    """Take examples from a DataLoader, a data set, an iterable, or a function that makes one.

    Items are tensors, mappings, tuples of the inputs, or (input, label) pairs; arguments are
    those of ``load_examples``.

    Raises:
        DataError: the loader fails, yields nothing, or does not fit the model.
    """
    asked = Request(specs, count, batch, seed, part, held_out, spare, accepts)
    with same_draws(seed):
        return _from_code(loader, asked, Source(source, source))


def _from_code(found: Any, asked: Request, source: Source) -> Examples:
    """Read whatever the user's code has made; its own errors become ours."""
    where = source.where
    try:
        opened: Any = open_object(found, asked.specs, where)
        if isinstance(opened, ColumnRows | ItemRows):
            return asked.of_rows(opened, where, source.text)
        return asked.of_stream(opened, where, source.text)
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
