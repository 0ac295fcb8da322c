"""Tensors in values of any structure: found, named, exchanged."""

from __future__ import annotations

import copy
import dataclasses
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

_OPAQUE = (nn.Module, type, types.FunctionType, types.ModuleType)


def named_tensors(
    value: Any, path: str = "", *, objects: bool = False, above: tuple[int, ...] = ()
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of an output with words for where each lies in it, such as ``output 0``.

    Args:
        objects: look also into objects that are no containers, such as a cache of keys and values.
        above: the ``id`` of what it lies in, which is not looked into again.
    """
    if isinstance(value, Tensor):
        yield path or "output", value
    elif id(value) not in above:
        for key, child in children(value, objects=objects):
            if isinstance(key, int):
                where = f"{path}[{key}]" if path else f"output {key}"
            else:
                where = f"{path}.{key}" if path else f"output {str(key)!r}"
            yield from named_tensors(child, where, objects=objects, above=(*above, id(value)))


def tensors_in(value: Any, *, objects: bool = False) -> list[Tensor]:
    """Return the tensors in a value of any structure, dataclasses and mappings included."""
    return [tensor for _, tensor in named_tensors(value, objects=objects)]


def map_tensors(
    function: Callable[[Tensor], Tensor], value: Any, above: tuple[int, ...] = ()
) -> Any:
    """Return ``value`` with every tensor in it exchanged; what holds none is not copied.

    Args:
        above: the ``id`` of what it lies in, which is not looked into again.
    """
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, PackedSequence):  # its batch sizes stay on the CPU, as torch wants them
        order = (value.sorted_indices, value.unsorted_indices)
        data = function(value.data)
        moved = (None if one is None else one.to(data.device) for one in order)
        return PackedSequence(data, value.batch_sizes, *moved)
    if id(value) in above:
        return value
    old = children(value, objects=True)
    new = [(key, map_tensors(function, child, (*above, id(value)))) for key, child in old]
    if all(a is b for (_, a), (_, b) in zip(old, new, strict=True)):
        return value
    return _rebuilt(value, new)


def rows_in(value: Any) -> int:
    """Return the number of examples in a batch of any structure.

    That is the length of its first tensor's first axis, or of the list, where the first input is
    a list of tensors; 0 where there is none.
    """
    if isinstance(value, PackedSequence):
        return int(value.batch_sizes[0])
    if isinstance(value, Tensor):
        return value.shape[0] if value.dim() else 0
    if isinstance(value, list) and value and isinstance(value[0], Tensor):
        return len(value)
    return next((n for _, child in children(value, objects=True) if (n := rows_in(child))), 0)


def children(value: Any, *, objects: bool) -> list[tuple[Any, Any]]:
    """Return what a container holds, by key or place.

    Args:
        objects: look also into objects that are no containers.
    """
    if isinstance(value, PackedSequence):
        return [("data", value.data)]
    if isinstance(value, Mapping):
        return list(value.items())
    if isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray):
        return list(enumerate(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [(one.name, getattr(value, one.name, None)) for one in dataclasses.fields(value)]
    if objects and not isinstance(value, _OPAQUE) and hasattr(value, "__dict__"):
        return list(vars(value).items())
    return []


def _rebuilt(value: Any, children: list[tuple[Any, Any]]) -> Any:
    """Return a copy of a container that holds other things in the same places."""
    if isinstance(value, tuple):
        values = [child for _, child in children]
        return type(value)(*values) if hasattr(value, "_fields") else type(value)(values)
    made = copy.copy(value)
    if isinstance(value, Mapping | Sequence):
        for key, child in children:
            made[key] = child
    else:
        for key, child in children:
            object.__setattr__(made, key, child)  # frozen dataclasses, too
    return made
