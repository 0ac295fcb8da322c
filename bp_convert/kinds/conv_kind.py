"""nn.Conv1d, nn.Conv2d and nn.Conv3d."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

from torch import Tensor, nn

from bp_convert.errors import PlanError
from bp_convert.kinds.choices import Ask, Choices, Factors, Widths, with_rank
from bp_convert.kinds.kind import Examples, Kind, has_bias
from bp_convert.kinds.pick import Pick, conv_rows
from bp_convert.kinds.shapes import Dim, Form, Shape, Sizes, shape_of
from bp_convert.kinds.speed import Counts
from bp_convert.kron.column_order import Columns
from bp_convert.kron.conv_layout import (
    aligned_axes,
    closest_conv_factors,
    conv_macs,
    every_axes,
    fast_conv_factors,
    first_factor,
    lanes,
    layout_of,
    out_sizes,
    paper_conv_factors,
)
from bp_convert.kron.pairs import divisor_pairs
from bp_convert.kron.policies import scaled_pair
from bp_convert.layers.carry import fields_of
from bp_convert.layers.conv import BPConv1d, BPConv2d, BPConv3d
from bp_convert.values.factors import FactorSpec
from bp_convert.values.settings import Pairs
from bp_convert.values.tensors import TensorSpec

_SAME = ("kernel_size", "stride", "padding", "dilation", "padding_mode")
SIZES = {
    1: (16000, 4096, 1024, 256, 64, 16),
    2: (224, 64, 32, 28, 96, 128, 299, 16, 8),
    3: (112, 64, 32, 16, 8),
}
FRAMES = 16
THIN = 32  # convolutions with fewer outputs run at another speed


class ConvKind(Kind):
    squared = True

    def form(self, module: Any) -> Form:
        """Return the form of any convolution: plain, grouped, depth-wise or transposed."""
        kernel, channels, many = tuple(module.kernel_size), module.in_channels, module.groups
        times = module.out_channels // channels
        depthwise = many == channels > 1  # one filter, or a few, a channel

        def sizes(own: Mapping[str, Dim], inp: Sequence[Dim]) -> Sizes:
            if depthwise:
                inputs, outputs, groups = inp[0], inp[0] * times, inp[0]
                each: tuple[Dim, Dim] = (1, times)  # inputs and outputs of a group
            elif many > 1:
                each = own["in"], own["out"]
                inputs, outputs, groups = each[0] * many, each[1] * many, many
            else:
                each = inputs, outputs = inp[0], own["out"]
                groups = 1
            matrix = (inputs, each[1]) if module.transposed else (outputs, each[0])
            return Sizes(
                {"weight": (*matrix, *kernel), "bias": (outputs,)},
                {"in_channels": inputs, "out_channels": outputs, "groups": groups},
                outputs,
            )

        own = {} if depthwise else {"out": module.out_channels // many}
        given = depthwise or many == 1
        return Form(
            own=own if given else {**own, "in": channels // many},
            inputs=((-1 - len(kernel), channels),) if given else (),
            sizes=sizes,
            base=self.base_of(module),
        )

    def refuse(self, module: Any) -> str | None:
        if module.groups > 1 and module.groups == self.widths(module)[0]:
            return "depth-wise convolution: there is nothing to factor"
        if module.groups > 1:
            return f"grouped convolution (groups={module.groups})"
        return super().refuse(module)

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
        elif ask.by_share:
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
        return weight + (outputs if has_bias(module) else 0)

    def macs(self, module: Any, widths: Widths, factors: Factors, shapes: Sequence[Shape]) -> int:
        axes = len(module.kernel_size)
        total: int = sum(
            (shape[0] if len(shape) == axes + 2 else 1)
            * conv_macs(
                factors["weight"],
                in_size=tuple(shape[-axes:]),
                **fields_of(module, _SAME),
            )
            for shape in shapes
        )
        return total

    def channel_axis(self, module: Any) -> int:
        return -1 - len(module.kernel_size)

    def empty_output(self, module: Any, x: Tensor) -> Tensor:
        axes = len(module.kernel_size)
        size = out_sizes(
            x.shape[-axes:], module.kernel_size, module.stride, module.padding, module.dilation
        )
        return x.new_empty(*x.shape[: -axes - 1], module.out_channels, *size)

    def examples(self, module: Any, name: str) -> Examples:
        if module.transposed:  # it makes images of what another layer gives
            return
        axes, channels = len(module.kernel_size), module.in_channels
        sizes = SIZES[axes]
        if axes == 2 and channels == 1:
            sizes = (28, 32, *sizes)
        for size in dict.fromkeys(sizes):
            shape = (size,) * axes if axes < 3 else (FRAMES, size, size)
            words = f"{channels} channels from its first layer {name}, size {size} because it runs"
            yield TensorSpec(shape=(channels, *shape)), words

    def operations(
        self, module: Any, widths: Widths, factors: Factors, shape: Shape
    ) -> tuple[Counts, Counts]:
        inputs, outputs = widths
        kernel, stride = tuple(module.kernel_size), tuple(module.stride)
        axes = len(kernel)
        batch = shape[0] if len(shape) == axes + 2 else 1
        before = shape[-axes:]
        after = out_sizes(before, kernel, stride, module.padding, module.dilation)
        positions, places = batch * prod(after), batch * prod(before)
        spec = factors["weight"]
        lay, rank = layout_of(spec, kernel), spec.rank
        (k1, k2), first = spec.out, first_factor(spec, kernel, stride)
        early = batch * prod(
            n if owner == first else m for n, m, owner in zip(after, before, spec.axes, strict=True)
        )
        if prod(kernel) == 1:
            early = positions
        rows2, columns2 = (k2, rank * lay.c2) if first == 1 else (rank * k2, lay.c2)
        at2 = positions * k1 if first == 1 else early * lay.c1
        at1 = early if first == 1 else positions
        one = at1 * k1 * lay.c1 * lay.s1 * rank * (lay.c2 if first == 1 else k2)
        two = at2 * lanes(rows2) * columns2 * lay.s2
        thin = "thin" if rows2 < THIN else "wide"
        passive = lay.s1 > 1
        between = early * (k1 * rank * lay.c2 if first == 1 else lay.c1 * rank * k2)
        dense: Counts = {
            "calls": 1,
            "macs": positions * lanes(outputs) * inputs * prod(kernel),
            "weights": inputs * outputs * prod(kernel),
            "moved": places * inputs + positions * outputs,
        }
        twin: Counts = {
            "calls": 1,
            "product": (0 if passive else one) + (two if prod(kernel) == 1 else 0),
            "passive": one if passive else 0,
            thin: two if prod(kernel) > 1 else 0,
            "moved": places * inputs + 2 * between + 2 * positions * outputs,
            "turned": (places * inputs + between) if passive else 0,
            "weights": spec.params,
        }
        return dense, twin


class Conv1dKind(ConvKind):
    name = "Conv1d"
    alike = (nn.ConvTranspose1d,)
    twin = BPConv1d


class Conv2dKind(ConvKind):
    name = "Conv2d"
    alike = (nn.ConvTranspose2d,)
    twin = BPConv2d


class Conv3dKind(ConvKind):
    name = "Conv3d"
    alike = (nn.ConvTranspose3d,)
    twin = BPConv3d
