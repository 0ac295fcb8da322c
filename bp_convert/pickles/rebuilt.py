"""What our own files name where a plain pickle would name something that no file should.

Each of these makes one value from others, or holds a module's state, and does nothing else; so
the safe loader admits them. ``pickler`` writes them.
"""

from __future__ import annotations

import copyreg
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from bp_convert.torch_private import parametrize_anew, submodules_of

ARRAY_KINDS = "biufcSUmM"  # of numpy's dtypes those that hold numbers, words and times


def dtype(name: str) -> np.dtype[Any]:
    """Make a numpy dtype of numbers, words or times from its name, such as ``<f4``."""
    found = np.dtype(str(name))
    if found.kind not in ARRAY_KINDS or found.shape:
        raise ValueError(f"no plain dtype: {name}")
    return found


def scalar_type(name: str) -> type:
    """Give the class of a numpy number, such as ``numpy.float32``."""
    return dtype(name).type


def array(content: Tensor, name: str, shape: Sequence[int]) -> np.ndarray[Any, Any]:
    """Make a numpy array from its bytes."""
    return np.frombuffer(content.numpy().tobytes(), dtype(name)).reshape(tuple(shape)).copy()


def scalar(content: Tensor, name: str, shape: Sequence[int]) -> Any:
    """Make a numpy number from its bytes."""
    return array(content, name, shape)[()]


def memory_format(name: str) -> torch.memory_format:
    """Give one of torch's memory formats by its name."""
    found = getattr(torch, str(name).removeprefix("torch."), None)
    if not isinstance(found, torch.memory_format):
        raise ValueError(f"no memory format: {name}")
    return found


def generator(state: Tensor) -> torch.Generator:
    """Make a generator of random numbers on the CPU from its state."""
    made = torch.Generator()
    made.set_state(state.clone())
    return made


def plain(module: object) -> object:
    """Give the module itself: what torch.compile wraps it in is not kept in files."""
    return module


def filled(
    kind: type,
    arguments: Sequence[Any],
    items: Sequence[Any],
    pairs: Mapping[Any, Any],
    called: bool,
) -> Any:
    """Make a dictionary, list or queue of a class that the file names, and put its contents in.

    torch's unpickler fills lists and plain dictionaries only.

    Args:
        called: the class itself makes it, as pickle says; else only its ``__new__`` does.
    """
    if not isinstance(kind, type) or not issubclass(kind, dict | list | deque):
        raise TypeError(f"not a container: {kind}")
    made: Any = kind(*arguments) if called else copyreg.__newobj__(kind, *arguments)  # type: ignore[attr-defined]
    for one in items:
        made.append(one)
    for key, value in pairs.items():
        made[key] = value
    return made


class Parametrized(nn.Module):
    """Becomes a module of its own class again, with tensors that torch computes from others."""

    def __init__(self) -> None:
        """Make it empty: its state says what it is."""

    def __setstate__(self, state: tuple[Any, dict[str, Any]]) -> None:
        kind, content = state
        if not isinstance(kind, type) or not issubclass(kind, nn.Module):
            raise TypeError(f"not a module's class: {kind}")
        made: Any = kind
        self.__class__ = made
        made.__setstate__(self, content)
        tensors = submodules_of(self).get("parametrizations")
        if not isinstance(tensors, nn.ModuleDict):
            raise TypeError(f"a {kind.__name__} without parametrizations")
        parametrize_anew(self, tensors)
