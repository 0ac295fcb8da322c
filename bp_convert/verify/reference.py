"""The same weights in plain layers: what a converted model has to compute."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from bp_convert.graph.clone import clone
from bp_convert.graph.reshape import cast
from bp_convert.kinds import is_twin
from bp_convert.values.plan import Plan


class Reference:
    """A model in plain layers that has the weights of a converted one.

    Where no width has changed that is a copy of the source itself, with its own layers, hooks and
    caches, given the weights that the bilinear layers stand for. A widened model has no such
    counterpart; its own bilinear layers are then exchanged for plain ones.

    Args:
        source: the model that was converted; it is copied.
        converted: a copy of its conversion, which is read.
        dtype: in which both compute.
    """

    def __init__(
        self, source: nn.Module, converted: nn.Module, plan: Plan, dtype: torch.dtype | None
    ) -> None:
        self.converted = converted
        self.names = [layer.name for layer in plan.converted]
        self.dense: dict[str, Tensor] = {}  # parameters here that stand for factors
        if any(one.before != one.after for one in plan.resizes) or _widened(plan):
            swaps: dict[nn.Module, nn.Module] = {
                one: one.to_dense() for one in converted.modules() if is_twin(one)
            }
            self.model = clone(converted, swaps, apart=True)
        else:
            self.model = in_dtype(clone(source, apart=True), dtype)
        self._take_over()

    @torch.no_grad()
    def _take_over(self) -> None:
        """Take the weights of the converted model over, a layer at a time."""
        ours = _state(self.model)
        for name, tensor in _state(self.converted).items():
            _copy(tensor, ours.get(name))
        for name, twin in self._twins():
            for key, tensor in twin.to_dense().named_parameters():
                own = f"{name}.{key}" if name else key  # the model itself may be the layer
                if _copy(tensor, ours.get(own)):
                    self.dense[own] = ours[own]

    @torch.no_grad()
    def scale(self, factor: float) -> None:
        """Scale the factors and biases of the converted model and what they are here, in place:
        a weight is a sum of products of two factors."""
        parts = [one for _, twin in self._twins() for one in twin.parameters()]
        for tensor in {id(one): one for one in parts}.values():
            tensor.mul_(factor)
        powers = {id(one): (one, key) for key, one in self.dense.items()}
        for tensor, key in powers.values():
            is_weight = key.rpartition(".")[2].startswith("weight")
            tensor.mul_(factor**2 if is_weight else factor)

    def _twins(self) -> Iterator[tuple[str, Any]]:
        for name in self.names:
            yield name, self.converted.get_submodule(name)


def in_dtype(model: nn.Module, dtype: torch.dtype | None) -> nn.Module:
    """Return a model, cast in place where a dtype is asked for."""
    if dtype is not None:
        cast(model, dtype)
    return model


def _widened(plan: Plan) -> bool:
    return any(
        one.inputs[0] != one.inputs[1] or one.outputs[0] != one.outputs[1] for one in plan.layers
    )


def _state(model: nn.Module) -> dict[str, Tensor]:
    return {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }


def _copy(old: Tensor, new: Tensor | None) -> bool:
    """Copy a tensor onto its counterpart where that has its shape; return whether it does."""
    fits = new is not None and new.shape == old.shape and new.is_floating_point()
    if new is not None and fits:
        new.copy_(old)
    return fits
