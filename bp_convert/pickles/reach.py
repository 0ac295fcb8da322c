"""What stands for ``getattr`` in the files that are read: it reaches classes, functions, methods.

Pickles name ``getattr`` for a class inside a class, a bound method, and torch's own functions.
What it gives out cannot be called by the file: torch's unpickler calls only what is admitted by
name.
"""

from __future__ import annotations

import enum
import inspect
import pickle
from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn
from torch.overrides import get_overridable_functions
from torch.serialization import add_safe_globals


class VariableFunctions:
    """Stands for torch._C._VariableFunctionsClass, whose functions of tensors are wanted."""


class Reach:
    """Gives out attributes of what a file may name.

    Args:
        trusts: tells whether a class's own code is trusted.
        reached: takes the classes inside classes that are given out, with the names that torch's
            unpickler then knows them by.
    """

    def __init__(
        self,
        trusts: Callable[[type], bool] = lambda kind: False,
        reached: list[tuple[Any, str]] | None = None,
    ) -> None:
        self.trusts = trusts
        self.reached = [] if reached is None else reached

    def __call__(self, owner: object, name: object) -> object:
        """Return an attribute of ``owner``.

        Raises:
            pickle.UnpicklingError: it is nothing that a model needs.
        """
        if isinstance(name, str) and not name.startswith("__"):
            if owner is VariableFunctions:
                found = _torch_function(name)
            elif isinstance(owner, type):
                found = self._of_class(owner, name)
            else:
                found = self._method(owner, name)
            if found is not None:
                return found
        kind = owner if isinstance(owner, type) else type(owner)
        raise pickle.UnpicklingError(f"getattr({kind.__name__}, {name!r}) is not admitted")

    def _of_class(self, owner: type, name: str) -> object:
        found = inspect.getattr_static(owner, name, None)
        if isinstance(found, type):
            full = f"{owner.__module__}.{owner.__qualname__}.{name}"
            inside = f"{found.__module__}.{found.__qualname__}" == full
            if not inside or not (issubclass(found, nn.Module) or self.trusts(owner)):
                return None
            self.reached.append((found, full))
            add_safe_globals([(found, full)])
            return found
        if isinstance(owner, enum.EnumMeta):
            return owner.__members__.get(name)
        function = isinstance(found, FunctionType | staticmethod | classmethod)
        return getattr(owner, name) if function and self.trusts(owner) else None

    def _method(self, owner: object, name: str) -> object:
        if not isinstance(owner, nn.Module) and not self.trusts(type(owner)):
            return None
        found = inspect.getattr_static(type(owner), name, None)
        return MethodType(found, owner) if isinstance(found, FunctionType) else None


def _torch_function(name: str) -> object:
    found = getattr(torch, name, None)
    return (
        found if not name.startswith("_") and found in get_overridable_functions()[torch] else None
    )
