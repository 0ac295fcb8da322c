"""Arrays with one example a row: in memory, or in .npy, .npz and .safetensors files."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

from bp_convert.data.dataset import Item, Rows, placed
from bp_convert.errors import DataError

LABELS = "the labels"  # of tensors in memory, in errors


@dataclass(frozen=True)
class Column:
    """An array: the length of its first axis, and how to read some of its rows."""

    length: int
    take: Callable[[Sequence[int]], Tensor]


class ArrayRows(Rows):
    """Columns side by side.

    Args:
        columns: the arrays by name.
        inputs: names of those that are inputs, each with its keyword or None where it is
            positional, in the order of forward.
        labels: name of the one that holds the labels, or None.
        where: the source, for errors.

    Raises:
        DataError: the columns have different lengths.
    """

    def __init__(
        self,
        columns: Mapping[str, Column],
        inputs: Mapping[str, str | None],
        labels: str | None,
        where: str,
    ) -> None:
        self._columns, self._inputs, self._labels, self.where = columns, inputs, labels, where
        used = [*inputs, *([] if labels is None else [labels])]
        lengths = {name: columns[name].length for name in used}
        if len(set(lengths.values())) > 1:
            raise DataError(
                where=where,
                found="rows: " + ", ".join(f"{name} {n}" for name, n in lengths.items()),
                allowed="the same number of rows in every array",
                fix="put the examples on the first axis of every array",
            )
        self._length = next(iter(lengths.values()), 0)

    def __len__(self) -> int:
        return self._length

    def __getitems__(self, rows: Sequence[int]) -> Item:
        taken = {key: self._columns[key].take(rows) for key in self._inputs}
        if self._labels is None:
            return *placed(taken, self._inputs), None
        return *placed(taken, self._inputs), as_labels(self._columns[self._labels].take(rows))


def as_labels(labels: Tensor) -> Tensor:
    """Return labels as int64 where they are integers; (N, 1) becomes (N,)."""
    if labels.dim() == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]
    return labels if labels.is_floating_point() else labels.long()


def array_rows(item: Item, where: str) -> ArrayRows:
    """Return rows of tensors that hold all examples at once.

    Raises:
        DataError: one is not a tensor, has no axis, or another length than the others.
    """
    args, kwargs, labels = item
    inputs: dict[str, str | None] = {f"input {i}": None for i, _ in enumerate(args, 1)}
    inputs |= {key: key for key in kwargs}
    tensors = dict(zip(inputs, [*args, *kwargs.values()], strict=True))
    if labels is not None:
        tensors[LABELS] = labels
    for name, one in tensors.items():
        if not isinstance(one, Tensor) or one.dim() == 0:
            raise DataError(
                where=f"{where}, {name}",
                found="a single number" if isinstance(one, Tensor) else type(one).__name__,
                allowed="a tensor with the examples on its first axis",
                fix="turn it into a tensor",
            )
    columns = {name: _tensor(one) for name, one in tensors.items()}
    return ArrayRows(columns, inputs, None if labels is None else LABELS, where)


def _tensor(tensor: Tensor) -> Column:
    return Column(len(tensor), lambda rows: tensor[list(rows)])


def open_arrays(path: Path, where: str) -> dict[str, Column]:
    """Open a .npy file (mapped, not read), a .safetensors file (the same) or a .npz file.

    Raises:
        DataError: the file is damaged, or holds Python objects or text.
    """
    try:
        if path.suffix == ".safetensors":
            return _safetensors(path)
        if path.suffix == ".npy":
            return {"input": _numpy(np.lib.format.open_memmap(path, mode="r"), "input", where)}
        with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
            return {name: _numpy(archive[name], name, where) for name in archive.files}
    except DataError:
        raise
    except Exception as problem:  # safetensors, zipfile and zlib raise their own
        found = f"a file that cannot be read: {type(problem).__name__}: {problem}"
        if "allow_pickle" in str(problem) or "Python objects" in str(problem):
            found = "Python objects, which loading would run"
        raise DataError(
            where=where,
            found=found,
            allowed=f"plain numbers in a {path.suffix} file",
            fix="save the arrays again, each of one numeric dtype",
        ) from problem


def _numpy(array: np.ndarray, name: str, where: str) -> Column:
    if array.dtype.kind not in "fiub" or array.dtype.itemsize > 8:
        raise DataError(
            where=f"{where}, {name}",
            found=f"dtype {array.dtype}",
            allowed="floating-point numbers, integers or booleans",
            fix="convert the array before it is saved",
        )

    def take(rows: Sequence[int]) -> Tensor:
        part = np.ascontiguousarray(array[list(rows)])
        if part.dtype.kind == "u" and part.dtype.itemsize > 1:
            part = part.astype(np.int64)  # torch knows few operations on these
        return torch.from_numpy(part.astype(part.dtype.newbyteorder("="), copy=False))

    return Column(len(array) if array.ndim else 0, take)


def _safetensors(path: Path) -> dict[str, Column]:
    with safe_open(path, framework="pt") as opened:
        shapes = {name: opened.get_slice(name).get_shape() for name in opened.keys()}  # noqa: SIM118

    def column(name: str, shape: Sequence[int]) -> Column:
        def take(rows: Sequence[int]) -> Tensor:
            with safe_open(path, framework="pt") as opened:
                part = opened.get_slice(name)
                return torch.cat([part[row : row + 1] for row in rows])

        return Column(shape[0] if shape else 0, take)

    return {name: column(name, shape) for name, shape in shapes.items()}
