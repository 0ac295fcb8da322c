"""Read safetensors files: tensors and strings, with nothing in them that could run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import safetensors.torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from bp_convert.files.sniff import refusal


def read_safetensors(path: Path) -> dict[str, Tensor]:
    """Read the tensors of a safetensors file onto the CPU.

    Raises:
        CheckpointError: the file is damaged.
    """
    with _errors_named(path):
        return dict(safetensors.torch.load_file(path, device="cpu"))


def read_header(path: Path) -> dict[str, str]:
    """Read the free text in the header of a safetensors file, and nothing else of it.

    Raises:
        CheckpointError: the file is damaged.
    """
    with _errors_named(path), safe_open(path, framework="pt") as file:
        return dict(file.metadata() or {})


@contextmanager
def _errors_named(path: Path) -> Iterator[None]:
    try:
        yield
    except (SafetensorError, OSError, ValueError, KeyError) as problem:
        raise refusal(
            path, f"a damaged safetensors file: {problem}", "copy or download it again"
        ) from None
