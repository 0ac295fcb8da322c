"""nn.EmbeddingBag: the tables of recommenders."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from torch import Tensor

from bp_convert.kinds.choices import Factors, Widths
from bp_convert.kinds.embedding_kind import EmbeddingKind
from bp_convert.kinds.shapes import Shape
from bp_convert.kinds.speed import Counts
from bp_convert.layers.embedding_bag import BPEmbeddingBag
from bp_convert.seen.pick import Pick


class EmbeddingBagKind(EmbeddingKind):
    name = "EmbeddingBag"
    twin = BPEmbeddingBag
    refused = ("max_norm", "norm_type", "scale_grad_by_freq")

    def call_shape(self, module: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Shape | None:
        """Return (B, L) of a call; where bags differ in length, L is their mean, rounded up."""
        values = {**dict(zip(("input", "offsets"), args, strict=False)), **kwargs}
        input, offsets = values.get("input"), values.get("offsets")
        if not isinstance(input, Tensor) or not isinstance(offsets, Tensor):
            return None
        bags = max(1, len(offsets) - int(module.include_last_offset))
        return bags, -(-len(input) // bags)

    def rows(self, module: Any, x: Tensor, pick: Pick) -> dict[str, list[Tensor]]:
        """Return the indices (n,) that are looked up, without those that are left out."""
        (found,) = super().rows(module, x, pick)["weight"]
        pad = module.padding_idx
        return {"weight": [found if pad is None else found[found != pad]]}

    def macs(self, module: Any, widths: Widths, factors: Factors, shapes: Sequence[Shape]) -> int:
        return BPEmbeddingBag.predict_macs(factors["weight"], shapes, module.mode)

    def operations(
        self, module: Any, widths: Widths, factors: Factors, shape: Shape
    ) -> tuple[Counts, Counts]:
        spec, columns = factors["weight"], widths[1]
        looked, bags = prod(shape), shape[0] if shape else 1
        dense: Counts = {"calls": 1, "looked": looked, "moved": looked * columns}
        if module.mode != "max" and 1 in spec.inp:
            row = spec.rank * (spec.out[0] if spec.inp[0] > 1 else spec.out[1])
            twin: Counts = {
                "calls": 1,
                "looked": looked,
                "moved": looked * row + bags * (row + columns),
                "macs": bags * spec.rank * columns,
            }
            return dense, twin
        twin = {
            "calls": 2,
            "both": looked,
            "rows": looked * spec.rank * sum(spec.out),
            "products": looked * spec.rank * columns,
        }
        return dense, twin

    def empty_output(self, module: Any, x: Tensor) -> Tensor:
        made: Tensor = module.weight.new_empty(*x.shape[:1], module.embedding_dim)
        return made
