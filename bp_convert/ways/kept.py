"""A value that was built of tensors, and whether they still are what they were."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from bp_convert.torch_private import tree_leaves, version_of

ALL = 256  # eights of bytes up to which every one of a tensor is compared
SOME = 64  # eights of bytes, at least, that are compared of a larger one

Source = tuple[Mapping[str, Tensor | None], str]  # where a tensor is held, and by which name


class Snapshot(NamedTuple):
    """What a tensor was; ``there`` are numbers of it as they are now, ``then`` as they were."""

    held: Mapping[str, Tensor | None]
    name: str
    was: Tensor
    address: Callable[[], int]
    place: int
    version: int
    there: memoryview
    whole: bool  # all of them
    then: bytes | memoryview


class Kept:
    """What was built of some tensors, for as long as they are the same ones, at the same place, and
    unwritten.

    Writes in place are counted by autograd, but for those through ``.data``. So numbers are
    compared as well: all of a small tensor, some throughout a large one. A write through ``.data``
    to a few numbers of a large tensor is not seen.
    """

    __slots__ = ("looks", "value")

    def __init__(self, value: Any, looks: Sequence[Snapshot]) -> None:
        self.value, self.looks = value, tuple(looks)

    def holds(self) -> bool:
        """Return whether the value still is that of the tensors."""
        for held, name, was, address, place, version, there, whole, then in self.looks:
            # The place goes first: what lies at another one may be gone.
            if held.get(name) is not was or address() != place or version_of(was) != version:
                return False
            # Bytes are compared at once, other views number by number.
            if (there.tobytes() if whole else there) != then:
                return False
        return True

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles of a layer hold nothing."""
        return _nothing, ()

    @property
    def nbytes(self) -> int:
        """The bytes of the matrices in the value; other numbers are the tensors' own."""
        ones = [one for one in tree_leaves(self.value) if isinstance(one, Tensor) and one.dim() > 1]
        return sum({one.data_ptr(): one.nbytes for one in ones}.values())  # views of one count once


def _nothing() -> None:
    return None


def looks_at(sources: Sequence[Source]) -> list[Snapshot] | None:
    """Take down what some tensors are; None where they are of a sort that cannot be watched: on
    another device than a CPU, without a version of their own, or no parameters and plain buffers.
    """
    found = []
    for held, name in sources:
        one = held.get(name)
        if one is None or type(one) not in (nn.Parameter, Tensor) or not one.is_cpu:
            return None
        if one.is_inference() or not torch.ops.aten.is_non_overlapping_and_dense(one):
            return None
        place, version = one.data_ptr(), version_of(one)
        # Not by way of numpy, after which the memory could not be given back, as FSDP does.
        size = one.numel() * one.element_size()
        there = memoryview((ctypes.c_ubyte * size).from_address(place)).cast("B")
        eights = len(there) % 8 == 0
        if eights:
            there = there.cast("q")
        whole = len(there) <= ALL
        then: bytes | memoryview
        if whole:
            then = there.tobytes()
        else:
            there = there[:: len(there) // SOME | 1]  # an odd step meets every column
            then = memoryview(there.tobytes())
            then = then.cast("q") if eights else then
        found.append(Snapshot(held, name, one, one.data_ptr, place, version, there, whole, then))
    return found
