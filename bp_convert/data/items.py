"""The user's own loaders: a DataLoader, a data set, any iterable, or a function that makes one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from torch.utils.data import Dataset

from bp_convert.data.arrays import as_labels
from bp_convert.data.collate import assign
from bp_convert.data.dataset import Batch, Item, Rows, placed
from bp_convert.errors import BpConvertError, DataError
from bp_convert.graph.running import Args
from bp_convert.graph.tree import tensors_in
from bp_convert.values.tensors import TensorSpec

LOADERS = "a DataLoader, a data set, an iterable, or a function without arguments that makes one"
MEND = "mend the loader; it must run on its own"


def is_item(value: object) -> bool:
    """Tell whether a value is one item rather than many: a tensor, or a tuple or dict of some."""
    if isinstance(value, Tensor | np.ndarray | Mapping):
        return True
    return (
        isinstance(value, tuple)
        and not is_structure(value)
        and all(isinstance(v, Tensor | np.ndarray) for v in value)
    )


def split_item(item: object, specs: Sequence[TensorSpec], where: str) -> Item:
    """Split what a loader yields into forward's arguments and the label.

    Args:
        item: a tensor; a mapping by names; a tuple of the inputs, then the label if there is one.
            Where nothing is known of the model, the second of two is a label if it is an integer
            or a row of integers.
        specs: inputs of the model.
        where: the source, for errors.

    Raises:
        DataError: another type, or another number of inputs.
    """
    item = _tensor(item)
    if isinstance(item, Tensor) or is_structure(item) or _is_pictures(item, specs):
        return name_inputs((item,), specs, None)
    if isinstance(item, Mapping):
        values = {str(key): _tensor(value) for key, value in item.items()}
        inputs, key_of_label = assign(list(values), specs, where)
        label = None if key_of_label is None else torch.as_tensor(values[key_of_label])
        return *placed(values, inputs), label
    if not isinstance(item, Sequence) or isinstance(item, str) or not item:
        raise DataError(
            where=where,
            found=f"an item of type {type(item).__name__}",
            allowed="tensors, mappings of tensors, (input, label) pairs, or tuples of the inputs "
            "with or without the label",
            fix="let the loader yield what forward takes; images need transforms.ToTensor()",
        )
    parts = [_tensor(one) for one in item]
    if len(parts) == 2 and isinstance(parts[0], Mapping):
        args, kwargs, _ = split_item(parts[0], specs, where)
        return args, kwargs, torch.as_tensor(parts[1])
    count = len(specs) or (1 if len(parts) == 2 and _is_label(parts[1]) else len(parts))
    has_label = len(parts) == count + 1
    if len(parts) - has_label != count:
        raise DataError(
            where=where,
            found=f"items of {len(parts)} parts",
            allowed=f"{len(specs)} inputs ({' and '.join(str(s) for s in specs)}) and a label or "
            "none",
            fix="let the loader yield the inputs in the order of --input, then the label",
        )
    label = torch.as_tensor(parts.pop()) if has_label else None
    return name_inputs(tuple(parts), specs, label)


def is_structure(value: object) -> bool:
    """Tell whether a value is one input that is no tensor: a packed sequence, a dataclass or
    another object that holds tensors."""
    if isinstance(value, PackedSequence):
        return True
    if isinstance(value, Tensor | np.ndarray | Mapping | Sequence | type) or callable(value):
        return False
    if isinstance(value, Dataset):  # it need not be an iterable
        return False
    return not hasattr(value, "__iter__") and bool(tensors_in(value, objects=True))


def _is_pictures(value: object, specs: Sequence[TensorSpec]) -> bool:
    """Tell whether a value is a list of pictures (C, H, W), as detectors take them, and not a
    loader's list of inputs and labels."""
    if not isinstance(value, list) or not value:
        return False
    if not all(isinstance(v, Tensor) and v.is_floating_point() and v.dim() == 3 for v in value):
        return False
    if specs:
        return len(specs) == 1 and len(specs[0].shape) == 3
    return len({one.shape for one in value}) > 1


def name_inputs(values: Args, specs: Sequence[TensorSpec], label: Tensor | None) -> Item:
    """Give inputs, in the order of the model's, the keywords of its forward."""
    if len(specs) != len(values):
        return values, {}, label
    pairs = list(zip([spec.name for spec in specs], values, strict=True))
    args = tuple(value for name, value in pairs if name is None)
    return args, {name: value for name, value in pairs if name is not None}, label


def _tensor(value: Any) -> Any:
    return torch.as_tensor(value) if isinstance(value, np.ndarray) else value


def _is_label(value: object) -> bool:
    if isinstance(value, Tensor):
        return value.dim() <= 1 and not value.is_floating_point()
    return isinstance(value, int)


class ItemRows(Rows):
    """The user's own data set, whose items have numbers; each item is one example."""

    def __init__(self, items: Any, specs: Sequence[TensorSpec], where: str) -> None:
        self._items, self.specs, self.where = items, specs, where

    def __len__(self) -> int:
        return len(self._items)

    def __getitems__(self, rows: Sequence[int]) -> Item:
        with users_code(self.where):
            items = [split_item(self._items[row], self.specs, self.where) for row in rows]
            return _stacked(items, self.where)


def batched(
    items: Iterable[object], specs: Sequence[TensorSpec], where: str, batch: int
) -> Iterator[Item]:
    """Cut what an iterable yields into batches of at most ``batch`` examples."""
    waiting: list[Item] = []
    for item in items:
        split = split_item(item, specs, where)
        if is_single(split, specs):
            waiting.append(split)
            if len(waiting) == batch:
                yield _stacked(waiting, where)
                waiting = []
            continue
        args, kwargs, label = split
        if not is_plain((args, kwargs)):
            yield split
            continue
        tensors = [*args, *kwargs.values(), *([] if label is None else [label])]
        if not all(isinstance(one, Tensor) and one.dim() for one in tensors) or not tensors:
            kinds = ", ".join(type(one).__name__ for one in tensors)
            raise _uneven(where, f"a batch of {kinds or 'nothing'}")
        if len({len(one) for one in tensors}) > 1:
            raise _uneven(where, f"tensors of {', '.join(str(len(one)) for one in tensors)} rows")
        for start in range(0, len(tensors[0]), batch):
            yield cut_item(split, slice(start, start + batch))
    if waiting:
        yield _stacked(waiting, where)


def is_plain(batch: Batch) -> bool:
    """Tell whether a batch holds nothing but tensors, which can be cut and stacked."""
    args, kwargs = batch
    return not any(is_structure(v) or isinstance(v, list) for v in (*args, *kwargs.values()))


def cut_item(item: Item, part: slice) -> Item:
    """Return some examples of a batch; what cannot be cut stays whole."""
    args, kwargs, label = item
    return (
        tuple(_cut(one, part) for one in args),
        {key: _cut(one, part) for key, one in kwargs.items()},
        None if label is None else label[part],
    )


def _cut(value: Any, part: slice) -> Any:
    return value[part] if isinstance(value, Tensor | list) else value


def is_single(item: Item, specs: Sequence[TensorSpec]) -> bool:
    """Tell whether an item has the axes of one example; without specs it is taken for a batch."""
    if not specs:
        return False
    spec = specs[0]
    first = item[1].get(spec.name) if spec.name is not None else next(iter(item[0]), None)
    return isinstance(first, Tensor) and first.dim() == len(spec.shape)


def _stacked(items: Sequence[Item], where: str) -> Item:
    try:
        args = tuple(torch.stack(column) for column in zip(*(i[0] for i in items), strict=True))
        kwargs = {key: torch.stack([i[1][key] for i in items]) for key in items[0][1]}
    except (RuntimeError, TypeError, KeyError, ValueError) as problem:
        raise _uneven(where, f"examples that cannot be stacked: {problem}") from problem
    return args, kwargs, joined([None if i[2] is None else i[2][None] for i in items])


def joined(labels: Sequence[Tensor | None]) -> Tensor | None:
    """Return the labels of all batches, or None where some have none."""
    present = [one for one in labels if one is not None]
    return as_labels(torch.cat(present)) if present and len(present) == len(labels) else None


def _uneven(where: str, found: str) -> DataError:
    return DataError(
        where=where,
        found=found,
        allowed="tensors of one shape, with the same number of examples in each",
        fix="pad or resize the examples in the loader, or let it yield batches",
    )


@contextmanager
def users_code(where: str, allowed: str = LOADERS, fix: str = MEND) -> Iterator[None]:
    """Turn what the user's own code raises inside ``with`` into a DataError."""
    try:
        yield
    except BpConvertError:
        raise
    except Exception as problem:
        raise DataError(
            where=where,
            found=f"it fails with {type(problem).__name__}: {problem}",
            allowed=allowed,
            fix=fix,
        ) from problem
