"""nn.Conv1d, nn.Conv2d and nn.Conv3d."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from bp_convert.errors import PlanError
from bp_convert.kinds.base import (
    Ask,
    Choices,
    Factors,
    Kind,
    Shape,
    Widths,
    bias_size,
    fields_of,
    with_rank,
)
from bp_convert.kinds.rows import Pick, conv_rows
from bp_convert.kinds.shapes import contradiction, shape_of
from bp_convert.kron.columns import Columns
from bp_convert.kron.conv_layout import (
    aligned_axes,
    closest_conv_factors,
    conv_macs,
    every_axes,
    fast_conv_factors,
    paper_conv_factors,
)
from bp_convert.kron.pairs import divisor_pairs
from bp_convert.kron.policies import scaled_pair
from bp_convert.layers.conv import BPConv1d, BPConv2d, BPConv3d
from bp_convert.values.factors import FactorSpec
from bp_convert.values.settings import Pairs

_SAME = ("kernel_size", "stride", "padding", "dilation", "padding_mode")


class ConvKind(Kind):
    squared = True
    fields = ("in_channels", "out_channels", *_SAME, "groups", "bias")

    def refuse(self, module: Any) -> str | None:
        if module.groups > 1 and module.groups == self.widths(module)[0]:
            return "depth-wise convolution: there is nothing to factor"
        if module.groups > 1:
            return f"grouped convolution (groups={module.groups})"
        outputs = module.out_channels
        weight = (outputs, module.in_channels, *module.kernel_size)
        return contradiction(module, {"weight": weight, "bias": (outputs,)})

    def widths(self, module: Any) -> Widths:
        shape = shape_of(module, "weight")
        if shape is None or len(shape) != 2 + len(module.kernel_size):
            return module.in_channels, module.out_channels
        return shape[1] * module.groups, shape[0]

    def factor(self, module: Any, widths: Widths, ask: Ask) -> Factors:
        inputs, outputs = widths
        kernel = tuple(module.kernel_size)
        dense = inputs * prod(kernel) * outputs
        if isinstance(ask.pairs, Pairs):
            spec = self._explicit(module, widths, ask.pairs)
        elif ask.pairs == "paper":
            pair = scaled_pair(outputs, self.widths(module)[1])
            spec = paper_conv_factors(inputs, pair, kernel, 1) or closest_conv_factors(
                inputs, pair, kernel, 1
            )
        elif isinstance(ask.rank, float):
            spec = FactorSpec(
                out=(outputs, 1), inp=(1, inputs * prod(kernel)), axes=(2,) * len(kernel)
            )
        else:
            spec = fast_conv_factors(inputs, outputs, kernel, 1)
        return {"weight": with_rank(spec, ask.rank, dense)}

    def _explicit(self, module: Any, widths: Widths, pairs: Pairs) -> FactorSpec:
        inputs, outputs = widths
        kernel = tuple(module.kernel_size)
        columns = inputs * prod(kernel)
        axes = aligned_axes(pairs.inp, inputs, kernel)
        fits = prod(pairs.out) == outputs and prod(pairs.inp) == columns
        if fits and axes:
            return FactorSpec(out=pairs.out, inp=pairs.inp, axes=axes[0])
        raise PlanError(
            where=f"{self.name} {inputs} -> {outputs}, kernel {kernel}",
            found=f"pairs out {pairs.out}, in {pairs.inp}",
            allowed=f"out with product {outputs}; in with product {columns}, each factor a "
            "number of channels times the kernel axes that it owns",
            fix="give in as (c1*s1, c2*s2) with c1*c2 the input channels and s1, s2 products of "
            "whole kernel axes",
        )

    def choices(self, module: Any, widths: Widths) -> dict[str, Choices]:
        inputs, outputs = widths
        kernel = tuple(module.kernel_size)
        ins = {
            axes: tuple(Columns(pair, kernel, axes).inp for pair in divisor_pairs(inputs))
            for axes in every_axes(kernel)
        }
        return {"weight": Choices(divisor_pairs(outputs), ins, kernel)}

    def batched(self, module: Any, shape: Shape, batch: int) -> Shape:
        single = len(shape) == len(module.kernel_size) + 1
        return (batch, *shape) if single else super().batched(module, shape, batch)

    def rows(self, module: Any, x: Tensor, pick: Pick) -> dict[str, list[Tensor]]:
        return {"weight": [conv_rows(module, x, pick)]}

    def params(self, module: Any, widths: Widths, factors: Factors | None = None) -> int:
        inputs, outputs = widths
        weight: int
        if factors is None:
            shape = shape_of(module, "weight") or (0, 0, *module.kernel_size)
            weight = inputs // module.groups * prod(shape[2:]) * outputs
        else:
            weight = factors["weight"].params
        return weight + bias_size(module, outputs)

    def macs(
        self, module: Any, widths: Widths, factors: Factors, shapes: Sequence[tuple[int, ...]]
    ) -> int:
        inputs, outputs = widths
        axes = len(module.kernel_size)
        total: int = sum(
            (shape[0] if len(shape) == axes + 2 else 1)
            * conv_macs(
                factors["weight"],
                in_channels=inputs,
                out_channels=outputs,
                in_size=tuple(shape[-axes:]),
                **fields_of(module, _SAME),
            )
            for shape in shapes
        )
        return total

    def build(
        self, module: Any, widths: Widths, factors: Factors, device: torch.device | str
    ) -> nn.Module:
        inputs, outputs = widths
        return self.twin(
            inputs,
            outputs,
            **fields_of(module, _SAME),
            bias=module.bias is not None,
            factors=factors["weight"],
            device=device,
            dtype=module.weight.dtype,
        )


class Conv1dKind(ConvKind):
    name = "Conv1d"
    dense = nn.Conv1d
    twin = BPConv1d


class Conv2dKind(ConvKind):
    name = "Conv2d"
    dense = nn.Conv2d
    twin = BPConv2d


class Conv3dKind(ConvKind):
    name = "Conv3d"
    dense = nn.Conv3d
    twin = BPConv3d
