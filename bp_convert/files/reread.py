"""A file that was just written, read in this process and compared with the model, bit by bit."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bp_convert.bits.filed import whole_content
from bp_convert.errors import VerificationError
from bp_convert.files.atomic import Prove
from bp_convert.files.converted import read_converted
from bp_convert.files.entries import whole_state
from bp_convert.files.sniff import FileKind, file_kind
from bp_convert.files.unpickle import listed, load_known, names_in
from bp_convert.files.writable import plain_name
from bp_convert.pickles.meaning import meanings

_PLAIN = (int, float, complex, str, bytes, bytearray, torch.dtype, torch.device, type(None))


def read_back(model: nn.Module, path: Path, *, trust: Sequence[str] = ()) -> Prove:
    """Return what reads a file of ``model`` before it takes its name ``path``.

    Args:
        trust: packages and Python files that will be trusted when it is loaded.
    """

    def prove(places: Sequence[Path]) -> None:
        compare(path, bits_of(model), digests(_state_in(places, trust)))

    return prove


def bits_of(model: nn.Module) -> dict[str, str]:
    """Return a hash of each entry of a model's state, by its name in a file."""
    return digests(whole_state(model))


def compare(path: Path, expected: Mapping[str, str], found: Mapping[str, str]) -> None:
    """Compare what a file holds with what it should.

    Raises:
        VerificationError: they differ; names the entries.
    """
    names = [name for name in {**expected, **found} if expected.get(name) != found.get(name)]
    if names:
        raise VerificationError(
            where=str(path),
            found=f"the file as it was written reads otherwise than the model, in {listed(names)}; "
            "it was removed",
            allowed="a file that gives every bit back",
            fix="write it again, or to another disk; if it stays so, please report this model",
        )


def _state_in(places: Sequence[Path], trust: Sequence[str]) -> dict[str, Any]:
    weights, *beside = places
    if file_kind(weights) is FileKind.SAFETENSORS:
        return read_converted(weights, beside=beside[0]).state
    known, needed = meanings(names_in(weights), trust)
    content: Any = load_known(weights, known, needed, mmap=True)
    if isinstance(content, nn.Module):
        return whole_state(content)
    model, state = whole_content(content, str(weights))
    return whole_state(model) if model is not None else dict(state)


def digests(state: Mapping[str, object]) -> dict[str, str]:
    """Return a short hash of each entry, by its name in a file: type, shape and every bit of a
    tensor, wherever it lies.

    Only plain values and tensors count; anything else is like anything else.
    """
    return {plain_name(name): _digest(value) for name, value in state.items()}


def _digest(value: object) -> str:
    digest = hashlib.sha256()
    for piece in _pieces(value):
        digest.update(piece)
    return digest.hexdigest()[:32]


def _pieces(value: object) -> Iterator[bytes | memoryview]:
    if isinstance(value, Tensor):
        yield from _tensor_pieces(value)
    elif isinstance(value, Mapping):
        yield f"{len(value)} pairs".encode()
        for key, one in value.items():
            yield from _pieces(key)
            yield from _pieces(one)
    elif isinstance(value, list | tuple):
        yield f"{len(value)} items".encode()
        for one in value:
            yield from _pieces(one)
    elif isinstance(value, set | frozenset):
        yield repr(sorted(map(_digest, value))).encode()
    elif isinstance(value, _PLAIN):
        yield f"{type(value).__name__} {value!r}".encode()
    else:
        yield b"something else"


def _tensor_pieces(tensor: Tensor) -> Iterator[bytes | memoryview]:
    tensor = tensor.detach()
    yield f"{tensor.dtype} {tuple(tensor.shape)} {tensor.layout}".encode()
    if tensor.is_meta:
        return
    if tensor.is_quantized:
        yield str(tensor.qscheme()).encode()
        tensor = tensor.int_repr()
    elif tensor.layout is torch.sparse_coo:
        tensor = tensor.coalesce()
        yield from _tensor_pieces(tensor.indices())
        tensor = tensor.values()
    elif tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    if type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__ and hasattr(
        tensor, "__tensor_flatten__"
    ):
        for name in tensor.__tensor_flatten__()[0]:
            yield from _tensor_pieces(getattr(tensor, name))
        return
    if tensor.numel():
        flat = tensor.resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
        yield flat.view(torch.uint8).numpy().data
