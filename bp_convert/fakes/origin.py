"""Which line of the user's own code is running, or raised."""

from __future__ import annotations

import linecache
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import sympy
import torch

_TORCH = f"{Path(torch.__file__).parent}{os.sep}"
_LAYERS = f"{_TORCH}nn{os.sep}modules{os.sep}"
_CALL = f"{_LAYERS}module.py"
# Whose lines are nobody's own: the libraries', and those of the rooms that run a model.
_PASSED_OVER = (
    _TORCH,
    f"{Path(sympy.__file__).parent}{os.sep}",
    *(f"{Path(__file__).parents[1] / room}{os.sep}" for room in ("graph", "fakes", "widths")),
    "<",
)


@dataclass(frozen=True)
class Origin:
    """The module that was running, and the line of its forward, when a size had to be known."""

    module: str
    file: str
    line: int
    note: str = ""

    def __str__(self) -> str:
        if self.note:
            return self.note
        inside = f"in {self.module}" if self.module else "in the model's forward"
        code = linecache.getline(self.file, self.line).strip() if self.file else ""
        if not code or self.file.startswith(_LAYERS):
            return f"the layer {self.module}" if self.module else "the model's forward"
        shown = code if len(code) <= 72 else code[:69] + "..."
        return f"`{shown}` at {Path(self.file).name}:{self.line} {inside}"


def origin_of(frames: Iterable[tuple[str, int]], module: str) -> Origin:
    """Find the model's own line among (file, line) frames, innermost first.

    Inside a layer of torch the layer itself is the place, so that the line which calls it, in
    whatever container, is not blamed.
    """
    layer: tuple[str, int] | None = None
    for file, line in frames:
        if file.startswith(_LAYERS) and file != _CALL:
            layer = layer or (file, line)
        elif file == _CALL and layer is not None:
            return Origin(module, *layer)
        elif not file.startswith(_PASSED_OVER):
            return Origin(module, file, line)
    return Origin(module, *(layer or ("", 0)))
