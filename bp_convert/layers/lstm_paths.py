"""The two ways to run a bilinear LSTM: step by step on the factors, or torch's fused LSTM on
weights built from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bp_convert.kron.contract import bilinear, w2_first
from bp_convert.layers.lstm_checks import GATES


class GateLayout:
    """How rows of inputs and results lie while a projection is called many times.

    Rows stand in the middle of a matrix's axes, "laid" as (a, N, b).

    Attributes:
        inp: (p, q), the axes of a laid input (p, N, q).
        out: (a, b), the axes of a laid result (a, N, b).
        turned: the axes are the transposes of the row-wise order.
    """

    inp: tuple[int, int]
    out: tuple[int, int]
    turned = False

    def lay(self, x: Tensor) -> Tensor:
        """Lay a row-wise input (N, D) as (p, N, q)."""
        p, q = self.inp
        if self.turned:
            return x.reshape(x.shape[0], q, p).permute(2, 0, 1)
        return x.reshape(x.shape[0], p, q).transpose(0, 1)

    def lay_result(self, y: Tensor) -> Tensor:
        """Lay row-wise results (..., N, K) as (..., a, N, b)."""
        (a, b), lead = self.out, y.shape[:-1]
        if self.turned:
            return y.reshape(*lead, b, a).movedim(-1, -3)
        return y.reshape(*lead, a, b).transpose(-2, -3)

    def rows(self, y: Tensor) -> Tensor:
        """Bring laid results (..., a, N, b) to row-wise order (..., N, K)."""
        y = y.movedim(-3, -1) if self.turned else y.transpose(-2, -3)
        return y.flatten(-2)


class JointProduct(GateLayout):
    """One bilinear projection to the four gates above each other.

    Shape:
        w1: (1, R, k1, d1); w2: (1, R, d2, k2), with k1*k2 = 4H.
    """

    def __init__(self, w1: Tensor, w2: Tensor) -> None:
        self.w1, self.w2 = w1[0], w2[0]
        self.inp = (1, w1.shape[3] * w2.shape[2])
        self.out = (1, w1.shape[2] * w2.shape[3] // GATES)

    def __call__(self, x: Tensor) -> Tensor:
        """Project a laid input (1, N, D) to the laid gates (4, 1, N, H)."""
        y = bilinear(x[0], self.w1, self.w2)  # (N, 4H)
        return y.view(len(y), GATES, -1).transpose(0, 1).unsqueeze(1)


class GateProduct(GateLayout):
    """The bilinear projections of the four gates, laid out once for many calls.

    The gates stand beside the terms, so that there are two products for all of them. The result
    of one call is laid as the next one's input wants it, wherever both pairs are alike, and with
    one term nothing is copied in between. With w2 first, inputs lie as (d2, N, d1) and results as
    (k2, N, k1), else as (d1, N, d2) and (k1, N, k2).

    Shape:
        w1: (4, R, k1, d1); w2: (4, R, d2, k2).
    """

    def __init__(self, w1: Tensor, w2: Tensor) -> None:
        _, self.terms, k1, d1 = w1.shape
        d2, k2 = w2.shape[2:]
        self.turned = w2_first(k1, k2, d1, d2)
        if self.turned:
            self.inp, self.out = (d2, d1), (k2, k1)
            self.first = w2.transpose(2, 3).reshape(-1, d2)  # (4*R*k2, d2)
            self.second = w1.transpose(2, 3).reshape(GATES, -1, k1)  # (4, R*d1, k1)
        else:
            self.inp, self.out = (d1, d2), (k1, k2)
            self.first = w1.reshape(-1, d1)  # (4*R*k1, d1)
            self.second = w2.reshape(GATES, -1, k2)  # (4, R*d2, k2)

    def __call__(self, x: Tensor) -> Tensor:
        """Project a laid input (p, N, q) to the laid gates (4, a, N, b)."""
        (p, q), (a, b), n = self.inp, self.out, x.shape[1]
        t = self.first @ x.reshape(p, n * q)  # (4*R*a, N*q)
        t = t.view(GATES, self.terms, a, n, q).permute(0, 2, 3, 1, 4)  # (4, a, N, R, q)
        y = torch.bmm(t.reshape(GATES, a * n, self.terms * q), self.second)  # (4, a*N, b)
        return y.view(GATES, a, n, b)


def product(w1: Tensor, w2: Tensor) -> GateProduct | JointProduct:
    """Return the projection to the gates: one matrix for all of them, or one for each."""
    return JointProduct(w1, w2) if len(w1) == 1 else GateProduct(w1, w2)


@dataclass(frozen=True)
class Direction:
    """The factors of one direction of one layer."""

    ih: tuple[Tensor, Tensor]
    hh: tuple[Tensor, Tensor]
    bias: Tensor | None


def loop(
    x: Tensor, h: Tensor, c: Tensor, one: Direction, *, sizes: Sequence[int], reverse: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Step through packed rows; the input products of all steps are one call.

    Args:
        sizes: rows of each step, falling; a full batch has the same number at each.
        reverse: step from the last to the first.

    Shape:
        x: (sum of sizes, I); h, c: (N, H); result: outputs (sum of sizes, H), last h and c.
    """
    inputs, states = product(*one.ih), product(*one.hh)
    whole = inputs(inputs.lay(x))  # (4, a, sum of sizes, b)
    if (inputs.turned, inputs.out) != (states.turned, states.out):
        whole = states.lay_result(inputs.rows(whole))
    if one.bias is not None:
        bias = one.bias.to(whole.dtype).view(GATES, 1, -1)  # (4, 1, H)
        whole = whole + states.lay_result(bias)
    steps = torch.split(whole, list(sizes), dim=2)
    # A result is the next input as it lies, unless the pairs of the two sides differ.
    alike = states.inp == states.out
    h, c = states.lay_result(h), states.lay_result(c)  # (a, N, b)
    outputs: list[Tensor] = []
    for at in reversed(range(len(sizes))) if reverse else range(len(sizes)):
        now = sizes[at]
        ends = now != h.shape[1]
        before, kept = (h[:, :now], c[:, :now]) if ends else (h, c)
        z = steps[at] + states(before if alike else states.lay(states.rows(before)))
        i, f, g, o = z.unbind(0)
        new_c = torch.addcmul(f.sigmoid() * kept, i.sigmoid(), g.tanh())  # (a, n, b)
        new_h = o.sigmoid() * new_c.tanh()  # (a, n, b)
        outputs.append(new_h)
        # Rows that have ended, or in reverse have not begun, keep their state.
        h = torch.cat([new_h, h[:, now:]], 1) if ends else new_h
        c = torch.cat([new_c, c[:, now:]], 1) if ends else new_c
    y = torch.cat(outputs[::-1] if reverse else outputs, dim=1)  # (a, sum of sizes, b)
    # Autocast steps on states of the input's type and returns its own, as torch's LSTM does.
    y, h, c = (states.rows(one).to(whole.dtype) for one in (y, h, c))
    return y, h, c


def built(w1: Tensor, w2: Tensor) -> Tensor:
    """Build the dense weight of the four gates, with one product; differentiable.

    Shape:
        w1: (G, R, k1, d1); w2: (G, R, d2, k2), G = 4 gates or 1 for all; result: (G*k1*k2, d1*d2).
    """
    many, terms, k1, d1 = w1.shape
    d2, k2 = w2.shape[2:]
    left = w1.reshape(many, terms, k1 * d1).transpose(1, 2)  # (4, k1*d1, R)
    right = w2.transpose(2, 3).reshape(many, terms, k2 * d2)  # (4, R, k2*d2)
    table = torch.bmm(left, right).view(many, k1, d1, k2, d2)
    return table.permute(0, 1, 3, 2, 4).reshape(many * k1 * k2, d1 * d2)


def one_chunk(weights: Sequence[Tensor], each: int) -> list[Tensor]:
    """Move weights into one block of memory, all matrices and then all biases, as cuDNN keeps
    them; it would copy them there at each call, and warn of it.

    Args:
        each: tensors of one direction of one layer, two matrices first.
    """
    order = sorted(range(len(weights)), key=lambda at: at % each > 1)
    flat = torch.cat([weights[at].flatten() for at in order])
    pieces = torch.split(flat, [weights[at].numel() for at in order])
    moved = {at: piece.view_as(weights[at]) for at, piece in zip(order, pieces, strict=True)}
    return [moved[at] for at in range(len(weights))]
