"""What models of transformers know of their tied weights, kept true of a converted one: loading,
saving and ``tie_weights`` go by names."""

from __future__ import annotations

import re
from typing import Any

from torch import nn

from bp_convert.graph.clone import all_weights
from bp_convert.kinds import is_twin

FULL, TOLD = "all_tied_weights_keys", "_tied_weights_keys"  # by name; and as patterns


def tell_ties(model: nn.Module) -> None:
    """Name the factors that layers share where each of transformers' models inside keeps the names
    of tied weights; names that are no tensors any more are left out."""
    for module in model.modules():
        known = vars(module).get(FULL)
        if not isinstance(known, dict):
            continue
        held = all_weights(module)
        mapping = {new: old for new, old in known.items() if new in held and old in held}
        first: dict[int, str] = {}
        factored = {id(one) for twin in module.modules() if is_twin(twin) for one in _own(twin)}
        for name, tensor in held.items():
            source = first.setdefault(id(tensor), name)
            if source != name and id(tensor) in factored and name not in mapping:
                mapping[name] = mapping.get(source, source)
        if mapping != known:
            made: Any = module
            setattr(made, FULL, mapping)
            setattr(made, TOLD, {_pattern(new): _pattern(old) for new, old in mapping.items()})


def forget_ties(model: nn.Module) -> None:
    """Undo ``tell_ties`` on a model of plain layers."""
    told = [one for one in model.modules() if TOLD in vars(one) and FULL in vars(one)]
    for module in told:
        delattr(module, TOLD)
    for module in told:
        made: Any = module
        setattr(made, FULL, made.get_expanded_tied_weights_keys(all_submodels=True))


def _own(twin: nn.Module) -> list[Any]:
    return [*twin.parameters(), *twin.buffers()]


def _pattern(name: str) -> str:
    return f"{re.escape(name)}$"
