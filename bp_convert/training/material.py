"""Whatever holds data turned into what a run reads: examples to learn from, and to validate on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from bp_convert.data.code import is_code, load_object
from bp_convert.data.columns import ColumnRows
from bp_convert.data.door import same_source
from bp_convert.data.examples import Examples
from bp_convert.data.loader import ItemRows
from bp_convert.data.opened import open_object, open_source, tensor_rows
from bp_convert.data.rows import Part, Rows, broken_words
from bp_convert.data.source import Source
from bp_convert.errors import BpConvertError, DataError, TrainingError
from bp_convert.graph.running import same_draws
from bp_convert.training import augment
from bp_convert.training.feed import Feed, Place, RowsFeed, StreamFeed
from bp_convert.training.randomness import mixed
from bp_convert.values.tensors import TensorSpec
from bp_convert.values.training import Training

ALONE = Place()
CALIBRATED = "{} of {} validation examples were calibrated on: their loss is low at the start"
UNSPLIT = "no validation: a loader that is read from its start cannot be split; give validation="


@dataclass(frozen=True)
class Material:
    """What a run reads.

    Attributes:
        learnt: examples to learn from.
        held: examples to validate on, or None.
        words: what and how many, for reports and for checkpoints to agree on.
        notes: what the reader should know.
    """

    learnt: Feed
    held: Feed | None
    words: str
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Opened:
    where: str
    text: str
    rows: Rows | None
    make: Callable[[], Iterable[object]] | None = None
    length: int | None = None
    split: bool = False  # the source keeps its parts apart by itself


@dataclass(frozen=True)
class Reading:
    """How everything is read.

    Attributes:
        specs: the model's inputs.
        tokenizer: folder of a tokenizer, for text.
        download: let torchvision fetch what is not there.
        place: which process this is.
        pinned: use page-locked memory.
    """

    specs: Sequence[TensorSpec] = ()
    tokenizer: str | Path | None = None
    download: bool = False
    place: Place = ALONE
    pinned: bool = False


def material(
    data: Any,
    validation: Any,
    settings: Training,
    reading: Reading,
    *,
    fitted: frozenset[int] = frozenset(),
    scored: frozenset[int] = frozenset(),
) -> Material:
    """Open the data of a run.

    Args:
        data: a source, tensors, a data set, a loader, or a function that makes one.
        validation: the same, or the share of the data that is held out; 0 for none.
        fitted: rows that the model was calibrated on: held out only where too few others are.
        scored: rows that are neither learnt nor held out.

    Raises:
        DataError: it cannot be read, or validation would be on examples that are learnt.
    """
    opened = _open(data, "calibrate", settings, reading)
    notes: list[str] = []
    broken: frozenset[int] = getattr(opened.rows, "broken", frozenset())
    if broken:
        notes.append(broken_words(len(broken)))
        scored |= broken
    held: Feed | None = None
    chosen: Sequence[int] = ()
    if opened.rows is not None:
        chosen = [row for row in range(len(opened.rows)) if row not in scored]
    if isinstance(validation, int | float):
        if opened.rows is None:
            notes += [UNSPLIT] if validation else []
        elif validation:
            chosen, kept = _parted(
                len(opened.rows), float(validation), settings.seed, opened.where, fitted, scored
            )
            if known := sum(row in fitted for row in kept):
                notes.append(CALIBRATED.format(known, len(kept)))
            held = _rows(opened, kept, settings, reading, held=True)
    else:
        beside = _open(validation, "evaluate", settings, reading)
        _check_apart(data, validation, opened, beside)
        held = _feed(beside, settings, reading, held=True)
    learnt = (
        _rows(opened, chosen, settings, reading, held=False)
        if opened.rows is not None
        else _feed(opened, settings, reading, held=False)
    )
    if settings.augment == "paper" and opened.rows is None:
        raise DataError(
            where=opened.where,
            found="a loader, and augment=paper",
            allowed="augmentation of sources whose examples have numbers",
            fix="let the loader augment its images",
        )
    count = f"{learnt.count:,} examples" if isinstance(learnt, RowsFeed) else "examples"
    words = f"{count} of {opened.text}"
    if held is not None and isinstance(held, RowsFeed):
        words += f", validated on {held.count:,}"
    return Material(learnt, held, words, tuple(notes))


def _open(data: Any, part: Part, settings: Training, reading: Reading) -> _Opened:
    specs = reading.specs
    if isinstance(data, str | Path):
        source = Source.parse(data)
        if not is_code(source.name):
            rows = open_source(
                source,
                specs,
                part=part,
                tokenizer=reading.tokenizer,
                download=reading.download and reading.place.rank == 0,
            )
            split = bool(getattr(rows, "split", ""))
            return _Opened(source.where, source.text, rows, split=split)
        source.admit(())
        with same_draws(settings.seed):
            found: Any = load_object(source.name, source.where)
        return _of_object(found, source.where, source.text, settings, specs)
    if isinstance(data, Examples):
        return _of_examples(data, specs)
    if isinstance(data, Mapping) and len(data) == len(specs) == 1 and specs[0].name is None:
        data = next(iter(data.values()))
    return _of_object(data, "data", "the data given", settings, specs)


def _of_object(
    found: Any, where: str, text: str, settings: Training, specs: Sequence[TensorSpec]
) -> _Opened:
    try:
        with same_draws(settings.seed):
            opened: Any = open_object(found, specs, where)
    except BpConvertError:
        raise
    except Exception as problem:
        raise DataError(
            where=where,
            found=f"it fails with {type(problem).__name__}: {problem}",
            allowed="a DataLoader, a data set, an iterable, or a function that makes one",
            fix="mend the loader; it must run on its own",
        ) from problem
    if isinstance(opened, ColumnRows | ItemRows):
        return _Opened(where, text, opened)
    readable = hasattr(found, "__iter__") or hasattr(found, "__getitem__")
    fresh = callable(found) and not readable
    first = [opened]  # what opening has made serves the first epoch

    def make() -> Iterable[object]:
        if not fresh:
            return opened  # type: ignore[no-any-return]
        made: Iterable[object] = first.pop() if first else found()
        return made

    return _Opened(where, text, None, make, _passes(opened, settings.batch))


def _passes(stream: Any, batch: int) -> int | None:
    """Return how many passes a stream gives, where its length tells."""
    try:
        batches = len(stream)
    except TypeError:
        return None
    if isinstance(stream, DataLoader) and stream.batch_size is not None:
        size = stream.batch_size
        try:
            total = len(stream.dataset)  # type: ignore[arg-type]
        except TypeError:
            return batches * -(-size // batch)
        sizes = [min(size, total - i * size) for i in range(batches)]
        return sum(-(-one // batch) for one in sizes if one > 0)
    return batches


def _of_examples(data: Examples, specs: Sequence[TensorSpec]) -> _Opened:
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
    inputs: Mapping[str, Tensor] | Sequence[Tensor] = kwargs or args
    return _Opened("data", data.source, tensor_rows(inputs, data.labels, specs, "data"))


def _parted(
    total: int,
    share: float,
    seed: int,
    where: str,
    fitted: frozenset[int],
    scored: frozenset[int],
) -> tuple[list[int], list[int]]:
    """Choose which rows are learnt and which are held out; nothing but the seed decides."""
    there = total - len(scored)
    count = max(1, round(share * there))
    if count >= there:
        raise DataError(
            where=where,
            found=f"{there} examples, of which {count} would be held out for validation",
            allowed="at least one to learn from",
            fix="give more data, a smaller validation share, or validation=0",
        )
    generator = torch.Generator().manual_seed(mixed(seed, 0x5EED))
    order: list[int] = torch.randperm(total, generator=generator).tolist()
    order = [row for row in order if row not in scored]
    order.sort(key=fitted.__contains__)  # stable: new ones first, in their order
    return sorted(order[count:]), sorted(order[:count])


def _check_apart(data: Any, validation: Any, one: _Opened, two: _Opened) -> None:
    both_named = isinstance(data, str | Path) and isinstance(validation, str | Path)
    same = same_source(data, validation) if both_named else data is validation
    if same and not (one.split and two.split):
        raise DataError(
            where=two.where,
            found="the data that is learnt from",
            allowed="other examples, or the share that is held out, such as validation=0.1",
            fix="leave validation out: a tenth is then held out",
        )


def _feed(opened: _Opened, settings: Training, reading: Reading, *, held: bool) -> Feed:
    if opened.rows is not None:
        return _rows(opened, _sound(opened.rows), settings, reading, held=held)
    assert opened.make is not None
    if not held and opened.length is None and settings.steps is None:
        raise TrainingError(
            where=opened.where,
            found=f"epochs={settings.epochs:g}, and a loader without a length",
            allowed="a number of steps",
            fix="give steps=N instead of epochs",
        )
    return StreamFeed(
        opened.make,
        reading.specs,
        where=opened.where,
        batch=settings.batch,
        seed=settings.seed,
        place=reading.place,
        length=opened.length,
    )


def _sound(rows: Rows) -> Sequence[int]:
    """Return the rows that can be read."""
    broken: frozenset[int] = getattr(rows, "broken", frozenset())
    return [row for row in range(len(rows)) if row not in broken] if broken else range(len(rows))


def _rows(
    opened: _Opened, chosen: Sequence[int], settings: Training, reading: Reading, *, held: bool
) -> RowsFeed:
    assert opened.rows is not None
    if not len(chosen):
        raise DataError(
            where=opened.where,
            found="no examples",
            allowed="at least one example",
            fix="check the path; name the folder or the file that holds the data",
        )
    return RowsFeed(
        opened.rows,
        chosen,
        reading.specs,
        where=opened.where,
        batch=settings.batch,
        seed=settings.seed,
        shuffle=not held,
        place=reading.place,
        workers=settings.workers,
        pinned=reading.pinned,
        change=augment.paper if settings.augment == "paper" and not held else None,
    )
