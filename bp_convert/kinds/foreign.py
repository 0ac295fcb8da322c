"""Modules that something else has taken hold of: quantised, scripted, sharded; and what to do.

They are told by where their types and tensors come from; no library is imported for it.
"""

from __future__ import annotations

import torch
from torch import nn

QUANTISED = "convert the model first, and quantise the result"
_TENSORS = {
    "DTensor": "a shard (DTensor): gather the whole weights first, and convert those",
    "Params4bit": f"quantised by bitsandbytes: load it without quantization_config; {QUANTISED}",
    "Int8Params": f"quantised by bitsandbytes: load it without quantization_config; {QUANTISED}",
}
_HOMES = {
    "torchao.": f"quantised by torchao: {QUANTISED}",
    "torch.ao.nn.qat": "prepared for quantisation-aware training: convert the model before that",
    "torch.ao.nn": f"quantised: {QUANTISED}",
    "torch.distributed.fsdp": "a shard of FSDP: gather the whole weights first, and convert those",
    "bitsandbytes.": f"quantised by bitsandbytes: {QUANTISED}",
}


def taken_over(module: nn.Module) -> str:
    """Say by what a module, or one of its own tensors, was taken hold of, and what to do; empty
    where it was not."""
    if isinstance(module, torch.jit.ScriptModule):
        return "TorchScript, whose layers cannot be exchanged: give the model that it was made from"
    for one in module.parameters(recurse=False):
        kind = type(one)
        found = _TENSORS.get(kind.__name__) or _home(kind.__module__)
        if found:
            return found
    return _home(type(module).__module__)


def packed(model: nn.Module) -> list[str]:
    """Name what of a model was taken hold of and holds no parameters any more, with what to do."""
    found: dict[str, list[str]] = {}
    inside = ""
    for name, module in model.named_modules():
        words = "" if inside and name.startswith(inside) else taken_over(module)
        if words and next(module.parameters(), None) is None:
            found.setdefault(words, []).append(name or type(module).__name__)
            inside = f"{name}."
    return [
        f"{len(names)} module{'s' * (len(names) > 1)} without weights to factor, such as "
        f"{names[0]}: {words}"
        for words, names in found.items()
    ]


def _home(name: str) -> str:
    return next((words for home, words in _HOMES.items() if f"{name}.".startswith(home)), "")
