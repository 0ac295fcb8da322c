"""Examples in memory: read from a source, checked against the model, described."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from bp_convert.data.collate import Accepts, fit_batch
from bp_convert.data.dataset import Batch, Item, Rows, Stream, empty
from bp_convert.data.items import batched, cut_item, is_plain, joined, users_code
from bp_convert.errors import DataError
from bp_convert.graph.tree import named_tensors, rows_in


@dataclass(frozen=True)
class Examples:
    """Examples in batches, on the CPU.

    Attributes:
        batches: (args, kwargs) of forward; each tensor has the examples on its first axis, each
            list of tensors one for each example.
        labels: (count, ...), in the order of the batches, (count,) integers where the examples
            have classes; None where there are none.
        count: number of examples.
        source: where they come from, in words.
        rows: their numbers among those that calibration and training take of the source: empty
            where they are none of these, None where the source has no numbers.
        digest: the first 16 hex digits of the SHA-256 of all tensors. The same examples in
            batches of another size have another digest.
        fresh: reads some other examples of the source, which nothing is fitted to, or none; None
            where they cannot be read without reading all before them.
    """

    batches: tuple[Batch, ...]
    labels: Tensor | None
    count: int
    source: str
    digest: str
    rows: tuple[int, ...] | None = None
    fresh: Callable[[], Batch | None] | None = field(default=None, compare=False, repr=False)

    @property
    def words(self) -> str:
        """What they are, for plans and reports: where from, and the hash of their contents."""
        return f"{self.source} (sha256 {self.digest})"

    def split_labels(self) -> list[Tensor | None]:
        """Return the labels of each batch."""
        if self.labels is None:
            return [None] * len(self.batches)
        return list(torch.split(self.labels, [rows_in(one) for one in self.batches]))


def read_rows(
    data: Rows, rows: Sequence[int], batch: int, accepts: Accepts | None = None
) -> tuple[list[Batch], Tensor | None]:
    """Read rows in batches that fit the model.

    Raises:
        DataError: they cannot be read, or do not fit.
    """
    with data.draws or contextlib.nullcontext():
        starts = range(0, len(rows), batch)
        items = [data.__getitems__(rows[start : start + batch]) for start in starts]
    return _checked(items, data, accepts)


def read_stream(
    data: Stream, count: int, skip: int, batch: int, accepts: Accepts | None = None
) -> tuple[list[Batch], Tensor | None]:
    """Read ``count`` examples of a stream after the first ``skip``, and stop there.

    Items are batches, or single examples where they have the shape of one.

    Raises:
        DataError: it cannot be read, is used up, or does not fit the model.
    """
    found: list[Item] = []
    passed = taken = 0
    with data.draws or contextlib.nullcontext(), users_code(data.where):
        for item in batched(data, data.specs, data.where, batch):
            size = rows_in(item[:2])
            start = min(size, skip - passed)
            stop = min(size, start + count - taken)
            if not is_plain(item[:2]):  # cannot be cut: taken whole, or passed over
                start, stop = (size, size) if start else (0, size)
            passed += start
            if stop > start:
                found.append(cut_item(item, slice(start, stop)))
                taken += stop - start
            if taken >= count:
                break
    if not found:
        raise used_up(data.where, passed, min(skip, passed)) if passed else empty(data.where)
    return _checked(found, data, accepts)


def _checked(
    items: Sequence[Item], data: Rows | Stream, accepts: Accepts | None
) -> tuple[list[Batch], Tensor | None]:
    with users_code(data.where):
        labels = joined([one[2] for one in items])
    return [fit_batch(*one[:2], data.specs, data.where, accepts) for one in items], labels


def used_up(where: str, total: int, taken: int) -> DataError:
    """Return the error of a source of which calibration left nothing."""
    return DataError(
        where=where,
        found=f"{total} examples, and calibration has used the first {taken}",
        allowed="examples that calibration has not seen",
        fix="calibrate on fewer examples, or evaluate on other data",
    )


def digest_of(batches: Sequence[Batch], labels: Tensor | None) -> str:
    """Return 16 hex digits that name the contents of the tensors."""
    found = hashlib.sha256()
    for args, kwargs in batches:
        named = [*enumerate(args), *sorted(kwargs.items())]
        for key, value in named:
            for path, tensor in named_tensors(value, str(key), objects=True):
                _feed(found, path, tensor)
    if labels is not None:
        _feed(found, "labels", labels)
    return found.hexdigest()[:16]


def _feed(found: Any, key: str, tensor: Tensor) -> None:
    found.update(f"{key}:{tensor.dtype}:{tuple(tensor.shape)};".encode())
    found.update(tensor.contiguous().flatten().view(torch.uint8).numpy())
