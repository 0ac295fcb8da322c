"""Batches for training: in an order that the seed, the epoch and the place in it decide alone.

So a run that goes on from a checkpoint sees what an uninterrupted one would have seen, however many
processes read, and several processes together see what one would.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from bp_convert.data.arrays import ArrayRows
from bp_convert.data.collate import fit_batch
from bp_convert.data.dataset import Item, Rows, Stream
from bp_convert.data.items import batched, cut_item, users_code
from bp_convert.data.share import Share
from bp_convert.data.split import Split
from bp_convert.errors import BpConvertError, DataError, TrainingError
from bp_convert.feeding import augment
from bp_convert.graph.running import same_draws
from bp_convert.graph.tree import rows_in
from bp_convert.randomness import Aside, mixed
from bp_convert.values.training import Training

READABLE = "data that can be read"


@dataclass(frozen=True)
class Micro:
    """One forward pass's examples of this process.

    Attributes:
        args: positional inputs, with the examples on the first axis.
        kwargs: keyword inputs.
        labels: (n, ...), or None.
        total: examples of the pass in all processes.
        share: what the mean over this process's examples counts in the mean over all processes'
            means, so that their sum is the mean over all examples: n * processes / total.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    labels: Tensor | None
    total: int
    share: float


@dataclass(frozen=True)
class Place:
    """Which process this is."""

    rank: int = 0
    world: int = 1

    def part(self, total: int) -> tuple[slice, float]:
        """Return which of ``total`` examples are this process's, and their share.

        Where there are fewer examples than processes, each takes all of them.
        """
        if total < self.world:
            return slice(0, total), 1.0
        start, stop = (total * i // self.world for i in (self.rank, self.rank + 1))
        return slice(start, stop), (stop - start) * self.world / total


def feeds(
    split: Split, settings: Training, place: Place, *, pinned: bool = False
) -> tuple[Feed, Feed | None, str]:
    """Return what a run learns from, what it validates on, and words on both, which checkpoints
    have to agree on.

    Args:
        pinned: put batches into page-locked memory, for a GPU.

    Raises:
        TrainingError: epochs are asked for, and nobody knows how long one is.
        DataError: a loader cannot be augmented.
    """
    assert split.train is not None
    learnt = _feed(split.train, settings, place, pinned, shuffle=True)
    held = split.validate
    beside = None if held is None else _feed(held, settings, place, pinned, shuffle=False)
    assert split.train.data is not None
    count = f"{learnt.count:,} examples" if isinstance(learnt, RowsFeed) else "examples"
    words = f"{count} of {split.train.data.text}"
    if isinstance(beside, RowsFeed):
        words += f", validated on {beside.count:,}"
    return learnt, beside, words


def _feed(share: Share, settings: Training, place: Place, pinned: bool, *, shuffle: bool) -> Feed:
    if isinstance(share.data, Rows):
        return RowsFeed(share, settings, place, shuffle=shuffle, pinned=pinned)
    assert share.data is not None
    found = StreamFeed(share, settings, place)
    if shuffle and found.passes is None and settings.steps is None:
        raise TrainingError(
            where=share.data.where,
            found=f"epochs={settings.epochs:g}, and a loader without a length",
            allowed="a number of steps",
            fix="give steps=N instead of epochs",
        )
    if shuffle and settings.augment == "paper":
        raise DataError(
            where=share.data.where,
            found="a loader, and augment=paper",
            allowed="augmentation of sources whose examples have numbers",
            fix="let the loader augment its images",
        )
    return found


class RowsFeed:
    """Rows of a source: those that are learnt in a new order each epoch.

    Attributes:
        passes: in an epoch; of a stream None where that is not known.
        once: what is read is gone.
    """

    once = False

    def __init__(
        self, share: Share, settings: Training, place: Place, *, shuffle: bool, pinned: bool
    ) -> None:
        assert isinstance(share.data, Rows)
        assert share.rows is not None
        self._data, self._settings, self._place = share.data, settings, place
        self._shuffle, self._pinned = shuffle, pinned
        self._rows = torch.as_tensor(share.rows, dtype=torch.int64)
        self.count = len(share.rows)
        self.passes: int | None = -(-self.count // settings.batch)

    def epoch(self, number: int, start: int = 0) -> Iterator[Micro]:
        """Yield the passes of an epoch, from the one with the number ``start`` on."""
        settings, order = self._settings, self._rows
        if self._shuffle:
            generator = torch.Generator().manual_seed(mixed(settings.seed, number))
            order = order[torch.randperm(self.count, generator=generator)]
        passes = torch.split(order, settings.batch)[start:]
        mine = [self._place.part(len(one)) for one in passes]
        changed = self._shuffle and settings.augment == "paper"
        loader: DataLoader[Any] = DataLoader(
            _Epoch(self._data, settings.seed, number, changed=changed),
            batch_sampler=[p[span].tolist() for p, (span, _) in zip(passes, mine, strict=True)],
            num_workers=settings.workers,
            collate_fn=_same,
            pin_memory=self._pinned,
            # Its own, or starting it would move the state that dropout draws from.
            generator=torch.Generator(),
            multiprocessing_context="fork"
            if settings.workers and sys.platform == "linux"
            else None,
        )
        for found, one, (_, share) in zip(loader, passes, mine, strict=True):
            if isinstance(found, BpConvertError):
                raise found
            args, kwargs, labels = found
            yield Micro(args, kwargs, labels, len(one), share)


def _same(found: Any) -> Any:
    return found


class _Epoch(Dataset[Any]):
    """A source in one epoch: each batch is read with draws of its own, checked and augmented."""

    def __init__(self, data: Rows, seed: int, epoch: int, *, changed: bool) -> None:
        self._data, self._seed, self._epoch, self._changed = data, seed, epoch, changed

    def __len__(self) -> int:
        return len(self._data)

    def __getitems__(self, rows: list[int]) -> Item | BpConvertError:
        """Return (args, kwargs, labels), or the error: one that is raised in a worker comes out
        as something else."""
        try:
            with users_code(self._data.where, READABLE, "mend the data, or the code that reads it"):
                if isinstance(self._data, ArrayRows):  # no user's code runs in these
                    return self._read(rows)
                with same_draws(mixed(self._seed, self._epoch, rows[0])):
                    return self._read(rows)
        except BpConvertError as problem:
            return problem

    def _read(self, rows: Sequence[int]) -> Item:
        args, kwargs, labels = self._data.__getitems__(rows)
        args, kwargs = fit_batch(args, kwargs, self._data.specs, self._data.where)
        if self._changed:
            keys = [(self._seed, self._epoch, row) for row in rows]
            args, kwargs = augment.paper((args, kwargs), keys)
        return args, kwargs, labels


class StreamFeed:
    """What can only be read from its start.

    Its own random numbers are drawn from a state of their own, so that reading ahead or again
    changes nothing in the training.
    """

    def __init__(self, share: Share, settings: Training, place: Place) -> None:
        assert isinstance(share.data, Stream)
        self._data, self._accepts = share.data, share.accepts
        self._settings, self._place = settings, place
        self.once = share.data.once
        self.passes = _passes(share.data.opened, settings.batch)

    def epoch(self, number: int, start: int = 0) -> Iterator[Micro]:
        """Yield the passes of an epoch; those before ``start`` are read and let go."""
        data, settings = self._data, self._settings
        aside = Aside(mixed(settings.seed, number))
        with aside, users_code(data.where):
            items = batched(iter(data), data.specs, data.where, settings.batch)
        index = 0
        while True:
            with aside, users_code(data.where):
                item = next(items, None)
            if item is None:
                break
            index += 1
            if index <= start:
                continue
            batch = fit_batch(*item[:2], data.specs, data.where, self._accepts)
            total = rows_in(batch)
            span, share = self._place.part(total)
            yield Micro(*cut_item((*batch, item[2]), span), total, share)
        if index == 0:
            raise DataError(
                where=data.where,
                found=f"nothing in epoch {number + 1}",
                allowed="a loader that can be read from its start again",
                fix="give a function that makes the loader, or ask for one epoch",
            )


Feed = RowsFeed | StreamFeed


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


def groups(micros: Iterator[Micro], size: int) -> Iterator[tuple[list[Micro], bool]]:
    """Put the passes of one step together, and say whether it is the epoch's last step."""
    first = next(micros, None)
    while first is not None:
        group = [first, *islice(micros, size - 1)]
        first = next(micros, None)
        yield group, first is None
