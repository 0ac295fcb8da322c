"""Fake tensors whose sizes are symbols: what picks by plain numbers fixes a size."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from bp_convert.fakes.fake import FakeMode
from bp_convert.widths.symbols import SizeEnv

_ATEN = torch.ops.aten
_PICKS = (
    _ATEN.slice.Tensor,
    _ATEN.select.int,
    _ATEN.index_select.default,
    _ATEN.index.Tensor,
    _ATEN.gather.default,
)


class SymbolicMode(FakeMode):  # type: ignore[no-untyped-call]
    """Fake tensors with sizes of ``env``."""

    def __init__(self, env: SizeEnv) -> None:
        super().__init__(env)
        self.env = env

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _PICKS:
            for axis in _picked(func, *args):
                self.env.pin(args[0].shape[axis])
        return super().__torch_dispatch__(func, types, args, kwargs)


def _picked(func: Any, given: Tensor, *how: Any) -> list[int]:
    """Return the axes along which an operation picks by plain numbers.

    No size has to match such numbers, but other channels than meant would be picked at another.
    """
    if func is _ATEN.index.Tensor:
        return [axis for axis, index in enumerate(how[0]) if index is not None]
    axis = how[0] if how else 0
    if func is not _ATEN.slice.Tensor:
        return [axis]
    size = given.shape[axis]
    plain = [n for n in how[1:3] if type(n) is int and n != 0]
    whole = [n for n in plain if n >= int(size.node.hint if hasattr(size, "node") else size)]
    return [] if plain == whole else [axis]


@contextmanager
def sizes_as_floats() -> Iterator[None]:
    """Let ``float(size)``, and so ``math.sqrt(size)``, give a plain number without fixing it.

    A scale such as 1/sqrt(width) does not bind the width, and is computed anew at the new size.
    """
    before = vars(torch.SymInt).get("__float__")
    torch.SymInt.__float__ = lambda self: float(self.node.hint)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        if before is None:
            del torch.SymInt.__float__  # type: ignore[attr-defined]
        else:
            torch.SymInt.__float__ = before  # type: ignore[attr-defined]
