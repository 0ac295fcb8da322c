"""Transposed convolutions whose weight is a sum of Kronecker products."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bp_convert.fields.conv_checks import output_padding_for
from bp_convert.kron.transposed_layout import first_transposed
from bp_convert.layers.common import BilinearLayer
from bp_convert.layers.conv import Size, _BPConv
from bp_convert.layers.conv_factors import Steps, where_owned
from bp_convert.values.factors import FactorSpec


class _BPConvTranspose(_BPConv):
    """What the three transposed convolutions share.

    The weight is that of the convolution which it is the transpose of, turned: with i, j, p as
    there, ``weight[(j1, j2), (i1, i2), p] = sum_r w1[r][i1, (j1, p1)] * w2[r][(j2, p2), i2]``.
    The layer runs as a product over channels and a thin transposed convolution, or two of those.
    """

    FIELDS: ClassVar = (
        *("in_channels", "out_channels", "kernel_size", "stride", "padding", "output_padding"),
        *("groups", "bias", "dilation", "padding_mode"),
    )
    transposed: ClassVar[bool] = True
    padding: tuple[int, ...]  # never a word

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Size,
        stride: Size = 1,
        padding: Size = 0,
        output_padding: Size = 0,
        groups: int = 1,
        bias: bool = True,
        dilation: Size = 1,
        padding_mode: str = "zeros",
        *,
        factors: FactorSpec | None = None,
        rank: int = 1,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        nn.Module.__init__(self)
        self._take(in_channels, out_channels, kernel_size, stride, padding, dilation, groups)
        self.output_padding: tuple[int, ...] = self._per_axis(output_padding)
        self.padding_mode = padding_mode
        self._settle(factors, rank, bias=bias, device=device, dtype=dtype)

    def forward(self, input: Tensor, output_size: Sequence[int] | None = None) -> Tensor:
        """Map (N, C, *size) or (C, *size) to (N, K, *out) or (K, *out).

        Args:
            output_size: the spatial size of the output, with its other axes or without, where the
                stride leaves a choice; by default that of ``output_padding``.

        Raises:
            ValueError: a size that the stride cannot give.
        """
        single = input.dim() == self.AXES + 1
        x = input.unsqueeze(0) if single else input
        self._check_input(x, input)
        more = self.output_padding
        if output_size is not None:
            more = output_padding_for(self, x.shape[2:], output_size)
        if self.way == "expanded" and (weight := self.built_for(x)) is not None:
            sizes = (self.stride, self.padding, more, self.groups, self.dilation)
            y = type(self).CONV(x, weight, self.bias, *sizes)
            return y.squeeze(0) if single else y
        steps: Steps = self._steps if output_size is None else self._steps_of(more)
        return self._finished(self._run(x, steps), single)

    def _conv(self, x: Tensor, w: Tensor, steps: Sequence[Any], many: int = 1) -> Tensor:
        apart = w.view(many, -1, *w.shape[1:]).transpose(1, 2)  # (G, C, K, *own)
        stride, padding, more, dilation = steps
        turned = apart.flatten(0, 1).contiguous()  # its strides would pass for another format
        return type(self).CONV(x, turned, None, stride, padding, more, many, dilation)

    def _order(self) -> Literal[1, 2]:
        return first_transposed(self.factors, self.kernel_size, self.stride)

    def _is_point(self) -> bool:
        plain = {"stride": 1, "padding": 0, "output_padding": 0, "kernel_size": 1}
        return all(set(getattr(self, name)) == {value} for name, value in plain.items())

    def _padding(self) -> tuple[list[tuple[int, int]], tuple[int, ...]]:
        return [(0, 0)] * self.AXES, self.output_padding

    def _steps_of(self, padding: Sequence[int]) -> Steps:
        """Return stride, padding, output padding and dilation of each factor.

        Args:
            padding: of the output.
        """
        return [
            (
                *(where_owned(self.stride, own, 1), where_owned(self.padding, own, 0)),
                *(where_owned(padding, own, 0), where_owned(self.dilation, own, 1)),
            )
            for own in self._mine()
        ]

    def expand(self) -> Any:
        """Build the weight."""
        return BilinearLayer.expand(self)

    @torch.no_grad()
    def fit_(self, weight: Tensor) -> float:
        """Set the factors to the nearest Kronecker sum of ``weight`` (C, K/G, *kernel), group by
        group; return the relative Frobenius error."""
        return super().fit_(turned(weight, self.groups))

    def dense_weight(self) -> Tensor:
        """Build the weight (C, K/G, *kernel); differentiable."""
        return turned(super().dense_weight(), self.groups)

    def extra_repr(self) -> str:
        """Tell torch's own fields, the pairs and the number of terms."""
        more = f", output_padding={self.output_padding}" if any(self.output_padding) else ""
        return super().extra_repr() + more


class BPConvTranspose1d(_BPConvTranspose):
    """An ``nn.ConvTranspose1d`` whose weight is a sum of Kronecker products; see
    ``BPConvTranspose2d``."""

    AXES = 1
    DENSE = nn.ConvTranspose1d
    CONV = staticmethod(F.conv_transpose1d)


class BPConvTranspose2d(_BPConvTranspose):
    """An ``nn.ConvTranspose2d`` whose weight is a sum of Kronecker products.

    Args: as ``nn.ConvTranspose2d``, and
        factors: pairs (of the outputs, and of inputs times kernel places), the owner of each
            kernel axis, and the number of terms; by default as ``BPConv2d``'s.
        rank: number of terms R where ``factors`` is not given; cut to full rank.

    Shape:
        input (N, C, H, W) or (C, H, W), output (N, K, H', W') or (K, H', W');
        w1 (R, k1, d1), w2 (R, d2, k2), bias (K); with groups, factors (G, R, ...).

    Raises:
        FactorError: a field that torch refuses, or pairs that do not fit.
    """

    AXES = 2
    DENSE = nn.ConvTranspose2d
    CONV = staticmethod(F.conv_transpose2d)


class BPConvTranspose3d(_BPConvTranspose):
    """An ``nn.ConvTranspose3d`` whose weight is a sum of Kronecker products; see
    ``BPConvTranspose2d``."""

    AXES = 3
    DENSE = nn.ConvTranspose3d
    CONV = staticmethod(F.conv_transpose3d)


def turned(weight: Tensor, groups: int) -> Tensor:
    """Turn a weight (C, K/G, *kernel) round, group by group, to (K, C/G, *kernel), and back."""
    apart = weight.reshape(groups, -1, *weight.shape[1:])  # (G, C/G, K/G, *kernel)
    return apart.transpose(1, 2).flatten(0, 1)
