"""A model's state with some of its tensors in few bits: taken apart for a file, put together again.

A packed tensor NAME stands in the file as ``NAME::codes`` and ``NAME::scales``, or, of a floating
type, as ``NAME::numbers``; beside them stands for each name how it is stored, its shape and dtype.
A model that is pickled as it is stands there with one number for each of these tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bp_convert.bits.grid import FORMS, Form
from bp_convert.bits.packing import pack, unpack
from bp_convert.errors import CheckpointError

Forms = Mapping[str, Form]
Packed = dict[str, dict[str, Any]]
Write = Callable[[Path], object]
PACKED = "packed"  # what stands beside the state of a file
MARK = "::"
DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def parted(state: Mapping[str, Tensor], forms: Forms) -> tuple[dict[str, Tensor], Packed]:
    """Return a state with the tensors of ``forms`` in parts, and what puts them together; a tensor
    under two names has the same parts under both.

    Raises:
        CheckpointError: numbers that do not lie on the grid that they were rounded to.
    """
    entries: dict[str, Tensor] = {}
    packed: Packed = {}
    words = {form: word for word, form in FORMS.items()}
    made: dict[int, dict[str, Tensor] | None] = {}
    for name, tensor in state.items():
        form = forms.get(name)
        if form is None:
            entries[name] = tensor
            continue
        if id(tensor) not in made:
            made[id(tensor)] = pack(tensor, form)
        parts = made[id(tensor)]
        if parts is None:
            raise _moved(name, words[form])
        entries.update({f"{name}{MARK}{part}": one for part, one in parts.items()})
        packed[name] = {
            "store": words[form],
            "shape": list(tensor.shape),
            "dtype": str(tensor.dtype).removeprefix("torch."),
        }
    return entries, packed


def _moved(name: str, store: str) -> CheckpointError:
    return CheckpointError(
        where=name,
        found=f"weights that are not those which were rounded to {store}: they were changed since",
        allowed="the weights that the conversion gave",
        fix="bp_convert.store(model, 'fp32') gives a copy that is saved as it is, and "
        f"bp_convert.store(model, '{store}') one that is rounded again",
    )


def joined(entries: Mapping[str, Any], packed: object, where: str) -> dict[str, Any]:
    """Undo ``parted``.

    Raises:
        CheckpointError: what stands there does not fit together.
    """
    state = dict(entries)
    for name, told in (packed if isinstance(packed, dict) else {}).items():
        start = f"{name}{MARK}"
        try:
            form, dtype = FORMS[told["store"]], DTYPES[told["dtype"]]
            shape = tuple(map(int, told["shape"]))
            found = [one for one in state if one.startswith(start)]
            parts = {one.removeprefix(start): state.pop(one) for one in found}
            state[name] = unpack(parts, form, shape, dtype)
        except (KeyError, TypeError, ValueError, RuntimeError, AttributeError) as problem:
            raise _unfitting(f"{where}, {name}", problem) from None
    return state


def _unfitting(where: str, problem: Exception) -> CheckpointError:
    return CheckpointError(
        where=where,
        found=f"packed weights that do not fit together: {problem}",
        allowed="codes and scales as they were written",
        fix="copy the file again, or convert the model again",
    )


def packed_writer(
    content: dict[str, Any], forms: Forms, writer: Callable[[object], Write]
) -> Write:
    """Return what writes a file's content with some tensors in few bits.

    Args:
        content: with a ``state``, or a ``skeleton`` that is pickled.
        writer: returns what writes a content.

    Raises:
        CheckpointError: as ``parted``.
    """
    model: nn.Module | None = content["skeleton"]
    state: dict[str, Any] = content["state"] or {}
    weights = state if model is None else dict(model.named_parameters(remove_duplicate=False))
    apart = {name: weights[name] for name in forms}
    entries, packed = parted(apart, forms)
    rest = {name: one for name, one in state.items() if name not in forms}
    number = {"format": 3, "state": {**rest, **entries}, PACKED: packed}
    whole = {**content, **number}

    def write(place: Path) -> None:
        with _emptied({} if model is None else apart):
            writer(whole)(place)

    return write


def whole_content(content: Mapping[str, Any], where: str) -> tuple[Any, Any]:
    """Return the skeleton and the state of a file's content, with every tensor in its place.

    Raises:
        CheckpointError: they do not fit together.
    """
    skeleton, state = content["skeleton"], content["state"]
    if not isinstance(content.get(PACKED), dict):
        return skeleton, state
    state = joined(state or {}, content[PACKED], where)
    if not isinstance(skeleton, nn.Module):
        return skeleton, state
    held = dict(skeleton.named_parameters(remove_duplicate=False))
    for name in content[PACKED]:
        if name not in held or held[name].shape != state[name].shape:
            raise _unfitting(where, KeyError(f"{name} of shape {tuple(state[name].shape)}"))
        held[name].data = state[name]
    return skeleton, state


@contextmanager
def _emptied(tensors: Mapping[str, Tensor]) -> Iterator[None]:
    """Let tensors hold one number, the same for all of one dtype, at their shapes."""
    held = {id(one): (one, one.data) for one in tensors.values()}
    zeros = {(data.dtype, data.device): data.new_zeros(()) for _, data in held.values()}
    try:
        for one, data in held.values():
            one.data = zeros[data.dtype, data.device].expand(data.shape)
        yield
    finally:
        for one, data in held.values():
            one.data = data
