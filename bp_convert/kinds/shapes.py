"""Sizes of layers: as their tensors have them, and how tensors and attributes hang on widths.

Attributes such as ``in_features`` may say otherwise than tensors that were cut or grown by hand;
torch computes with the tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from bp_convert.torch_private import parameters_of

Shape = tuple[int, ...]
Size = int | Shape
Dim = int | torch.SymInt
Attr = Dim | tuple[Dim, ...]


@dataclass(frozen=True)
class Sizes:
    """The tensors (parameters and buffers) and attributes of one module at some widths."""

    tensors: Mapping[str, tuple[Dim, ...]] = field(default_factory=dict)
    attrs: Mapping[str, Attr] = field(default_factory=dict)
    output: Dim | None = None


@dataclass(frozen=True)
class Form:
    """How the tensors and attributes of one module hang on its widths.

    Attributes:
        own: widths that the module chooses itself, by name.
        inputs: (axis, width) of the input, for widths that its producer chooses.
        sizes: tensors and attributes, from the own widths and those of the input.
        base: the type whose ``forward`` this describes.
    """

    own: Mapping[str, int]
    inputs: tuple[tuple[int, int], ...]
    sizes: Callable[[Mapping[str, Dim], Sequence[Dim]], Sizes]
    base: type[nn.Module]

    def told(self) -> Sizes:
        """Return the sizes at the widths that the module's attributes tell."""
        return self.sizes(self.own, [width for _, width in self.inputs])


def shape_of(module: nn.Module, name: str) -> Shape | None:
    """Return the shape of a tensor that a module holds; None where it holds none of this name, or
    one without a shape yet, or one that is computed anew at each access, which may change it."""
    held = parameters_of(module).get(name)
    if held is None:
        held = vars(module).get(name)  # such as a pruned weight
    if not isinstance(held, Tensor) or is_lazy(held):
        return None
    return tuple(held.shape)


def contradiction(module: nn.Module, told: Mapping[str, tuple[Dim, ...]]) -> str | None:
    """Return which tensor is not of the shape that the module's attributes tell, in words."""
    for name, shape in told.items():
        found = shape_of(module, name)
        if found is not None and found != shape:
            return f"its {name} is {_words(found)} while its attributes say {_words(shape)}"
    return None


def _words(shape: Sequence[Dim]) -> str:
    return " x ".join(map(str, shape)) or "one number"
