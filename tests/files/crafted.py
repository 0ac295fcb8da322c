"""Files built byte by byte: what torch.save would never write."""

from __future__ import annotations

import zipfile
from pathlib import Path


def torch_file(path: Path, pickle_bytes: bytes) -> Path:
    """Write a torch.save archive around any pickle."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr("archive/data.pkl", pickle_bytes)
        archive.writestr("archive/byteorder", b"little")
        archive.writestr("archive/version", b"3\n")
    return path


def call(module: str, name: str, *arguments: str) -> bytes:
    """Return pickle opcodes, without the end, that call ``module.name`` with strings."""
    strings = b"".join(
        b"X" + len(one.encode()).to_bytes(4, "little") + one.encode() for one in arguments
    )
    return f"c{module}\n{name}\n".encode() + b"(" + strings + b"tR"


def whole(opcodes: bytes) -> bytes:
    """Put protocol and end around opcodes."""
    return b"\x80\x02" + opcodes + b"."


def text(value: str) -> bytes:
    """Return the opcode that pushes a string."""
    return b"X" + len(value.encode()).to_bytes(4, "little") + value.encode()
