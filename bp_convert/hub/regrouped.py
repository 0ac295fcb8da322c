"""Weights that transformers stores otherwise than its classes hold them: experts one by one, where
a class holds one parameter for all."""

from __future__ import annotations

import copy
import sys
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from bp_convert.hub.marked import quiet


def as_held(model: nn.Module, state: Mapping[str, object]) -> dict[str, object]:
    """Return a folder's weights by the names under which the model's class holds them; the same
    where transformers has no rule for the class, or fails to apply it.

    Args:
        model: of transformers, or any other, whose weights are what they are.
        state: tensors by the names that the folder has.
    """
    home: Any = sys.modules.get("transformers.conversion_mapping")
    made: Any = model
    wanted = set(model.state_dict())
    tensors = {name: one for name, one in state.items() if isinstance(one, Tensor)}
    found = getattr(home, "get_checkpoint_conversion_mapping", None)
    config = getattr(made, "config", None)
    stored_so = found is not None and found(getattr(config, "model_type", "")) is not None
    if not stored_so or len(tensors) != len(state) or not (wanted - tensors.keys()):
        return dict(state)
    try:
        with quiet():
            dtype = next(one.dtype for one in model.parameters())
            loaded, said = type(made).from_pretrained(
                None,
                config=copy.deepcopy(made.config),
                state_dict=tensors,
                dtype=dtype,
                output_loading_info=True,
            )
    except Exception:  # of another release: what is missing is told where the weights are loaded
        return dict(state)
    lost = {*said["missing_keys"], *(str(one) for one in said["mismatched_keys"])}
    return {name: one for name, one in loaded.state_dict().items() if name not in lost}
