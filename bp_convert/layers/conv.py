"""Convolutions whose weight is a sum of Kronecker products over channels and kernel axes."""

from __future__ import annotations

from math import inf, prod
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bp_convert.fields.conv_checks import check_factors, check_fields
from bp_convert.kron.built_product import pays_to_build
from bp_convert.kron.conv_layout import (
    Layout,
    factor_costs,
    fast_conv_factors,
    layout_cost,
)
from bp_convert.kron.nearest import nearest_kronecker_sum, reconstruct
from bp_convert.kron.pairs import check_positive
from bp_convert.layers.conv_factors import ConvOnFactors
from bp_convert.torch_private import parameters_of
from bp_convert.values.factors import FactorSpec

# Multiply-adds saved in a call, for which an expanded layer runs on its factors; theirs count for
# more, as they are less efficient.
MANY, SLACK = 5_000_000, 1.5
Size = int | tuple[int, ...]


class _BPConv(ConvOnFactors):
    """What the three convolutions share; ``AXES`` is the number of spatial axes.

    Input channel c = (c1, c2) and output channel k = (k1, k2), row-wise. Factor 1 mixes c1, factor
    2 mixes c2, and each axis of the kernel belongs to one of them, so that

        weight[(i1, i2), (j1, j2), p] = sum_r w1[r][i1, (j1, p1)] * w2[r][(j2, p2), i2]

    with p1, p2 the kernel positions along each factor's own axes. The layer runs as a product
    over channels and a thin convolution (or two of those) on views of its input. With groups,
    each group has factors of its own, all of the same pairs and number of terms.
    """

    FIELDS: ClassVar[tuple[str, ...]] = (
        *("in_channels", "out_channels", "kernel_size", "stride", "padding", "dilation"),
        *("groups", "bias", "padding_mode"),
    )
    EXPANDS = True
    AXES: ClassVar[int]
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
        self._take(in_channels, out_channels, kernel_size, stride, padding, dilation, groups)
        self.padding_mode = padding_mode
        self._settle(factors, rank, bias=bias, device=device, dtype=dtype)

    def _take(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Size,
        stride: Size,
        padding: str | Size,
        dilation: Size,
        groups: int,
    ) -> None:
        """Keep the fields, one number for each axis."""
        self.in_channels = in_channels
        self.out_channels = out_channels
        self.kernel_size: tuple[int, ...] = self._per_axis(kernel_size)
        self.stride: tuple[int, ...] = self._per_axis(stride)
        self.padding: str | tuple[int, ...] = (
            padding if isinstance(padding, str) else self._per_axis(padding)
        )
        self.dilation: tuple[int, ...] = self._per_axis(dilation)
        self.groups = groups

    def _settle(
        self,
        factors: FactorSpec | None,
        rank: int,
        *,
        bias: bool,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        """Check the fields, and make what they ask for."""
        check_fields(self)
        if factors is None:
            check_positive(rank, "rank")
            inputs, outputs = self.in_channels // self.groups, self.out_channels // self.groups
            factors = fast_conv_factors(inputs, outputs, self.kernel_size, rank)
        factors = check_factors(self, factors)
        self.hold_(factors, bias=bias, device=device, dtype=dtype, groups=self.groups)
        self.lay_out_()

    def forward(self, input: Tensor) -> Tensor:
        """Map (N, C, *size) or (C, *size) to (N, K, *out) or (K, *out)."""
        if (
            self.way == "expanded"
            and (built := self.built_for(input)) is not None
            and input.numel() < built[0]
        ):
            return self._expanded(input, *built[1:])
        single = input.dim() == self.AXES + 1
        x = self._padded(input.unsqueeze(0) if single else input, input)
        if self.way == "expanded" and self._builds(x):
            y = type(self).CONV(x, self.dense_weight(), self.bias, *self._dense_steps())
            return y.squeeze(0) if single else y
        if self._point:
            for axis, step in enumerate(self.stride, 2):
                x = x if step == 1 else _every(x, axis, step)
        return self._finished(self._run(x, self._steps), single)

    def _padded(self, x: Tensor, input: Tensor) -> Tensor:
        """Check an input of any number of axes, and put on first what no factor pads itself."""
        self._check_input(x, input)
        if not self._front:
            return x
        mode = "constant" if self.padding_mode == "zeros" else self.padding_mode
        return F.pad(x, self._front, mode=mode)

    def _expanded(self, input: Tensor, weight: Tensor, held: Any, more: Any) -> Tensor:
        """Run torch's function on the dense weight."""
        bias = held("bias", self)
        bias = self.bias if bias is self else bias  # one that is computed is not held
        if not self._front:
            return type(self).CONV(input, weight, bias, *more)  # which checks what it is given
        single = input.dim() == self.AXES + 1
        y = type(self).CONV(
            self._padded(input.unsqueeze(0) if single else input, input), weight, bias, *more
        )
        return y[0] if single else y

    def _builds(self, x: Tensor) -> bool:
        """Whether a call for backward builds the weight, as that takes less."""
        if not self.trains_on_plain(x, self.w1, self.w2, self.bias):
            return False
        macs = sum(factor_costs(self.factors, self.kernel_size, self._first))
        places = x.numel() // self.in_channels // prod(self.stride)
        return pays_to_build(macs, self.factors, places)

    def _finished(self, y: Tensor, single: bool) -> Tensor:
        if self.bias is not None:
            bias = self.bias.view(-1, *[1] * self.AXES)
            # Nothing needs the product itself again, so the sum takes its place.
            y = y.add_(bias if bias.dtype == y.dtype else bias.to(y.dtype))
        return y.squeeze(0) if single else y

    # Dense and back

    def expand(self) -> Any:
        """Build the weight.

        Returns:
            From how many numbers on a call goes on the factors all the same; the weight; what gets
            the bias of where parameters are held; and what torch's function takes behind it.
        """
        weight = super().expand()
        held = parameters_of(self).get
        return None if weight is None else (self._most(), weight, held, self._dense_steps())

    def _dense_steps(self) -> tuple[Any, ...]:
        return self.stride, self._padding()[1], self.dilation, self.groups

    def _most(self) -> float:
        if self.groups > 1:
            return inf
        dense = prod((*self.factors.out, *self.factors.inp))
        saved = dense - SLACK * layout_cost(self.factors, self.kernel_size, self.stride)
        positions = self.in_channels * prod(self.stride)  # numbers read for one that is put out
        return positions * MANY / saved if saved > 0 else inf

    @torch.no_grad()
    def fit_(self, weight: Tensor) -> float:
        """Set the factors to the nearest Kronecker sum of ``weight`` (K, C/G, *kernel), group by
        group; return the relative Frobenius error."""
        lay, spec = self._layout, self.factors
        parts = weight.reshape(-1, lay.c1, lay.c2, *self.kernel_size)
        matrix = parts.permute(self._axes()).reshape(weight.shape[0], -1)
        if self.groups == 1:
            return super().fit_(matrix)
        gap = total = 0.0
        for one, w1, w2 in zip(matrix.chunk(self.groups), self.w1, self.w2, strict=True):
            fit = nearest_kronecker_sum(one, spec.out, spec.inp, spec.rank)
            w1.copy_(fit.w1)
            w2.copy_(fit.w2)
            size = float(one.double().square().sum())
            gap, total = gap + fit.error**2 * size, total + size
        return (gap / total) ** 0.5 if total else 0.0

    @torch.no_grad()
    def fit_repeated_(self, weight: Tensor, rows: Tensor, columns: Tensor) -> float:
        """Do as the base class, with the columns in the order of the factors."""
        lay = self._layout
        parts = columns.reshape(1, lay.c1, lay.c2, *self.kernel_size)
        return super().fit_repeated_(weight, rows, parts.permute(self._axes()).flatten())

    def dense_weight(self) -> Tensor:
        """Build the weight (K, C/G, *kernel); differentiable."""
        lay, order = self._layout, self._axes()
        if self.groups == 1:
            matrix = super().dense_weight()
        else:
            pairs = zip(self.w1, self.w2, strict=True)
            matrix = torch.cat([reconstruct(w1, w2) for w1, w2 in pairs])
        sizes = (self.out_channels, lay.c1, lay.c2, *self.kernel_size)
        parts = matrix.view([sizes[axis] for axis in order])
        back = [order.index(axis) for axis in range(len(order))]
        return parts.permute(back).reshape(self.out_channels, -1, *self.kernel_size)

    def _axes(self) -> list[int]:
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
        if self.groups != 1:
            parts.append(f"groups={self.groups}")
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
        w1 (R, k1, d1), w2 (R, d2, k2), bias (K); with groups, factors (G, R, ...) of pairs of
        K/G and C/G.

    Raises:
        FactorError: groups that do not divide the channels, or pairs that do not fit.
    """

    AXES = 2
    DENSE = nn.Conv2d
    CONV = staticmethod(F.conv2d)


class BPConv3d(_BPConv):
    """An ``nn.Conv3d`` whose weight is a sum of Kronecker products; see ``BPConv2d``."""

    AXES = 3
    DENSE = nn.Conv3d
    CONV = staticmethod(F.conv3d)
