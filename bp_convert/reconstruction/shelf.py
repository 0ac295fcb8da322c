"""Batches of what one block is given, or puts out: in memory, on disk where they are large."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bp_convert.free_memory import free_memory
from bp_convert.graph.tree import map_tensors, tensors_in

SHARE = 0.1  # of the free memory that the batches of one shelf may take


class Shelf:
    """Values of any structure, put down in order and taken up in any.

    Args:
        count: how many there will be; the first tells how large they are.
        limit: bytes in memory, above which all go to disk; by default a share of what is free.
    """

    def __init__(self, count: int, limit: int | None = None) -> None:
        self.count = count
        self.limit = int(SHARE * free_memory()) if limit is None else limit
        self.held: list[Any] = []
        self.folder: tempfile.TemporaryDirectory[str] | None = None

    def put(self, value: Any) -> None:
        """Put a copy down, on the CPU and without its graph."""
        kept = map_tensors(_kept, value)
        if not self.held:
            each = sum(one.nbytes for one in tensors_in(kept, objects=True))
            if each * self.count > self.limit:
                self.folder = tempfile.TemporaryDirectory(prefix="bp-convert-")
        if self.folder is not None:
            path = Path(self.folder.name) / f"{len(self.held)}.pt"
            torch.save(kept, path)
            kept = path
        self.held.append(kept)

    def __getitem__(self, number: int) -> Any:
        kept = self.held[number]
        if self.folder is not None:  # written a moment ago, by this process, for itself
            return torch.load(kept, weights_only=False, map_location="cpu")
        return kept

    def __len__(self) -> int:
        return len(self.held)

    def close(self) -> None:
        """Give the room back."""
        self.held.clear()
        if self.folder is not None:
            self.folder.cleanup()


def _kept(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)
