"""Which parameters of a model are one, or lie over each other in memory.

Slices of one storage that do not meet (flat buffers of optimisers, columns of one matrix) are
independent weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from bp_convert.torch_private import storage_id

WORK = 10**6  # steps that the question whether two views meet may cost (a bound of NumPy's solver)
TIED = "is tied to"
ALONE = "alone"
Place = tuple[object, ...]


@dataclass(frozen=True)
class Holding:
    """A parameter and the module that holds it."""

    module: nn.Module
    name: str
    parameter: Tensor


def meetings(model: nn.Module) -> dict[int, list[tuple[str, Holding]]]:
    """Return for each parameter, by its ``id``, what it meets in other modules, and how: words such
    as ``is tied to``."""
    found: dict[int, list[tuple[str, Holding]]] = {}
    stored: dict[Place, list[Holding]] = {}
    for prefix, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            one = Holding(module, f"{prefix}.{name}" if prefix else name, parameter)
            stored.setdefault(_storage(parameter), []).append(one)
    for place, holdings in stored.items():
        pairs = combinations(holdings, 2) if place[0] == ALONE else _near(holdings)
        for first, second in pairs:
            how = _meet(first.parameter, second.parameter)
            if how and first.module is not second.module:
                found.setdefault(id(first.parameter), []).append((how, second))
                found.setdefault(id(second.parameter), []).append((how, first))
    return found


def _storage(tensor: Tensor) -> Place:
    """Name the storage that a tensor lies in; one without a plain storage has its own."""
    if is_lazy(tensor) or tensor.layout is not torch.strided or not tensor.numel():
        return (ALONE, id(tensor))
    try:
        return ("storage", storage_id(tensor))
    except (RuntimeError, NotImplementedError):  # wrappers around other tensors
        return (ALONE, id(tensor))


def _near(holdings: list[Holding]) -> Iterator[tuple[Holding, Holding]]:
    """Yield the pairs whose ranges in their storage meet."""
    if len(holdings) < 2:
        return
    spans = {id(one): _span(one.parameter) for one in holdings}
    open_: list[Holding] = []
    for one in sorted(holdings, key=lambda one: spans[id(one)]):
        start = spans[id(one)][0]
        open_ = [other for other in open_ if spans[id(other)][1] > start]
        yield from ((other, one) for other in open_)
        open_.append(one)


def _span(tensor: Tensor) -> tuple[int, int]:
    """Return where in its storage a tensor begins and ends, in bytes."""
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    start, size = int(tensor.storage_offset()), tensor.element_size()
    return start * size, (start + last + 1) * size


def _meet(one: Tensor, two: Tensor) -> str:
    """Say how two tensors of one storage share numbers; empty where they do not."""
    if one is two or _geometry(one) == _geometry(two):
        return TIED
    try:
        met = np.shares_memory(_shape_only(one), _shape_only(two), max_work=WORK)  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return "may share memory with"
    return "shares memory with" if met else ""


def _geometry(tensor: Tensor) -> Place:
    return (tensor.storage_offset(), tensor.dtype, tuple(tensor.shape), tensor.stride())


class _Described:
    """What NumPy has to know of an array to reason about its memory, which is never read."""

    def __init__(self, tensor: Tensor) -> None:
        size = tensor.element_size()
        self.__array_interface__ = {
            "version": 3,
            "data": (4096 + tensor.storage_offset() * size, True),  # no array lies at 0
            "shape": tuple(tensor.shape),
            "strides": tuple(step * size for step in tensor.stride()),
            "typestr": f"|V{size}",
        }


def _shape_only(tensor: Tensor) -> np.ndarray[tuple[int, ...], np.dtype[np.void]]:
    return np.asarray(_Described(tensor))
