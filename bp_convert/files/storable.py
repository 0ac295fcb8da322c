"""Whether every entry of a model's state fits into a file of weights and plan."""

from __future__ import annotations

import functools
from collections import Counter, OrderedDict

import safetensors.torch
import torch
from torch import Tensor, nn

from bp_convert.errors import CheckpointError
from bp_convert.files.entries import whole_state

_DEEPEST = 32
_VALUES = (
    *(bool, int, float, complex, str, bytes, type(None)),
    *(torch.dtype, torch.device, torch.Size, torch.layout),
)


def check_storable(model: nn.Module, *, tensors_alone: bool) -> None:
    """Refuse a model with state that a file of weights and plan cannot hold.

    Args:
        tensors_alone: it is a safetensors file; else a pickle of tensors and plain values.

    Raises:
        CheckpointError: names the entry.
    """
    for name, value in whole_state(model).items():
        odd = _not_in_safetensors(value) if tensors_alone else _odd(value)
        if odd is None:
            continue
        if tensors_alone:
            file, fix = (
                "safetensors file",
                "write NAME.pt, with --arch (arch= in Python) or without",
            )
        else:
            file = "file of weights and plan"
            fix = (
                "let get_extra_state() return tensors, numbers, texts, or lists and dictionaries "
                "of them; or write NAME.pt without --arch, which holds the whole model"
            )
        owner = name.rpartition(".")[0]
        try:
            kind = type(model.get_submodule(owner)).__name__
        except AttributeError:
            kind = type(model).__name__
        raise CheckpointError(
            where=f"{name} ({kind})",
            found=f"state that would be lost: {odd}, which a {file} cannot hold",
            allowed="a file that holds all of a model's state",
            fix=fix,
        )


def is_plain(value: object) -> bool:
    """Tell whether a value is made of tensors, numbers and texts, as any file may hold."""
    return _odd(value) is None


def _odd(value: object, depth: int = 0) -> str | None:
    """Return what in a value is not plain."""
    if depth > _DEEPEST:
        return f"a nesting of more than {_DEEPEST} levels"
    below = functools.partial(_odd, depth=depth + 1)
    if isinstance(value, Tensor):
        return None if type(value.detach()) is Tensor else f"a {type(value).__name__}"
    if type(value) in (list, tuple, set):
        assert isinstance(value, list | tuple | set)
        return next(filter(None, map(below, value)), None)
    if type(value) in (dict, OrderedDict, Counter):
        assert isinstance(value, dict)
        return next(filter(None, (*map(below, value), *map(below, value.values()))), None)
    return None if type(value) in _VALUES else f"a {type(value).__name__}"


def _not_in_safetensors(value: object) -> str | None:
    if not isinstance(value, Tensor) or type(value.detach()) is not Tensor:
        return f"a {type(value).__name__}"
    if value.is_quantized or value.layout is not torch.strided or value.is_nested:
        return f"a tensor of {value.dtype}, {value.layout}".replace("torch.", "")
    return None if _has_dtype(value.dtype) else f"a tensor of {value.dtype}".replace("torch.", "")


@functools.cache
def _has_dtype(dtype: torch.dtype) -> bool:
    try:
        content = safetensors.torch.save({"x": torch.empty(0, dtype=dtype)})
        return bool(safetensors.torch.load(content)["x"].dtype == dtype)
    except Exception:
        return False
