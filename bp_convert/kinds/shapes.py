"""Sizes of a layer as its tensors have them. Attributes such as ``in_features`` may say otherwise
where tensors were cut or grown by hand; torch computes with the tensors."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from bp_convert.torch_private import parameters_of

Shape = tuple[int, ...]


def shape_of(module: nn.Module, name: str) -> Shape | None:
    """Return the shape of a tensor that a module holds; None where it holds none of this name, or
    one without a shape yet, or one that is computed anew at each access, which may change it."""
    held = parameters_of(module).get(name)
    if held is None:
        held = vars(module).get(name)  # such as a pruned weight
    if not isinstance(held, Tensor) or is_lazy(held):
        return None
    return tuple(held.shape)


def contradiction(module: nn.Module, told: Mapping[str, Shape]) -> str | None:
    """Return which tensor is not of the shape that the module's attributes tell, in words."""
    for name, shape in told.items():
        found = shape_of(module, name)
        if found is not None and found != shape:
            return f"its {name} is {_words(found)} while its attributes say {_words(shape)}"
    return None


def _words(shape: Shape) -> str:
    return " x ".join(map(str, shape)) or "one number"
