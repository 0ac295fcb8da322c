"""The state of two models compared to the bit, in one process or in two."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

_PLAIN = (int, float, complex, str, bytes, bytearray, torch.dtype, torch.device, type(None))


def digests(state: Mapping[str, object]) -> dict[str, str]:
    """Return a short hash of each entry: type, shape and every bit of a tensor, wherever it lies.

    Only plain values and tensors count; anything else is like anything else.
    """
    return {name: _digest(value) for name, value in state.items()}


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
