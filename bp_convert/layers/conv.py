"""Convolutions whose weight is a sum of Kronecker products over channels and kernel axes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bp_convert.kron.contract import shaped
from bp_convert.kron.conv_layout import (
    Layout,
    fast_conv_factors,
    first_factor,
    layout_of,
    split_padding,
)
from bp_convert.kron.pairs import check_positive
from bp_convert.layers.common import BilinearLayer
from bp_convert.layers.conv_checks import check_factors, check_fields
from bp_convert.values.factors import FactorSpec

Size = int | tuple[int, ...]


class _BPConv(BilinearLayer):
    """What the three convolutions share; ``AXES`` is the number of spatial axes.

    Input channel c = (c1, c2) and output channel k = (k1, k2), row-wise. Factor 1 mixes c1, factor
    2 mixes c2, and each axis of the kernel belongs to one of them, so that

        weight[(i1, i2), (j1, j2), p] = sum_r w1[r][i1, (j1, p1)] * w2[r][(j2, p2), i2]

    with p1, p2 the kernel positions along each factor's own axes. The layer runs as a product
    over channels and a thin convolution (or two of those) on views of its input.
    """

    FIELDS: ClassVar = (
        *("in_channels", "out_channels", "kernel_size", "stride", "padding", "dilation"),
        *("groups", "bias", "padding_mode"),
    )
    AXES: ClassVar[int]
    CONV: ClassVar[Callable[..., Tensor]]
    transposed: ClassVar[bool] = False  # torch's fields, for code that reads them

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Size,
        stride: Size = 1,
        padding: str | Size = 0,
        dilation: Size = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: str = "zeros",
        *,
        factors: FactorSpec | None = None,
        rank: int = 1,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.in_channels = in_channels
        self.out_channels = out_channels
        self.kernel_size: tuple[int, ...] = self._per_axis(kernel_size)
        self.stride: tuple[int, ...] = self._per_axis(stride)
        self.padding: str | tuple[int, ...] = (
            padding if isinstance(padding, str) else self._per_axis(padding)
        )
        self.dilation: tuple[int, ...] = self._per_axis(dilation)
        self.groups = groups
        self.padding_mode = padding_mode
        check_fields(self)
        if factors is None:
            check_positive(rank, "rank")
            factors = fast_conv_factors(in_channels, out_channels, self.kernel_size, rank)
        self.hold_(check_factors(self, factors), bias=bias, device=device, dtype=dtype)
        self._lay_out()

    def forward(self, input: Tensor) -> Tensor:
        """Map (N, C, *size) or (C, *size) to (N, K, *out) or (K, *out)."""
        single = input.dim() == self.AXES + 1
        x = input.unsqueeze(0) if single else input
        self._check_input(x, input)
        if self._front:
            mode = "constant" if self.padding_mode == "zeros" else self.padding_mode
            x = F.pad(x, self._front, mode=mode)
        if self._point:
            for axis, step in enumerate(self.stride, 2):
                x = x if step == 1 else _every(x, axis, step)
        if self._lean:
            y = self._in_few_calls(x)
        else:
            y = self._one_then_two(x) if self._first == 1 else self._two_then_one(x)
        if self.bias is not None:
            bias = self.bias.view(-1, *[1] * self.AXES)
            # Nothing needs the product itself again, so the sum takes its place.
            y = y.add_(bias if bias.dtype == y.dtype else bias.to(y.dtype))
        return y.squeeze(0) if single else y

    # The two factors. `x` carries axes (N, c1, c2, *size) flattened over the channels.

    def _in_few_calls(self, x: Tensor) -> Tensor:
        """Run one term whose first factor only mixes channels: the common case. On small inputs
        each call to torch costs as much as its work, so this is ``_one_then_two`` in seven."""
        k1, k2, c1, c2 = self._sizes
        n, _, *size = x.shape
        t = torch.bmm(self.w1.expand(n, k1, c1), x.reshape(n, c1, c2 * prod(size)))
        t = t.view(n * k1, c2, *size)  # (N*k1, c2, *size)
        w2 = self.w2.reshape(c2, *self._own[1], k2).movedim(-1, 0)  # (k2, c2, *own)
        y = type(self).CONV(t, w2, None, *self._steps[1])  # (N*k1, k2, *out)
        return shaped(y, (n, k1 * k2, *y.shape[2:]))

    def _one_then_two(self, x: Tensor) -> Tensor:
        lay, (k1, k2), terms = self._layout, self.factors.out, self.factors.rank
        w1 = self.w1.transpose(0, 1).reshape(k1 * terms, lay.c1, -1)  # (k1*R, c1, s1)
        w2 = self.w2.permute(2, 0, 1).reshape(k2, terms * lay.c2, *self._own[1])
        t, size = self._mix_one(x, w1, lay.c2)  # (N, k1*R, c2*size)
        t = t.reshape(-1, terms * lay.c2, *size)  # (N*k1, R*c2, *size)
        y = self._mix_two(t, w2)  # (N*k1, k2, *out)
        return shaped(y, (x.shape[0], k1 * k2, *y.shape[2:]))

    def _two_then_one(self, x: Tensor) -> Tensor:
        lay, (k1, k2), terms = self._layout, self.factors.out, self.factors.rank
        w2 = self.w2.transpose(1, 2).reshape(terms * k2, lay.c2, *self._own[1])
        t = self._mix_two(x.reshape(-1, lay.c2, *x.shape[2:]), w2)  # (N*c1, R*k2, *size)
        w1 = self.w1.view(terms, k1, lay.c1, -1).permute(1, 2, 0, 3)  # (k1, c1, R, s1)
        w1 = w1.reshape(k1, lay.c1 * terms, -1)  # (k1, c1*R, s1)
        y, size = self._mix_one(t, w1, k2)  # (N, k1, k2*out)
        return shaped(y, (x.shape[0], k1 * k2, *size))

    def _mix_one(self, x: Tensor, w: Tensor, passive: int) -> tuple[Tensor, tuple[int, ...]]:
        """Apply factor 1 where each channel stands for ``passive`` ones that it leaves alone.

        Shape:
            x: any split of (N, C, P, *size); w: (K, C, s1); result: (N, K, P*out), and out.
        """
        rows, columns, _ = w.shape
        if self._layout.s1 == 1:
            flat = x.reshape(-1, columns, passive * prod(x.shape[2:]))  # (N, C, P*size)
            return torch.bmm(w[:, :, 0].expand(flat.shape[0], -1, -1), flat), x.shape[2:]
        apart = x.reshape(-1, columns, passive, *x.shape[2:])  # (N, C, P, *size)
        moved = apart.transpose(1, 2).reshape(-1, columns, *x.shape[2:])  # (N*P, C, *size)
        y = self._conv(moved, w.reshape(rows, columns, *self._own[0]), 1)  # (N*P, K, *out)
        back = y.view(-1, passive, rows, *y.shape[2:]).transpose(1, 2)  # (N, K, P, *out)
        return back, y.shape[2:]

    def _mix_two(self, x: Tensor, w: Tensor) -> Tensor:
        """Apply factor 2: (N, C, *size) and (K, C, *own) give (N, K, *out)."""
        if self._point:
            flat = w.flatten(1).expand(x.shape[0], -1, -1)  # (N, K, C)
            return torch.bmm(flat, x.flatten(2)).view(-1, w.shape[0], *x.shape[2:])
        return self._conv(x, w, 2)

    def _conv(self, x: Tensor, w: Tensor, factor: int) -> Tensor:
        """Convolve along the axes that ``factor`` owns; the others pass through."""
        conv = type(self).CONV
        return conv(x, w, None, *self._steps[factor - 1])

    def _lay_out(self) -> None:
        """Work out once what every call needs: each factor's kernel, steps and padding."""
        kernel, axes = self.kernel_size, self.factors.axes
        self._layout = layout_of(self.factors, kernel)
        self._first = first_factor(self.factors, kernel, self.stride)
        self._point = prod(kernel) == 1
        self._sizes = (*self.factors.out, self._layout.c1, self._layout.c2)
        mixes_only = self._layout.s1 == 1 and self._first == 1 and not self._point
        self._lean = mixes_only and self.factors.rank == 1
        front, left = split_padding(kernel, self.padding, self.dilation, self.padding_mode)
        sides = [side for pair in reversed(front) for side in pair]  # F.pad: last axis first
        self._front = sides if any(sides) else []
        own = [[owner == factor for owner in axes] for factor in (1, 2)]
        self._own = tuple(_where(kernel, mine, 1) for mine in own)
        self._steps = tuple(
            (_where(self.stride, mine, 1), _where(left, mine, 0), _where(self.dilation, mine, 1))
            for mine in own
        )

    # Dense and back

    @torch.no_grad()
    def fit_(self, weight: Tensor) -> float:
        """Set the factors to the nearest Kronecker sum of ``weight`` (K, C, *kernel); return the
        relative Frobenius error."""
        lay = self._layout
        parts = weight.reshape(-1, lay.c1, lay.c2, *self.kernel_size)
        return super().fit_(parts.permute(self._order()).reshape(weight.shape[0], -1))

    def dense_weight(self) -> Tensor:
        """Build the weight (K, C, *kernel); differentiable."""
        lay, order = self._layout, self._order()
        sizes = (self.out_channels, lay.c1, lay.c2, *self.kernel_size)
        parts = super().dense_weight().view([sizes[axis] for axis in order])
        back = [order.index(axis) for axis in range(len(order))]
        return parts.permute(back).reshape(self.out_channels, self.in_channels, *self.kernel_size)

    def _order(self) -> list[int]:
        """Return the axes of (K, c1, c2, *kernel) as K, c1, s1, c2, s2."""
        first = [3 + i for i, owner in enumerate(self.factors.axes) if owner == 1]
        second = [3 + i for i, owner in enumerate(self.factors.axes) if owner == 2]
        return [0, 1, *first, 2, *second]

    def extra_repr(self) -> str:
        """Tell torch's own fields, the pairs and the number of terms."""
        lay: Layout = self._layout
        (k1, k2), terms = self.factors.out, self.factors.rank
        parts = [
            f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}",
            f"stride={self.stride}",
        ]
        if isinstance(self.padding, str) or any(self.padding):
            parts.append(f"padding={self.padding!r}")
        if any(step != 1 for step in self.dilation):
            parts.append(f"dilation={self.dilation}")
        if self.bias is None:
            parts.append("bias=False")
        if self.padding_mode != "zeros":
            parts.append(f"padding_mode={self.padding_mode!r}")
        parts.append(f"out={k1}x{k2}, in={lay.c1}*{lay.s1}x{lay.c2}*{lay.s2}, rank={terms}")
        return ", ".join(parts)

    # Checks

    def _per_axis(self, value: Size) -> tuple[int, ...]:
        return (value,) * self.AXES if isinstance(value, int) else tuple(value)

    def _check_input(self, x: Tensor, input: Tensor) -> None:
        if x.dim() != self.AXES + 2 or x.shape[1] != self.in_channels:
            raise RuntimeError(
                f"{type(self).__name__} expects {self.AXES + 1} or {self.AXES + 2} axes with "
                f"{self.in_channels} channels, got {tuple(input.shape)}"
            )


def _every(x: Tensor, axis: int, step: int) -> Tensor:
    """Take every ``step``-th entry along an axis, from the first."""
    return x[(slice(None),) * axis + (slice(None, None, step),)]


def _where(values: Sequence[int], own: Sequence[bool], other: int) -> tuple[int, ...]:
    return tuple(value if mine else other for value, mine in zip(values, own, strict=True))


class BPConv1d(_BPConv):
    """An ``nn.Conv1d`` whose weight is a sum of Kronecker products; see ``BPConv2d``."""

    AXES = 1
    DENSE = nn.Conv1d
    CONV = staticmethod(F.conv1d)


class BPConv2d(_BPConv):
    """An ``nn.Conv2d`` whose weight is a sum of Kronecker products (paper, section III-D).

    Args: as ``nn.Conv2d``, and
        factors: pairs, the owner of each kernel axis, and the number of terms; by default the
            cheapest layout within 10 % of the nearest-square pair's parameters.
        rank: number of terms R where ``factors`` is not given; cut to full rank.

    Shape:
        input (N, C, H, W) or (C, H, W), output (N, K, H', W') or (K, H', W');
        w1 (R, k1, d1), w2 (R, d2, k2), bias (K).

    Raises:
        FactorError: groups other than 1, or pairs that do not fit.
    """

    AXES = 2
    DENSE = nn.Conv2d
    CONV = staticmethod(F.conv2d)


class BPConv3d(_BPConv):
    """An ``nn.Conv3d`` whose weight is a sum of Kronecker products; see ``BPConv2d``."""

    AXES = 3
    DENSE = nn.Conv3d
    CONV = staticmethod(F.conv3d)
