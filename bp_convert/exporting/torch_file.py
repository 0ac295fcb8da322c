"""torch's own exported programs, run by torch without this package."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bp_convert.exporting.program import Program
from bp_convert.exporting.runtime import Piece, Run, Runtime
from bp_convert.torch_private import tree_leaves, tree_unflatten


class TorchRuntime(Runtime):
    """A ``.pt2`` program of ``torch.export``; AOTInductor compiles it further."""

    goal = "torch-export"
    suffix = ".pt2"
    package = "torch"
    forms = ("factors", "dense")
    lays_out = False

    def write(self, program: Program, folder: Path, name: str) -> list[Path]:
        """As ``Runtime.write``."""
        file = folder / name
        torch.export.save(program, file)
        return [file]

    def opened(self, file: Path, threads: int) -> Run:
        """As ``Runtime.opened``."""
        read = torch.export.load(file)
        module: Any = read.module()
        form = read.call_spec.in_spec

        def run(inputs: Sequence[Tensor]) -> list[Tensor]:
            args, kwargs = tree_unflatten(inputs, form)
            return _tensors(module, *args, **kwargs)

        return run

    def opened_pieces(self, pieces: Sequence[Piece], folder: Path, threads: int) -> list[Run]:
        """As ``Runtime.opened_pieces``."""
        return [partial(_on_first, one.layer) for one in pieces]


@torch.no_grad()
def _tensors(module: Any, *args: Any, **kwargs: Any) -> list[Tensor]:
    return [one for one in tree_leaves(module(*args, **kwargs)) if isinstance(one, Tensor)]


def _on_first(module: Any, inputs: Sequence[Tensor]) -> list[Tensor]:
    return _tensors(module, *inputs)
