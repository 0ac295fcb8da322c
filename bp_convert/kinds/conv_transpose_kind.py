"""nn.ConvTranspose1d, nn.ConvTranspose2d and nn.ConvTranspose3d: a convolution's weight turned."""

from __future__ import annotations

from math import prod
from typing import Any

from torch import Tensor

from bp_convert.kinds.choices import Widths, with_rank
from bp_convert.kinds.conv_kind import Conv1dKind, Conv2dKind, Conv3dKind, ConvKind
from bp_convert.kinds.kind import Examples
from bp_convert.kinds.shapes import Shape, shape_of
from bp_convert.kron.transposed_layout import (
    first_transposed,
    transposed_cost,
    transposed_macs,
    transposed_sizes,
)
from bp_convert.layers.conv_transpose import (
    BPConvTranspose1d,
    BPConvTranspose2d,
    BPConvTranspose3d,
    turned,
)
from bp_convert.values.factors import FactorSpec
from bp_convert.values.settings import Rank
from bp_convert.values.tensors import TensorSpec

GENERATED = (1, 4, 8, 16)  # sizes that a generator may start from


class ConvTransposeKind(ConvKind):
    def widths(self, module: Any) -> Widths:
        shape = shape_of(module, "weight")
        if shape is None or len(shape) != 2 + len(module.kernel_size):
            return module.in_channels, module.out_channels
        return shape[0], shape[1] * module.groups

    def plain(self, module: Any, weight: Tensor) -> Tensor:
        return turned(weight, module.groups)

    def out_size(self, module: Any, size: Shape) -> Shape:
        return transposed_sizes(
            *(size, module.kernel_size, module.stride, module.padding, module.dilation),
            module.output_padding,
        )

    def first(self, module: Any, spec: FactorSpec) -> int:
        return first_transposed(spec, module.kernel_size, module.stride)

    def cheapest(self, module: Any, inputs: int, outputs: int, rank: Rank) -> FactorSpec:
        """Return low rank before the image grows, or while it does."""
        kernel, stride = tuple(module.kernel_size), tuple(module.stride)
        before = FactorSpec(out=(1, outputs), inp=(inputs, prod(kernel)), axes=(2,) * len(kernel))
        whole = inputs * outputs * prod(kernel)
        both = [before, super().cheapest(module, inputs, outputs, rank)]
        return min(both, key=lambda s: transposed_cost(with_rank(s, rank, whole), kernel, stride))

    def macs_of_one(self, module: Any, spec: FactorSpec, size: Shape) -> int:
        out = self.out_size(module, size)
        return transposed_macs(spec, size, out, module.kernel_size, module.stride)

    def examples(self, module: Any, name: str) -> Examples:
        """Yield one place of its channels, of which a generator makes an image, and a few more."""
        axes, channels = len(module.kernel_size), module.in_channels
        for size in GENERATED:
            words = f"{channels} channels from its first layer {name}, size {size} because it runs"
            yield TensorSpec(shape=(channels, *[size] * axes)), words


class ConvTranspose1dKind(ConvTransposeKind):
    name = "ConvTranspose1d"
    twin = BPConvTranspose1d
    priced_as = Conv1dKind.name


class ConvTranspose2dKind(ConvTransposeKind):
    name = "ConvTranspose2d"
    twin = BPConvTranspose2d
    priced_as = Conv2dKind.name


class ConvTranspose3dKind(ConvTransposeKind):
    name = "ConvTranspose3d"
    twin = BPConvTranspose3d
    priced_as = Conv3dKind.name
