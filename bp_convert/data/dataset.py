"""What a source is once it is open: examples with numbers, or a stream of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

from bp_convert.data.locator import Locator
from bp_convert.errors import DataError
from bp_convert.graph.running import Args, Kwargs
from bp_convert.randomness import Aside
from bp_convert.values.tensors import TensorSpec

Batch = tuple[Args, Kwargs]
Item = tuple[Args, Kwargs, Tensor | None]  # with labels
Part = Literal["train", "test"]


@dataclass(frozen=True)
class Request:
    """A source that the user named, and what it is opened for.

    Attributes:
        source: what the user wrote.
        specs: the model's inputs; empty where nothing is known of it.
        part: train takes the training split, test that for tests, or for validation where there
            is no other.
        tokenizer: folder of a transformers tokenizer, for text.
        download: let torchvision fetch a data set that is not there.
    """

    source: Locator
    specs: Sequence[TensorSpec]
    part: Part
    tokenizer: str | Path | None
    download: bool


class Rows(Dataset[Item]):
    """A source whose examples have numbers; only those asked for are read.

    Attributes:
        where, text: names of the source, for errors and for reports.
        specs: the model's inputs, which each batch is checked against.
        part: what it was opened for.
        split: words for the part of a larger set that this is, else empty.
        broken: rows that cannot be read and are left out.
        draws: random states in which the user's code reads; None where none of it runs.
    """

    where = text = ""
    specs: Sequence[TensorSpec] = ()
    part: Part = "train"
    split = ""
    broken: frozenset[int] = frozenset()
    draws: Aside | None = None

    def __len__(self) -> int:
        raise NotImplementedError

    def __getitems__(self, rows: Sequence[int]) -> Item:
        """Read some examples, in this order, as one batch.

        Raises:
            DataError: one of them cannot be read.
        """
        raise NotImplementedError

    def __getitem__(self, row: int) -> Item:
        return self.__getitems__([row])


class Stream(IterableDataset[Any]):
    """What can only be read from its start: a DataLoader, an iterable, or what makes one.

    Args:
        opened: what the first reading goes through.
        make: returns it anew for each further one; None where it is read again itself.
    """

    where = text = ""
    specs: Sequence[TensorSpec] = ()
    draws: Aside | None = None

    def __init__(
        self, opened: Iterable[object], make: Callable[[], Iterable[object]] | None
    ) -> None:
        self.opened, self._make = opened, make
        self._first = [opened]

    @property
    def once(self) -> bool:
        """Whether what is read is gone, as of a generator."""
        return self._make is None and isinstance(self.opened, Iterator)

    def __iter__(self) -> Iterator[Any]:
        if self._make is None:
            return iter(self.opened)
        return iter(self._first.pop() if self._first else self._make())


def placed(values: Mapping[str, Any], words: Mapping[str, str | None]) -> Batch:
    """Make named values arguments of forward: by the keyword of each name, or by place."""
    return (
        tuple(values[name] for name, word in words.items() if word is None),
        {word: values[name] for name, word in words.items() if word is not None},
    )


def empty(where: str) -> DataError:
    """Return the error of a source without examples."""
    return DataError(
        where=where,
        found="no examples",
        allowed="at least one example",
        fix="check the path; name the folder or the file that holds the data",
    )
