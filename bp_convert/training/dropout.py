"""Dropout left out while a model learns its teacher's outputs, in which there is none."""

from __future__ import annotations

from torch import nn

from bp_convert.torch_private import DropoutBase

Changed = list[tuple[nn.Module, str, float]]
KINDS = ("drop", "stochasticdepth")  # in names of classes whose ``p`` is such a probability


def leave_out(model: nn.Module) -> Changed:
    """Set each probability of dropout to 0: those of dropout and of stochastic depth, and numbers
    of any module whose name holds ``drop``, such as ``attention_dropout``; ``put_back`` takes it
    back.

    Returns:
        The modules, names and values that were changed.
    """
    found: Changed = []
    for module in model.modules():
        kind = type(module).__name__.lower()
        drops = isinstance(module, DropoutBase) or any(one in kind for one in KINDS)
        for name, value in vars(module).items():
            named = "drop" in name or (name == "p" and drops)
            if named and isinstance(value, float) and value > 0:
                found.append((module, name, value))
    for module, name, _ in found:
        setattr(module, name, 0.0)
    return found


def put_back(changed: Changed) -> None:
    """Give probabilities back."""
    for module, name, value in changed:
        setattr(module, name, value)
