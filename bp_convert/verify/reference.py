"""The same weights in plain layers: what a converted model has to compute."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from bp_convert.graph.clone import clone
from bp_convert.graph.reshape import cast
from bp_convert.layers import TWINS
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
        self.swaps: dict[nn.Module, nn.Module] = {}
        if any(one.before != one.after for one in plan.resizes) or _widened(plan):
            self.swaps = {
                one: one.to_dense() for one in converted.modules() if isinstance(one, TWINS)
            }
            self.model = clone(converted, self.swaps, apart=True)
        else:
            self.model = in_dtype(clone(source, apart=True), dtype)
        self.update()

    @torch.no_grad()
    def update(self) -> None:
        """Take the weights over once more: those of the converted model have changed."""
        plain: dict[str, Tensor] = {}
        for name in self.names:
            twin = self.converted.get_submodule(name)
            assert isinstance(twin, TWINS)
            dense = twin.to_dense()
            prefix = f"{name}." if name else ""  # the model itself may be the layer
            plain.update({f"{prefix}{key}": one for key, one in dense.named_parameters()})
        ours = {**_state(self.converted), **plain}
        for name, tensor in _state(self.model).items():
            found = ours.get(name)
            if found is not None and found.shape == tensor.shape and tensor.is_floating_point():
                tensor.copy_(found)


def in_dtype(model: nn.Module, dtype: torch.dtype | None) -> nn.Module:
    """Return a model, cast in place where a dtype is asked for."""
    if dtype is not None:
        cast(model, dtype)
    return model


@torch.no_grad()
def change_weights(converted: nn.Module, names: list[str], factor: float) -> None:
    """Scale every factor and bias of the named layers, in place."""
    for name in names:
        for parameter in converted.get_submodule(name).parameters():
            parameter.mul_(factor)


def _widened(plan: Plan) -> bool:
    return any(
        one.inputs[0] != one.inputs[1] or one.outputs[0] != one.outputs[1] for one in plan.layers
    )


def _state(model: nn.Module) -> dict[str, Tensor]:
    return {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }
