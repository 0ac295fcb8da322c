"""nn.Conv1d, nn.Conv2d and nn.Conv3d, whole or by group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from bp_convert.errors import PlanError
from bp_convert.fields.carry import fields_of
from bp_convert.kinds.choices import Ask, Choices, Factors, Widths, with_rank
from bp_convert.kinds.kind import Examples, Kind, has_bias
from bp_convert.kinds.shapes import Dim, Form, Shape, Sizes, shape_of
from bp_convert.kinds.speed import Counts
from bp_convert.kinds.spread import Spread
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
from bp_convert.layers.conv import BPConv1d, BPConv2d, BPConv3d
from bp_convert.seen.pick import Pick, conv_rows
from bp_convert.values.factors import FactorSpec
from bp_convert.values.settings import Pairs, Rank
from bp_convert.values.tensors import TensorSpec

_SAME = ("kernel_size", "stride", "padding", "dilation", "padding_mode")
SIZES = {
    1: (16000, 4096, 1024, 256, 64, 16),
    2: (224, 64, 32, 28, 96, 128, 299, 16, 8),
    3: (112, 64, 32, 16, 8),
}
FRAMES = 16
GROUPED = 1.6  # times as long as its counts say takes a twin with groups, whose parts are small
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
        return super().refuse(module)

    def widths(self, module: Any) -> Widths:
        shape = shape_of(module, "weight")
        if shape is None or len(shape) != 2 + len(module.kernel_size):
            return module.in_channels, module.out_channels
        return shape[1] * module.groups, shape[0]

    def each(self, module: Any, widths: Widths) -> Widths:
        """Return the inputs and outputs of one group."""
        return widths[0] // module.groups, widths[1] // module.groups

    def plain(self, module: Any, weight: Tensor) -> Tensor:
        """Return a weight as that of a convolution, (K, C/G, *kernel); the same way back."""
        return weight

    def out_size(self, module: Any, size: Shape) -> Shape:
        """Return the spatial size that comes of one."""
        return out_sizes(size, module.kernel_size, module.stride, module.padding, module.dilation)

    def first(self, module: Any, spec: FactorSpec) -> int:
        """Return which factor the twin applies first."""
        return first_factor(spec, module.kernel_size, module.stride)

    def cheapest(self, module: Any, inputs: int, outputs: int, rank: Rank) -> FactorSpec:
        """Return the pair on which a share of the parameters is spent: that of least time."""
        kernel = tuple(module.kernel_size)
        return FactorSpec(out=(outputs, 1), inp=(1, inputs * prod(kernel)), axes=(2,) * len(kernel))

    def factor(self, module: Any, widths: Widths, ask: Ask) -> Factors:
        inputs, outputs = self.each(module, widths)
        kernel = tuple(module.kernel_size)
        dense = inputs * prod(kernel) * outputs
        if isinstance(ask.pairs, Pairs):
            spec = self._explicit(module, (inputs, outputs), ask.pairs)
        elif ask.pairs == "paper":
            pair = scaled_pair(outputs, self.each(module, self.widths(module))[1])
            spec = paper_conv_factors(inputs, pair, kernel, 1) or closest_conv_factors(
                inputs, pair, kernel, 1
            )
        elif ask.by_share:
            spec = self.cheapest(module, inputs, outputs, ask.rank)
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
        group = "a group of " if module.groups > 1 else ""
        raise PlanError(
            where=f"{group}{self.name} {inputs} -> {outputs}, kernel {kernel}",
            found=f"pairs out {pairs.out}, in {pairs.inp}",
            allowed=f"out with product {outputs}; in with product {columns}, each factor a "
            "number of channels times the kernel axes that it owns",
            fix="give in as (c1*s1, c2*s2) with c1*c2 the input channels and s1, s2 products of "
            "whole kernel axes",
        )

    def choices(self, module: Any, widths: Widths) -> dict[str, Choices]:
        inputs, outputs = self.each(module, widths)
        kernel = tuple(module.kernel_size)
        ins = {
            axes: tuple(Columns(pair, kernel, axes).inp for pair in divisor_pairs(inputs))
            for axes in every_axes(kernel)
        }
        return {"weight": Choices(divisor_pairs(outputs), ins, kernel)}

    # The matrices of a role are those of the groups.

    def matrices(
        self, module: Any, spread: Spread, factors: Factors | None = None
    ) -> dict[str, list[Tensor]]:
        weight = self.plain(module, self.spread(module, spread)["weight"])
        return {"weight": list(weight.flatten(1).chunk(module.groups))}

    @torch.no_grad()
    def add(self, module: Any, role: str, changes: Sequence[Tensor]) -> None:
        plain = self.plain(module, module.weight)
        change = torch.cat(list(changes)).view(plain.shape)
        module.weight.add_(self.plain(module, change).to(module.weight))

    @torch.no_grad()
    def place(self, twin: Any, role: str, index: int, w1: Tensor, w2: Tensor) -> None:
        many = twin.groups > 1
        (twin.w1[index] if many else twin.w1).copy_(w1)
        (twin.w2[index] if many else twin.w2).copy_(w2)

    @torch.no_grad()
    def shift(self, twin: Any, role: str, index: int, change: Tensor) -> bool:
        if not has_bias(twin):
            return False
        twin.bias.chunk(twin.groups)[index].add_(change.to(twin.bias))
        return True

    def output_norms(self, module: Any) -> Tensor:
        plain = self.plain(module, module.weight)
        norms: Tensor = plain.double().square().flatten(1).sum(1)
        return norms

    def only_repeats(self, module: Any, factors: Factors) -> bool:
        spec = factors["weight"]
        return module.groups == 1 and spec.rank < spec.full_rank

    def source(self, module: Any) -> Tensor:
        return self.plain(module, module.weight)

    def spread(self, module: Any, spread: Spread) -> dict[str, Tensor]:
        weight = spread.rows(self.plain(module, module.weight))
        if module.groups == 1:
            weight = spread.columns(weight)
        elif spread.inputs is not None:  # channels stay in their groups, in each the same ones
            own = spread.inputs[: len(spread.inputs) // module.groups]
            weight = Spread(own).columns(weight)
        wide = {"weight": self.plain(module, weight)}
        if has_bias(module):
            wide["bias"] = spread.rows(module.bias)
        return wide

    def batched(self, module: Any, shape: Shape, batch: int) -> Shape:
        single = len(shape) == len(module.kernel_size) + 1
        return (batch, *shape) if single else super().batched(module, shape, batch)

    def rows(self, module: Any, x: Tensor, pick: Pick) -> dict[str, list[Tensor]]:
        return {"weight": list(conv_rows(module, x, pick).chunk(module.groups, 1))}

    def params(self, module: Any, widths: Widths, factors: Factors | None = None) -> int:
        inputs, outputs = widths
        weight: int
        if factors is None:
            shape = shape_of(module, "weight") or (0, 0, *module.kernel_size)
            weight = inputs // module.groups * prod(shape[2:]) * outputs
        else:
            weight = module.groups * factors["weight"].params
        return weight + (outputs if has_bias(module) else 0)

    def macs(self, module: Any, widths: Widths, factors: Factors, shapes: Sequence[Shape]) -> int:
        axes = len(module.kernel_size)
        each = sum(
            (shape[0] if len(shape) == axes + 2 else 1)
            * self.macs_of_one(module, factors["weight"], tuple(shape[-axes:]))
            for shape in shapes
        )
        return int(each * module.groups)

    def macs_of_one(self, module: Any, spec: FactorSpec, size: Shape) -> int:
        """Return the multiply-adds of one group of one example."""
        return conv_macs(spec, in_size=size, **fields_of(module, _SAME))

    def channel_axis(self, module: Any) -> int:
        return -1 - len(module.kernel_size)

    def empty_output(self, module: Any, x: Tensor) -> Tensor:
        axes = len(module.kernel_size)
        size = self.out_size(module, tuple(x.shape[-axes:]))
        return x.new_empty(*x.shape[: -axes - 1], module.out_channels, *size)

    def examples(self, module: Any, name: str) -> Examples:
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
        many = module.groups
        inputs, outputs = self.each(module, widths)
        kernel = tuple(module.kernel_size)
        axes = len(kernel)
        batch = (shape[0] if len(shape) == axes + 2 else 1) * many
        before = shape[-axes:]
        after = self.out_size(module, before)
        positions, places = batch * prod(after), batch * prod(before)
        spec = factors["weight"]
        lay, rank = layout_of(spec, kernel), spec.rank
        (k1, k2), first = spec.out, self.first(module, spec)
        middle = batch * prod(
            n if owner == first else m for n, m, owner in zip(after, before, spec.axes, strict=True)
        )
        if prod(kernel) == 1 and not module.transposed:
            middle = positions
        rows2, columns2 = (k2, rank * lay.c2) if first == 1 else (rank * k2, lay.c2)
        # A convolution works at each position that comes out, a transposed one at each put in.
        early, late = (places, middle) if module.transposed else (middle, positions)
        at1, at2 = (early, late * k1) if first == 1 else (late, early * lay.c1)
        one = at1 * k1 * lay.c1 * lay.s1 * rank * (lay.c2 if first == 1 else k2)
        two = at2 * lanes(rows2) * columns2 * lay.s2
        thin = "thin" if rows2 < THIN else "wide"
        passive = lay.s1 > 1
        between = middle * (k1 * rank * lay.c2 if first == 1 else lay.c1 * rank * k2)
        dense: Counts = {
            "calls": 1,
            "macs": (places if module.transposed else positions)
            * lanes(outputs)
            * inputs
            * prod(kernel),
            "weights": many * inputs * outputs * prod(kernel),
            "moved": places * inputs + positions * outputs,
        }
        twin: Counts = {
            "calls": 1,
            "product": (0 if passive else one) + (two if prod(kernel) == 1 else 0),
            "passive": one if passive else 0,
            thin: two if prod(kernel) > 1 else 0,
            "moved": places * inputs + 2 * between + 2 * positions * outputs,
            "turned": (places * inputs + between) if passive else 0,
            "weights": many * spec.params,
        }
        if many > 1:
            twin = {name: GROUPED * n for name, n in twin.items()}
        return dense, twin


class Conv1dKind(ConvKind):
    name = "Conv1d"
    twin = BPConv1d


class Conv2dKind(ConvKind):
    name = "Conv2d"
    twin = BPConv2d


class Conv3dKind(ConvKind):
    name = "Conv3d"
    twin = BPConv3d
