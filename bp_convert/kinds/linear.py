"""nn.Linear."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import nn

from bp_convert.kinds.base import (
    Ask,
    Factors,
    Kind,
    Widths,
    bias_size,
    explicit,
    low_rank_share,
    with_rank,
)
from bp_convert.kinds.shapes import contradiction, shape_of
from bp_convert.kron.contract import bilinear_macs
from bp_convert.kron.policies import fast_factors, lone_prime, paper_factors
from bp_convert.layers.linear import BPLinear
from bp_convert.values.settings import Pairs


class LinearKind(Kind):
    name = "Linear"
    dense = nn.Linear
    twin = BPLinear
    fields = ("in_features", "out_features", "bias")

    def refuse(self, module: nn.Linear) -> str | None:
        outputs = module.out_features
        return contradiction(module, {"weight": (outputs, module.in_features), "bias": (outputs,)})

    def widths(self, module: nn.Linear) -> Widths:
        shape = shape_of(module, "weight") or ()
        return shape[::-1] if len(shape) == 2 else (module.in_features, module.out_features)

    def factor(self, module: nn.Linear, widths: Widths, ask: Ask) -> Factors:
        inputs, outputs = widths
        if isinstance(ask.pairs, Pairs):
            spec = explicit(module, self.name, ask.pairs, widths)
        elif ask.pairs == "fast" and isinstance(ask.rank, float):
            return {"weight": low_rank_share(widths, ask.rank)}
        elif ask.pairs == "fast":
            spec = fast_factors(inputs, outputs, 1)
        else:
            spec = paper_factors(inputs, outputs, 1)
        return {"weight": with_rank(spec, ask.rank, inputs * outputs)}

    def params(self, module: nn.Linear, widths: Widths, factors: Factors | None = None) -> int:
        inputs, outputs = widths
        weight = inputs * outputs if factors is None else factors["weight"].params
        return weight + bias_size(module, outputs)

    def macs(
        self,
        module: nn.Linear,
        widths: Widths,
        factors: Factors,
        shapes: Sequence[tuple[int, ...]],
    ) -> int:
        return sum(prod(shape[:-1]) for shape in shapes) * bilinear_macs(factors["weight"])

    def build(
        self, module: nn.Linear, widths: Widths, factors: Factors, device: torch.device | str
    ) -> BPLinear:
        inputs, outputs = widths
        return BPLinear(
            inputs,
            outputs,
            bias=module.bias is not None,
            factors=factors["weight"],
            device=device,
            dtype=module.weight.dtype,
        )


def prime_reason(widths: Widths, ask: Ask) -> str | None:
    """Say which width has no factor pair, where the pair is the planner's to choose."""
    if isinstance(ask.pairs, Pairs) or (ask.pairs == "fast" and isinstance(ask.rank, float)):
        return None
    lone = [width for width in widths if lone_prime(width)]
    return f"prime width {lone[0]} has no factor pair" if lone else None
