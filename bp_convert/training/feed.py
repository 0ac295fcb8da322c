"""Batches for training: in an order that the seed, the epoch and the place in it decide alone.

So a run that goes on from a checkpoint sees what an uninterrupted one would have seen, however many
processes read, and several processes together see what one would.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from bp_convert.data.columns import ColumnRows
from bp_convert.data.examples import Batch
from bp_convert.data.fit import fit_batch
from bp_convert.data.loader import batched
from bp_convert.data.rows import Rows
from bp_convert.errors import BpConvertError, DataError
from bp_convert.graph.running import same_draws
from bp_convert.graph.tree import rows_in
from bp_convert.training.randomness import Aside, mixed
from bp_convert.values.tensors import TensorSpec

Change = Callable[[Batch, Sequence[tuple[int, int, int]]], Batch]


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

    def part(self, total: int) -> tuple[range, float]:
        """Return which of ``total`` examples are this process's, and their share.

        Where there are fewer examples than processes, each takes all of them.
        """
        if total < self.world:
            return range(total), 1.0
        start, stop = (total * i // self.world for i in (self.rank, self.rank + 1))
        return range(start, stop), (stop - start) * self.world / total


class Feed(Protocol):
    """Where batches come from."""

    passes: int | None  # in an epoch; None where that is not known

    def epoch(self, number: int, start: int = 0) -> Iterator[Micro]:
        """Yield the passes of an epoch, from the one with the number ``start`` on."""
        ...


class RowsFeed:
    """Rows of a source in a new order each epoch.

    Args:
        rows: the source.
        chosen: which of its rows there are to learn from.
        specs: the model's inputs, which each batch is checked against.
        batch: examples of one pass, over all processes.
        seed: of the order.
        shuffle: take the rows as they come, if False.
        place: which process this is.
        workers: processes that read ahead. They share the source with this one; no copy of it is
            made where processes are forked (Linux).
        pinned: put batches into page-locked memory, for a GPU.
        change: alters a batch, given the (seed, epoch, row) of each example.
    """

    def __init__(
        self,
        rows: Rows,
        chosen: Sequence[int],
        specs: Sequence[TensorSpec],
        *,
        where: str,
        batch: int,
        seed: int = 0,
        shuffle: bool = True,
        place: Place | None = None,
        workers: int = 0,
        pinned: bool = False,
        change: Change | None = None,
    ) -> None:
        self._rows, self._specs, self._where = rows, specs, where
        self._chosen = torch.as_tensor(chosen, dtype=torch.int64)
        self._batch, self._seed, self._shuffle = batch, seed, shuffle
        self._place, self._workers, self._pinned = place or Place(), workers, pinned
        self._change = change
        self.count = len(self._chosen)
        self.passes: int | None = -(-self.count // batch)

    def epoch(self, number: int, start: int = 0) -> Iterator[Micro]:
        """Yield the passes of an epoch, from the one with the number ``start`` on."""
        order = self._chosen
        if self._shuffle:
            generator = torch.Generator().manual_seed(mixed(self._seed, number))
            order = order[torch.randperm(self.count, generator=generator)]
        parts = list(torch.split(order, self._batch))[start:]
        places = [self._place.part(len(part)) for part in parts]
        mine = [
            part[span.start : span.stop].tolist()
            for part, (span, _) in zip(parts, places, strict=True)
        ]
        table = _Table(self._rows, self._specs, self._where, self._seed, number, self._change)
        loader: DataLoader[Any] = DataLoader(
            table,
            batch_sampler=mine,
            num_workers=self._workers,
            collate_fn=_same,
            pin_memory=self._pinned,
            # Its own, or starting it would move the state that dropout draws from.
            generator=torch.Generator(),
            multiprocessing_context="fork" if self._workers and sys.platform == "linux" else None,
        )
        for found, part, (_, share) in zip(loader, parts, places, strict=True):
            if isinstance(found, BpConvertError):
                raise found
            args, kwargs, labels = found
            yield Micro(args, kwargs, labels, len(part), share)


def _same(found: Any) -> Any:
    return found


class _Table(Dataset[Any]):
    """Rows of one epoch, as a DataLoader asks for them: a whole batch at once."""

    def __init__(
        self,
        rows: Rows,
        specs: Sequence[TensorSpec],
        where: str,
        seed: int,
        epoch: int,
        change: Change | None,
    ) -> None:
        self._rows, self._specs, self._where = rows, specs, where
        self._seed, self._epoch, self._change = seed, epoch, change
        self._own = isinstance(rows, ColumnRows)  # no user's code runs in these

    def __len__(self) -> int:
        return len(self._rows)

    def __getitems__(self, rows: list[int]) -> Any:
        """Return (args, kwargs, labels), or the error: one that is raised in a worker comes out
        as something else."""
        try:
            if self._own:
                return self._read(rows)
            with same_draws(mixed(self._seed, self._epoch, rows[0])):
                return self._read(rows)
        except BpConvertError as problem:
            return problem
        except Exception as problem:
            return DataError(
                where=self._where,
                found=f"it fails with {type(problem).__name__}: {problem}",
                allowed="data that can be read",
                fix="mend the data, or the code that reads it",
            )

    def _read(self, rows: list[int]) -> Any:
        (batch,) = self._rows.read(rows, len(rows))
        args, kwargs = fit_batch(*batch, self._specs, self._where)
        labels = self._rows.labels(rows)
        if self._change is not None:
            keys = [(self._seed, self._epoch, row) for row in rows]
            args, kwargs = self._change((args, kwargs), keys)
        return args, kwargs, labels


class StreamFeed:
    """What can only be read from its start: a DataLoader, an iterable, or what makes one.

    Its own random numbers are drawn from a state of their own, so that reading ahead or again
    changes nothing in the training.

    Args:
        make: returns the iterable, anew for each epoch.
        length: passes in an epoch, if that is known.
    """

    def __init__(
        self,
        make: Callable[[], Iterable[object]],
        specs: Sequence[TensorSpec],
        *,
        where: str,
        batch: int,
        seed: int = 0,
        place: Place | None = None,
        length: int | None = None,
    ) -> None:
        self._make, self._specs, self._where = make, specs, where
        self._batch, self._seed, self._place = batch, seed, place or Place()
        self.passes = length

    def epoch(self, number: int, start: int = 0) -> Iterator[Micro]:
        """Yield the passes of an epoch; those before ``start`` are read and let go."""
        aside = Aside(mixed(self._seed, number))
        with aside:
            items = batched(iter(self._make()), self._specs, self._where, self._batch)
        index = 0
        while True:
            with aside:
                try:
                    item = next(items, None)
                except BpConvertError:
                    raise
                except Exception as problem:
                    raise DataError(
                        where=self._where,
                        found=f"it fails with {type(problem).__name__}: {problem}",
                        allowed="a loader that yields batches",
                        fix="mend the loader; it must run on its own",
                    ) from problem
            if item is None:
                break
            index += 1
            if index <= start:
                continue
            args, kwargs = fit_batch(item[0], item[1], self._specs, self._where)
            total = rows_in((args, kwargs))
            span, share = self._place.part(total)
            cut = slice(span.start, span.stop)
            yield Micro(
                tuple(one[cut] for one in args),
                {key: one[cut] for key, one in kwargs.items()},
                None if item[2] is None else item[2][cut],
                total,
                share,
            )
        if index == 0:
            raise DataError(
                where=self._where,
                found=f"nothing in epoch {number + 1}",
                allowed="a loader that can be read from its start again",
                fix="give a function that makes the loader, or ask for one epoch",
            )


def groups(micros: Iterator[Micro], size: int) -> Iterator[tuple[list[Micro], bool]]:
    """Put the passes of one step together, and say whether it is the epoch's last step."""
    waiting: list[Micro] | None = None
    group: list[Micro] = []
    for micro in micros:
        if waiting is not None:
            yield waiting, False
            waiting = None
        group.append(micro)
        if len(group) == size:
            waiting, group = group, []
    if waiting is not None and group:
        yield waiting, False
        waiting = None
    if group or waiting:
        yield group or waiting or [], True
