"""Convolutions whose weight is a sum of Kronecker products over channels and kernel axes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf, prod
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bp_convert.fields.conv_checks import check_factors, check_fields
from bp_convert.kron.built_product import pays_to_build
from bp_convert.kron.contract import shaped
from bp_convert.kron.conv_layout import (
    Layout,
    factor_costs,
    fast_conv_factors,
    first_factor,
    layout_cost,
    layout_of,
    split_padding,
)
from bp_convert.kron.nearest import nearest_kronecker_sum, reconstruct
from bp_convert.kron.pairs import check_positive
from bp_convert.layers.common import BilinearLayer
from bp_convert.torch_private import parameters_of
from bp_convert.values.factors import FactorSpec

# Multiply-adds saved in a call, for which an expanded layer runs on its factors; theirs count for
# more, as they are less efficient.
MANY, SLACK = 5_000_000, 1.5
Size = int | tuple[int, ...]
Steps = Sequence[Sequence[Any]]  # for each factor, what its convolution takes behind the bias


class _BPConv(BilinearLayer):
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
    CONV: ClassVar[Callable[..., Tensor]]
    transposed: ClassVar[bool] = False  # torch's fields, for code that reads them
    _low = False  # of layers pickled before there was a path for low rank

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
        self._lay_out()

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

    def _run(self, x: Tensor, steps: Steps) -> Tensor:
        """Apply both factors, each with stride, padding and what else its axes ask for."""
        if self._lean:
            return self._in_few_calls(x, steps)
        if self._low:
            return self._low_rank(x, steps)
        return self._one_then_two(x, steps) if self._first == 1 else self._two_then_one(x, steps)

    def _finished(self, y: Tensor, single: bool) -> Tensor:
        if self.bias is not None:
            bias = self.bias.view(-1, *[1] * self.AXES)
            # Nothing needs the product itself again, so the sum takes its place.
            y = y.add_(bias if bias.dtype == y.dtype else bias.to(y.dtype))
        return y.squeeze(0) if single else y

    # The two factors of G groups. `x` carries (N, G, c1, c2, *size), flattened over the channels.

    def _in_few_calls(self, x: Tensor, steps: Steps) -> Tensor:
        """Run one term, or a k1 of 1, with a first factor that only mixes channels: the common
        case. On small inputs each call to torch costs as much as its work, so this is
        ``_one_then_two`` in seven."""
        k1, k2, c1, c2 = self._sizes
        n, _, *size = x.shape
        left = self.w1.flatten(0, 1)  # (R*k1, c1)
        t = torch.bmm(left.expand(n, -1, -1), x.reshape(n, c1, c2 * prod(size)))
        t = t.view(n * k1, self.factors.rank * c2, *size)
        w2 = self.w2.reshape(-1, *self._own[1], k2).movedim(-1, 0)  # (k2, R*c2, *own)
        y = self._conv(t, w2, steps[1])  # (N*k1, k2, *out)
        return shaped(y, (n, k1 * k2, *y.shape[2:]))

    def _low_rank(self, x: Tensor, steps: Steps) -> Tensor:
        """Run low rank, a convolution to R channels and a product: ``_two_then_one`` in six."""
        right, left = self.w2.flatten(1), self.w1.flatten(1).t()  # (R, d2), (K, R)
        if self._point:
            size, t = x.shape[2:], torch.bmm(right.expand(len(x), -1, -1), x.flatten(2))
        else:
            t = self._conv(x, right.view(-1, self._sizes[3], *self._own[1]), steps[1])
            size, t = t.shape[2:], t.flatten(2)  # (N, R, out)
        y = torch.bmm(left.expand(len(t), -1, -1), t)
        return shaped(y, (*y.shape[:2], *size))

    def _one_then_two(self, x: Tensor, steps: Steps) -> Tensor:
        lay, (k1, k2), terms, many = self._layout, self.factors.out, self.factors.rank, self.groups
        w1 = self.w1.view(many, terms, k1, lay.c1, -1).transpose(1, 2)
        w1 = w1.reshape(many, k1 * terms, lay.c1, -1)  # (G, k1*R, c1, s1)
        w2 = self.w2.view(many, terms, -1, k2).permute(0, 3, 1, 2)
        w2 = w2.reshape(many, k2, terms * lay.c2, *self._own[1])  # (G, k2, R*c2, *own)
        t, size = self._mix_one(x, w1, lay.c2, steps)  # (N, G, k1*R, c2*size)
        y = self._mix_two(t, w2, k1, size, steps)  # (N, G, k1, k2, *out)
        return shaped(y, (x.shape[0], many * k1 * k2, *y.shape[2:]))

    def _two_then_one(self, x: Tensor, steps: Steps) -> Tensor:
        lay, (k1, k2), terms, many = self._layout, self.factors.out, self.factors.rank, self.groups
        w2 = self.w2.view(many, terms, -1, k2).transpose(2, 3)
        w2 = w2.reshape(many, terms * k2, lay.c2, *self._own[1])  # (G, R*k2, c2, *own)
        t = self._mix_two(x, w2, lay.c1, x.shape[2:], steps)  # (N, G, c1, R*k2, *size)
        w1 = self.w1.view(many, terms, k1, lay.c1, -1).permute(0, 2, 3, 1, 4)
        w1 = w1.reshape(many, k1, lay.c1 * terms, -1)  # (G, k1, c1*R, s1)
        y, size = self._mix_one(t, w1, k2, steps)  # (N, G, k1, k2*out)
        return shaped(y, (x.shape[0], many * k1 * k2, *size))

    def _mix_one(
        self, x: Tensor, w: Tensor, passive: int, steps: Steps
    ) -> tuple[Tensor, tuple[int, ...]]:
        """Apply factor 1 where each channel stands for ``passive`` ones that it leaves alone.

        Shape:
            x: any split of (N, G, C, P, *size) with the sizes last; w: (G, K, C, s1);
            result: (N, G, K, P*out), and out.
        """
        many, rows, columns, _ = w.shape
        size = x.shape[2:]
        if self._layout.s1 == 1:
            flat = x.reshape(-1, columns, passive * prod(size))  # (N*G, C, P*size)
            n = flat.shape[0] // many
            left = w[..., 0]
            left = left.expand(n, -1, -1) if many == 1 else left.repeat(n, 1, 1)  # (N*G, K, C)
            return torch.bmm(left, flat), size
        apart = x.reshape(-1, many * columns, passive, *size)  # (N, G*C, P, *size)
        moved = apart.transpose(1, 2).reshape(-1, many * columns, *size)  # (N*P, G*C, *size)
        w = w.reshape(many * rows, columns, *self._own[0])
        y = self._conv(moved, w, steps[0], many)  # (N*P, G*K, *out)
        back = y.reshape(-1, passive, many * rows, *y.shape[2:]).transpose(1, 2)
        return back, y.shape[2:]  # (N, G*K, P, *out)

    def _mix_two(
        self, x: Tensor, w: Tensor, passive: int, size: tuple[int, ...], steps: Steps
    ) -> Tensor:
        """Apply factor 2 to each of ``passive`` images of every group.

        Shape:
            x: any split of (N, G, P, C, *size); w: (G, K, C, *own);
            result: any split of (N, G, P, K, *out) with the sizes last.
        """
        many, rows, columns = w.shape[:3]
        if many > 1:  # each image is a group of its own, so that nothing has to be moved
            w = w.repeat_interleave(passive, 0)  # (G*P, K, C, *own)
            many *= passive
        if self._point:
            x = x.reshape(-1, columns, prod(size))
            n = x.shape[0] // many
            left = w.flatten(2)
            left = left.expand(n, -1, -1) if many == 1 else left.repeat(n, 1, 1)
            return torch.bmm(left, x).view(-1, rows, *size)
        x = x.reshape(-1, many * columns, *size)
        return self._conv(x, w.flatten(0, 1), steps[1], many)

    def _conv(self, x: Tensor, w: Tensor, steps: Sequence[Any], many: int = 1) -> Tensor:
        """Convolve along the axes that a factor owns; the others pass through.

        Shape:
            x: (N, G*C, *size); w: (G*K, C, *own); result: (N, G*K, *out).
        """
        return type(self).CONV(x, w, None, *steps, many)

    def _lay_out(self) -> None:
        """Work out once what every call needs: each factor's kernel, steps and padding."""
        kernel = self.kernel_size
        self._layout = layout_of(self.factors, kernel)
        self._first = self._order()
        self._point = self._is_point()
        self._sizes = (*self.factors.out, self._layout.c1, self._layout.c2)
        (k1, k2, c1, _), mixes_only = self._sizes, self.groups == self._layout.s1 == 1
        alone = self.factors.rank == 1 or k1 == 1
        self._lean = mixes_only and alone and self._first == 1 and not self._point
        self._low = mixes_only and k2 == c1 == 1 and self._first == 2
        front, left = self._padding()
        sides = [side for pair in reversed(front) for side in pair]  # F.pad: last axis first
        self._front = sides if any(sides) else []
        self._own = tuple(_where(kernel, mine, 1) for mine in self._mine())
        self._steps = self._steps_of(left)

    def _mine(self) -> list[list[bool]]:
        """Return for each factor which axes it owns."""
        return [[owner == factor for owner in self.factors.axes] for factor in (1, 2)]

    def _steps_of(self, padding: Sequence[int]) -> Steps:
        return [
            (_where(self.stride, own, 1), _where(padding, own, 0), _where(self.dilation, own, 1))
            for own in self._mine()
        ]

    def _order(self) -> Literal[1, 2]:
        return first_factor(self.factors, self.kernel_size, self.stride)

    def _is_point(self) -> bool:
        """Whether the kernel is one place, so that all is products over channels."""
        return prod(self.kernel_size) == 1

    def _padding(self) -> tuple[list[tuple[int, int]], tuple[int, ...]]:
        """Return what is put on first, and what each factor puts on its own axes."""
        return split_padding(self.kernel_size, self.padding, self.dilation, self.padding_mode)

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
