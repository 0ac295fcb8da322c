"""Examples divided into those that are learnt and those that judge, each in batches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from bp_convert.calibration.tap import Batch, Batches
from bp_convert.graph.tree import children, map_tensors, rows_in

# Examples of a batch, where they can be told apart: fewer where there are few in all, so that an
# epoch has some steps.
MOST, LEAST, STEPS = 32, 4, 16


def divided(batches: Batches, held: int) -> tuple[list[Batch], int]:
    """Return batches of which the last judge, and the number of these; none where the examples
    cannot be parted.

    Args:
        held: examples that judge.
    """
    size = min(MOST, max(LEAST, sum(map(rows_in, batches)) // STEPS))
    parts = [part for batch in batches for part in _cut(batch, size)]
    judging: list[Batch] = []
    count = 0
    while parts and count < held:
        last = parts.pop()
        rows = rows_in(last)
        if count + rows > held and _can_part(last):
            parts.append(_rows(last, 0, rows - (held - count)))
            last = _rows(last, rows - (held - count), rows)
        judging.append(last)
        count += rows_in(last)
    if not parts:
        return [], 0
    return [*parts, *reversed(judging)], len(judging)


def _cut(batch: Batch, size: int) -> Iterator[Batch]:
    rows = rows_in(batch)
    if rows <= size or not _can_part(batch):
        yield batch
        return
    for start in range(0, rows, size):
        yield _rows(batch, start, min(rows, start + size))


def _can_part(value: Any) -> bool:
    """Tell whether examples lie on the first axis of every tensor, or in lists."""
    inside = (one for _, one in children(value, objects=False))
    return not isinstance(value, PackedSequence) and all(map(_can_part, inside))


def _rows(batch: Batch, start: int, end: int) -> Batch:
    """Return some examples of a batch."""
    total = rows_in(batch)

    def cut(value: Any) -> Any:
        if isinstance(value, list) and len(value) == total:
            return value[start:end]
        if type(value) is dict:
            return {key: cut(one) for key, one in value.items()}
        if isinstance(value, Tensor):
            return value[start:end] if value.dim() and value.shape[0] == total else value
        return value if isinstance(value, Mapping) else map_tensors(cut, value)

    args, kwargs = batch
    return tuple(cut(one) for one in args), {key: cut(one) for key, one in kwargs.items()}
