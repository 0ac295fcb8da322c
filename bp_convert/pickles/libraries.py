"""What libraries add to models as they run: taken off in files, noted again when one is read."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

# Local functions that libraries hook modules by: transformers again on the first run that asks for
# hidden states; torch only to read state dicts of its older weight_norm.
_LIBRARY_HOOKS = (
    ("transformers.utils.output_capturing", "install_output_"),
    ("torch.nn.utils.parametrizations", "weight_norm.<locals>._weight_norm_compat_hook"),
)
_CAPTURING_MARK = "_output_capturing_hooks_installed"


def without_library_hooks(module: nn.Module) -> dict[str, Any]:
    """Return the attributes of a module that differ without its libraries' own hooks."""
    own = vars(module)
    groups = {key: one for key, one in own.items() if "_hooks" in key and isinstance(one, dict)}
    theirs = {
        number
        for hooks in groups.values()
        for number, hook in hooks.items()
        if _is_library_hook(hook)
    }
    changed: dict[str, Any] = {
        key: OrderedDict((number, one) for number, one in hooks.items() if number not in theirs)
        for key, hooks in groups.items()
        if not theirs.isdisjoint(hooks)
    }
    if own.get(_CAPTURING_MARK):
        changed[_CAPTURING_MARK] = False
    return changed


def _is_library_hook(hook: object) -> bool:
    function = getattr(hook, "hook", hook)  # torch wraps some
    home, name = getattr(function, "__module__", ""), getattr(function, "__qualname__", "")
    return any(home == theirs and name.startswith(start) for theirs, start in _LIBRARY_HOOKS)


def settle(content: object) -> None:
    """Make every model in what was read work as one that was made in this process.

    * torch numbers hooks over all modules; a new hook would take the number of an unpickled one,
      and its place.
    * transformers notes by class which outputs can be recorded; without it, a model that needs
      its hidden states fails.
    """
    models = content.values() if isinstance(content, Mapping) else [content]
    for model in models:
        if isinstance(model, nn.Module):
            for module in model.modules():
                _number_hooks(module)
                _note_outputs(module)


def _number_hooks(module: nn.Module) -> None:
    for name, hooks in vars(module).items():
        if "_hooks" in name and isinstance(hooks, Mapping):
            last = max((one for one in hooks if type(one) is int), default=-1)
            RemovableHandle.next_id = max(RemovableHandle.next_id, last + 1)


def _note_outputs(module: nn.Module) -> None:
    home = sys.modules.get("transformers.utils.output_capturing")
    registry = getattr(home, "_CAN_RECORD_REGISTRY", None)
    outputs = getattr(type(module), "_can_record_outputs", None)
    if isinstance(registry, dict) and isinstance(outputs, dict) and not registry.get(module):
        registry[module] = outputs
