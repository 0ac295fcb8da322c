"""What a layer carries beside its weights (hooks, buffers, attributes), and its going along with
what takes the layer's place."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from bp_convert.fields.carry import fields_of
from bp_convert.kinds import is_twin, kind_of
from bp_convert.torch_private import HOOKS_THAT_RUN, buffers_of, unsaved_buffers_of

COMPUTING = (WeightNorm, SpectralNorm, BasePruningMethod)  # hooks that set a weight
Names = frozenset[str]
_KNOWN: dict[type, tuple[Names, Names]] = {}  # attributes and buffers of layers as they are made


def goes_along(old: nn.Module, new: nn.Module, memo: dict[int, Any]) -> None:
    """Give what takes a layer's place in a copy what the layer carries beside its weights.

    Args:
        memo: of the deepcopy of the model that holds ``old``.
    """
    for name in attributes(old):
        if name not in vars(new) and not hasattr(type(new), name):
            vars(new)[name] = copy.deepcopy(vars(old)[name], memo)
    for name in buffers(old):
        if name not in vars(new) and not hasattr(new, name):
            saved = name not in unsaved_buffers_of(old)
            new.register_buffer(name, copy.deepcopy(buffers_of(old)[name], memo), persistent=saved)
    for name in HOOKS_THAT_RUN:
        held, taken = vars(old)[name], vars(new)[name]
        if isinstance(held, dict) and not taken:
            found = {key: one for key, one in held.items() if not isinstance(one, COMPUTING)}
            taken.update({key: copy.deepcopy(one, memo) for key, one in found.items()})
            memo.setdefault(id(held), taken)  # functions in it are made anew for the copy
        elif held is not None and taken is None:  # which form the backward hooks have
            vars(new)[name] = held


def attributes(layer: nn.Module) -> list[str]:
    """Return the names of the attributes that a layer was given beside those of its type, tensors
    apart."""
    held = vars(layer)
    if len(held) <= len(_KNOWN.get(_base(layer), ((), ()))[0]):
        return []
    found = [name for name in held if name not in _as_made(layer)[0]]
    return [name for name in found if not isinstance(held[name], Tensor | nn.Module)]


def buffers(layer: nn.Module) -> list[str]:
    """Return the names of the buffers that a layer holds beside those of its type; of a layer that
    computes its weight they are a part of that."""
    held = buffers_of(layer)
    computes = hasattr(layer, "parametrizations") or any(
        isinstance(hook, COMPUTING) for hook in vars(layer)[HOOKS_THAT_RUN[0]].values()
    )
    return [] if computes or not held else [one for one in held if one not in _as_made(layer)[1]]


def _base(layer: nn.Module) -> type:
    kind = None if is_twin(layer) else kind_of(layer)
    return type(layer) if kind is None else kind.dense


def _as_made(layer: Any) -> tuple[Names, Names]:
    """Return the names of the attributes and buffers of a layer that was just made."""
    base = _base(layer)
    if base not in _KNOWN:
        kind, made = kind_of(layer), layer
        with torch.device("meta"):
            if is_twin(layer):
                fields = fields_of(layer, type(layer).FIELDS)
                made = type(layer)(**fields, factors=layer.factors)
            elif kind is not None:
                made = kind.dense(**kind.read(layer))
        _KNOWN[base] = frozenset(vars(made)), frozenset(buffers_of(made))
    return _KNOWN[base]
