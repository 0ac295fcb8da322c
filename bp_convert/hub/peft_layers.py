"""Adapters of peft on bilinear layers."""

from __future__ import annotations

from importlib import import_module
from typing import Any, NoReturn

from bp_convert.errors import CheckpointError
from bp_convert.layers import BPConv1D, BPLinear


def lora_layers() -> dict[type, type]:
    """Return which layer of peft goes around which bilinear layer, as a ``LoraConfig`` takes them:
    ``config._register_custom_module(bp_convert.hub.lora_layers())``.

    The adapter stays beside the factors: their sum is no sum of as many Kronecker products, so that
    merging is refused.

    Raises:
        ImportError: peft is not installed.
    """
    linear: Any = import_module("peft.tuners.lora").Linear

    def merge(self: Any, *arguments: Any, **options: Any) -> NoReturn:
        raise CheckpointError(
            where=f"merging an adapter into a {type(self.get_base_layer()).__name__}",
            found="a weight that is a sum of Kronecker products, which its sum with another is not",
            allowed="the adapter beside the layer, as it was trained",
            fix="keep the adapter, or take plain layers before: bp_convert.to_dense(model)",
        )

    around = type("LoraBilinear", (linear,), {"merge": merge, "__module__": __name__})
    return {BPLinear: around, BPConv1D: around}
