"""Rows of a source that can be picked by number, and which of them each part gets."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Literal, Protocol

import torch
from torch import Tensor

from bp_convert.data.examples import Batch
from bp_convert.errors import DataError

Part = Literal["calibrate", "evaluate"]


class Rows(Protocol):
    """A source whose examples have numbers; only those asked for are read."""

    def __len__(self) -> int:
        """Return the number of examples."""
        ...

    def read(self, rows: Sequence[int], batch: int) -> Iterable[Batch]:
        """Read some examples, in this order, in batches of at most ``batch``."""
        ...

    def labels(self, rows: Sequence[int]) -> Tensor | None:
        """Return the labels of some examples, (len(rows), ...), or None where there are none."""
        ...


def pick(
    total: int,
    *,
    count: int,
    seed: int,
    part: Part,
    held_out: int = 0,
    spare: float | None = None,
    left_out: Collection[int] = (),
    where: str,
) -> list[int]:
    """Choose examples: one seeded permutation, cut so that the two parts never meet.

    Calibration takes the first ``count``; evaluation takes the last ``count`` of those after the
    first ``held_out``, which is the number that calibration took. Fewer are taken where there are
    fewer. Where training takes the same source, calibration leaves it the share ``spare``, and
    evaluation half of what calibration has left.

    Args:
        left_out: rows that are not there for anybody, such as broken images.

    Raises:
        DataError: there is none, or calibration took them all.
    """
    order: list[int] = torch.randperm(total, generator=torch.Generator().manual_seed(seed)).tolist()
    order = [row for row in order if row not in left_out]
    total = len(order)
    if total == 0:
        raise empty(where)
    if part == "calibrate":
        kept = round(spare * total + 0.5) if spare else 0
        return order[: max(1, min(count, total - kept))]
    rest = order[held_out:]
    if not rest:
        raise used_up(where, total, held_out)
    most = len(rest) if spare is None else -(-len(rest) // 2)
    return rest[-min(count, most) :]


def empty(where: str) -> DataError:
    """Return the error of a source without examples."""
    return DataError(
        where=where,
        found="no examples",
        allowed="at least one example",
        fix="check the path; name the folder or the file that holds the data",
    )


def broken_words(count: int) -> str:
    """Say how many images are left out."""
    return f"{count:,} broken image{'' if count == 1 else 's'} left out"


def used_up(where: str, total: int, held_out: int) -> DataError:
    """Return the error of a source of which calibration left nothing."""
    return DataError(
        where=where,
        found=f"{total} examples, and calibration has used the first {held_out}",
        allowed="examples that calibration has not seen",
        fix="calibrate on fewer examples, or evaluate on other data",
    )


def chunks(rows: Sequence[int], batch: int) -> list[Sequence[int]]:
    """Cut row numbers into batches."""
    return [rows[start : start + batch] for start in range(0, len(rows), batch)]
