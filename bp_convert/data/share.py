"""What one use gets of a source: the choice of rows, and those rows in memory."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch import Tensor

from bp_convert.data.collate import Accepts, fit_batch
from bp_convert.data.dataset import Batch, Item, Rows, Stream, empty
from bp_convert.data.examples import Examples, digest_of
from bp_convert.data.factory import tensor_rows
from bp_convert.data.items import batched, cut_item, is_plain, joined, users_code
from bp_convert.errors import DataError
from bp_convert.graph.tree import rows_in
from bp_convert.randomness import mixed
from bp_convert.values.tensors import TensorSpec

EXAMPLES = 512  # that are calibrated on, where the caller does not say
FRESH = 32  # examples on which a fitted model is compared with its source


@dataclass(frozen=True)
class Share:
    """What one use gets of a source.

    Attributes:
        data: the source, opened; None where its examples are given.
        rows: numbers of the examples; None of a stream.
        count: examples that were asked for; None takes all.
        skip: of a stream, examples that another use takes before.
        batch: examples of a batch in memory.
        accepts: tells whether the model runs on another shape than described.
        others: some rows that no use takes.
        given: examples that are in memory already.
    """

    data: Rows | Stream | None
    rows: tuple[int, ...] | None = None
    count: int | None = None
    skip: int = 0
    batch: int = 32
    accepts: Accepts | None = None
    others: tuple[int, ...] = ()
    given: Examples | None = None

    def __post_init__(self) -> None:
        if self.count is not None and min(self.count, self.batch) < 1 and self.data is not None:
            raise DataError(
                where=self.data.where,
                found=f"count {self.count}, batch {self.batch}",
                allowed="a count and a batch of at least 1",
                fix="ask for at least one example",
            )

    @cached_property
    def examples(self) -> Examples:
        """The examples in memory; read once.

        Raises:
            DataError: they cannot be read, or do not fit the model.
        """
        data = self.data
        if self.given is not None or data is None:
            assert self.given is not None
            return self.given
        if isinstance(data, Rows):
            batches, labels = _read(data, self.rows or (), self.batch, self.accepts)
            of = f" of {len(data):,} examples of {data.text}"
            of += f", {broken_words(len(data.broken))}" if data.broken else ""
        else:
            batches, labels = _checked(self._of_stream(data), data, self.accepts)
            of = f" examples of {data.text}"
        count = sum(rows_in(one) for one in batches)
        fewer = f" ({self.count:,} asked for)" if self.count and count < self.count else ""
        return Examples(
            tuple(batches),
            labels,
            count,
            f"{count:,}{of}{fewer}",
            digest_of(batches, labels),
            self.numbers,
            partial(_others, data, self.others, self.accepts) if isinstance(data, Rows) else None,
        )

    def _of_stream(self, data: Stream) -> list[Item]:
        """Read ``count`` examples after the first ``skip``, and stop there.

        Items are batches, or single examples where they have the shape of one.
        """
        assert self.count is not None
        found: list[Item] = []
        passed = taken = 0
        with data.draws or nullcontext(), users_code(data.where):
            for item in batched(data, data.specs, data.where, self.batch):
                size = rows_in(item[:2])
                start = min(size, self.skip - passed)
                stop = min(size, start + self.count - taken)
                if not is_plain(item[:2]):  # cannot be cut: taken whole, or passed over
                    start, stop = (size, size) if start else (0, size)
                passed += start
                if stop > start:
                    found.append(cut_item(item, slice(start, stop)))
                    taken += stop - start
                if taken >= self.count:
                    break
        if not found and not passed:
            raise empty(data.where)
        if not found:
            raise used_up(data.where, passed, min(self.skip, passed))
        return found

    @property
    def numbers(self) -> tuple[int, ...] | None:
        """Their numbers among those that calibration and training take of the source."""
        apart = isinstance(self.data, Rows) and self.data.split and self.data.part == "test"
        return () if apart else self.rows


def _read(
    data: Rows, rows: Sequence[int], batch: int, accepts: Accepts | None
) -> tuple[list[Batch], Tensor | None]:
    with data.draws or nullcontext():
        starts = range(0, len(rows), batch)
        items = [data.__getitems__(rows[start : start + batch]) for start in starts]
    return _checked(items, data, accepts)


def _checked(
    items: Sequence[Item], data: Rows | Stream, accepts: Accepts | None
) -> tuple[list[Batch], Tensor | None]:
    with users_code(data.where):
        labels = joined([one[2] for one in items])
    return [fit_batch(*one[:2], data.specs, data.where, accepts) for one in items], labels


def _others(data: Rows, rows: tuple[int, ...], accepts: Accepts | None) -> Batch | None:
    """Read some of what is left; None where there is none, or none that can be read."""
    with suppress(DataError):
        if rows:
            return _read(data, rows, FRESH, accepts)[0][0]
    return None


def shuffled(data: Rows, seed: int) -> list[int]:
    """Return the numbers of a source's whole examples in the order that the seed gives.

    Raises:
        DataError: there is none.
    """
    generator = torch.Generator().manual_seed(seed)
    order: list[int] = torch.randperm(len(data), generator=generator).tolist()
    order = [row for row in order if row not in data.broken]
    if not order:
        raise empty(data.where)
    return order


def first_rows(order: Sequence[int], count: int, needed: float = 0.0) -> Sequence[int]:
    """Return what is calibrated on: the first ``count``, fewer where training needs a share."""
    kept = round(needed * len(order) + 0.5) if needed else 0
    return order[: max(1, min(count, len(order) - kept))]


def last_rows(
    order: Sequence[int], count: int, taken: int, *, halved: bool = False
) -> Sequence[int]:
    """Return what is scored: the last ``count`` of those after the first ``taken``, and at most
    half of these where training learns the rest."""
    rest = order[taken:]
    most = -(-len(rest) // 2) if halved else len(rest)
    return rest[len(rest) - min(count, most) :]


def parted(
    total: int,
    share: float,
    seed: int,
    where: str,
    fitted: Collection[int] = (),
    scored: Collection[int] = (),
) -> tuple[list[int], list[int]]:
    """Choose which rows are learnt and which are held out; nothing but the seed decides.

    Args:
        fitted: rows that are held out only where too few others are.
        scored: rows that are neither.

    Raises:
        DataError: nothing would be left to learn from.
    """
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


def broken_words(count: int) -> str:
    """Say how many images are left out."""
    return f"{count:,} broken image{'' if count == 1 else 's'} left out"


def from_tensors(
    inputs: Tensor | Mapping[str, Tensor] | Sequence[Tensor],
    labels: Tensor | None = None,
    specs: Sequence[TensorSpec] = (),
    *,
    count: int | None = None,
    batch: int = 32,
    seed: int = 0,
) -> Examples:
    """Make examples of tensors in memory.

    Args:
        inputs: (N, ...), for a forward of one input; a mapping by forward's keywords; or a
            sequence of the positional inputs, each (N, ...).
        labels: (N, ...), or None.
        specs: the model's inputs, to check against.
        count: examples to choose by the seed; None takes all, in their order.
        batch: examples in a batch.
        seed: of the choice.

    Raises:
        DataError: there is no example, or the tensors do not fit each other or the model.
    """
    data = tensor_rows(inputs, labels, specs, "data tensors", "tensors")
    order = shuffled(data, seed)
    rows = sorted(order) if count is None else first_rows(order, count)
    return Share(data, tuple(rows), count, batch=batch).examples


def used_up(where: str, total: int, taken: int) -> DataError:
    """Return the error of a source of which calibration left nothing."""
    return DataError(
        where=where,
        found=f"{total} examples, and calibration has used the first {taken}",
        allowed="examples that calibration has not seen",
        fix="calibrate on fewer examples, or evaluate on other data",
    )
