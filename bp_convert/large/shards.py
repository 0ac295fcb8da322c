"""Safetensors files read and written a tensor at a time.

The library writes a file from tensors that are all in memory; here a file's form is known before
its numbers, and each is put into its place when it is there.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import torch
from safetensors import safe_open
from torch import Tensor
from typing_extensions import Self

from bp_convert.errors import CheckpointError
from bp_convert.files.sidecar import read_header
from bp_convert.files.sniff import refusal
from bp_convert.hub.layout import weight_files

# As they are called in such files.
DTYPES = {
    **{"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16},
    **{"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8},
    **{"U8": torch.uint8, "BOOL": torch.bool},
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_BLOCK = 2**24  # bytes that are copied at once


@dataclass(frozen=True)
class Stored:
    """A tensor in a file: what it is, and which bytes hold it."""

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    stop: int


class Checkpoint:
    """The tensors of a folder, by name; none is read until it is asked for.

    Raises:
        CheckpointError: the folder holds no safetensors, or files that are damaged.
    """

    def __init__(self, folder: Path) -> None:
        try:
            self.files = weight_files(folder)
        except (OSError, ValueError, KeyError, AttributeError, TypeError):
            raise refusal(folder, "an index that cannot be read", "download it again") from None
        odd = [one.name for one in self.files if one.suffix != ".safetensors"]
        if odd or not self.files:
            raise refusal(
                folder,
                f"weights in {odd[0]}" if odd else "a folder without weights",
                "give a folder with .safetensors, which can be read a tensor at a time",
            )
        self.entries: dict[str, Stored] = {}
        for file in self.files:
            self.entries.update(_entries(file))

    @property
    def bytes(self) -> int:
        """Of all tensors."""
        return sum(one.stop - one.start for one in self.entries.values())

    def tensor(self, name: str) -> Tensor:
        """Read one tensor into memory."""
        with safe_open(self.entries[name].file, framework="pt") as file:
            found: Tensor = file.get_tensor(name)
            return found.clone()  # the file is closed


def _entries(file: Path) -> dict[str, Stored]:
    read_header(file)  # safetensors' own checks
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        content = json.loads(stream.read(length))
    content.pop("__metadata__", None)
    found = {}
    for name, one in content.items():
        if one["dtype"] not in DTYPES:
            raise CheckpointError(
                where=f"{file}, {name}",
                found=f"a tensor of {one['dtype']}: the model is quantised",
                allowed=f"tensors of {', '.join(DTYPES)}",
                fix="give the model that it was quantised from, and quantise the result",
            )
        start, stop = (8 + length + int(place) for place in one["data_offsets"])
        found[name] = Stored(file, DTYPES[one["dtype"]], tuple(one["shape"]), start, stop)
    return found


class Shard:
    """A safetensors file that is being written; ``put`` and ``copy`` take its tensors in any order.

    Args:
        forms: all of its tensors, or others of their shape and type, by name.
    """

    def __init__(self, path: Path, forms: Mapping[str, Tensor]) -> None:
        # Larger numbers first, so that each lies on a multiple of its size.
        names = sorted(forms, key=lambda name: -forms[name].dtype.itemsize)
        self.places: dict[str, int] = {}
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        at = 0
        for name in names:
            form = forms[name]
            stop = at + size_of(form)
            shape, dtype = list(form.shape), _NAMES[form.dtype]
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, stop]}
            self.places[name], at = at, stop
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self.base = 8 + len(text)
        self.stream = path.open("xb")
        self.stream.write(len(text).to_bytes(8, "little") + text)
        self.stream.truncate(self.base + at)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        problem: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stream.close()

    def put(self, name: str, tensor: Tensor) -> None:
        """Write one tensor."""
        self.stream.seek(self.base + self.places[name])
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        if flat.numel():
            self.stream.write(flat.view(torch.uint8).numpy().data)

    def copy(self, name: str, stored: Stored) -> None:
        """Copy one tensor from another file, byte by byte."""
        self.stream.seek(self.base + self.places[name])
        with stored.file.open("rb") as source:
            source.seek(stored.start)
            left = stored.stop - stored.start
            while left:
                block = source.read(min(left, _BLOCK))
                if not block:
                    raise refusal(stored.file, "a file that has become shorter", "copy it again")
                self.stream.write(block)
                left -= len(block)


def size_of(form: Tensor) -> int:
    """Return the bytes of a tensor, which need not have any."""
    return math.prod(form.shape) * form.dtype.itemsize
