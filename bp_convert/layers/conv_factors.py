"""How a convolution runs on its two factors: products over channels and thin convolutions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from bp_convert.kron.contract import shaped
from bp_convert.kron.conv_layout import first_factor, layout_of, split_padding
from bp_convert.layers.common import BilinearLayer

Steps = Sequence[Sequence[Any]]  # for each factor, what its convolution takes behind the bias


class ConvOnFactors(BilinearLayer):
    """Applies both factors of G groups, in the order and in as few calls as they allow.

    In comments `x` carries (N, G, c1, c2, *size), flattened over the channels.
    """

    CONV: ClassVar[Callable[..., Tensor]]
    _low = False  # of layers pickled before there was a path for low rank

    kernel_size: tuple[int, ...]
    stride: tuple[int, ...]
    padding: str | tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    padding_mode: str

    def _run(self, x: Tensor, steps: Steps) -> Tensor:
        """Apply both factors, each with stride, padding and what else its axes ask for."""
        if self._lean:
            return self._in_few_calls(x, steps)
        if self._low:
            return self._low_rank(x, steps)
        return self._one_then_two(x, steps) if self._first == 1 else self._two_then_one(x, steps)

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

    def lay_out_(self) -> None:
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
        self._own = tuple(where_owned(kernel, mine, 1) for mine in self._mine())
        self._steps = self._steps_of(left)

    def _mine(self) -> list[list[bool]]:
        """Return for each factor which axes it owns."""
        return [[owner == factor for owner in self.factors.axes] for factor in (1, 2)]

    def _steps_of(self, padding: Sequence[int]) -> Steps:
        return [
            (
                where_owned(self.stride, own, 1),
                where_owned(padding, own, 0),
                where_owned(self.dilation, own, 1),
            )
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


def where_owned(values: Sequence[int], own: Sequence[bool], other: int) -> tuple[int, ...]:
    return tuple(value if mine else other for value, mine in zip(values, own, strict=True))
