"""Examples in memory, in batches, and the hash that names them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from bp_convert.data.dataset import Batch
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
