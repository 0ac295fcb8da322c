"""What a model's constructor notes outside of the model, noted again for one that was unpickled."""

from __future__ import annotations

import sys
from collections.abc import Mapping

from torch import nn
from torch.utils.hooks import RemovableHandle


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
