"""The two ways to run a bilinear recurrent stack: step by step on the factors, or torch's own run
on weights built from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bp_convert.kron.contract import bilinear, w2_first
from bp_convert.kron.nearest import reconstruct
from bp_convert.recurrence.steps import Recurrence, State


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
    """One bilinear projection to the gates above each other.

    Shape:
        w1: (1, R, k1, d1); w2: (1, R, d2, k2), with k1*k2 = G*H.
    """

    def __init__(self, w1: Tensor, w2: Tensor, gates: int) -> None:
        self.w1, self.w2, self.gates = w1[0], w2[0], gates
        self.inp = (1, w1.shape[3] * w2.shape[2])
        self.out = (1, w1.shape[2] * w2.shape[3] // gates)

    def __call__(self, x: Tensor) -> Tensor:
        """Project a laid input (1, N, D) to the laid gates (G, 1, N, H)."""
        y = bilinear(x[0], self.w1, self.w2)  # (N, G*H)
        return y.view(y.shape[0], self.gates, self.out[1]).transpose(0, 1).unsqueeze(1)


class GateProduct(GateLayout):
    """The bilinear projections of the gates, laid out once for many calls.

    The gates stand beside the terms, so that there are two products for all of them. The result
    of one call is laid as the next one's input wants it, wherever both pairs are alike, and with
    one term nothing is copied in between. With w2 first, inputs lie as (d2, N, d1) and results as
    (k2, N, k1), else as (d1, N, d2) and (k1, N, k2).

    Shape:
        w1: (G, R, k1, d1); w2: (G, R, d2, k2).
    """

    def __init__(self, w1: Tensor, w2: Tensor) -> None:
        self.gates, self.terms, k1, d1 = w1.shape
        d2, k2 = w2.shape[2:]
        self.turned = w2_first(k1, k2, d1, d2)
        if self.turned:
            self.inp, self.out = (d2, d1), (k2, k1)
            self.first = w2.transpose(2, 3).reshape(-1, d2)  # (G*R*k2, d2)
            self.second = w1.transpose(2, 3).reshape(self.gates, -1, k1)  # (G, R*d1, k1)
        else:
            self.inp, self.out = (d1, d2), (k1, k2)
            self.first = w1.reshape(-1, d1)  # (G*R*k1, d1)
            self.second = w2.reshape(self.gates, -1, k2)  # (G, R*d2, k2)

    def __call__(self, x: Tensor) -> Tensor:
        """Project a laid input (p, N, q) to the laid gates (G, a, N, b)."""
        (p, q), (a, b), n, gates = self.inp, self.out, x.shape[1], self.gates
        t = self.first @ x.reshape(p, n * q)  # (G*R*a, N*q)
        t = t.view(gates, self.terms, a, n, q).permute(0, 2, 3, 1, 4)  # (G, a, N, R, q)
        y = torch.bmm(t.reshape(gates, a * n, self.terms * q), self.second)  # (G, a*N, b)
        return y.view(gates, a, n, b)


def product(w1: Tensor, w2: Tensor, gates: int) -> GateProduct | JointProduct:
    """Return the projection to the gates: one matrix for all of them, or one for each."""
    return JointProduct(w1, w2, gates) if len(w1) == 1 else GateProduct(w1, w2)


@dataclass(frozen=True)
class Direction:
    """The factors of one direction of one layer, and what it computes with their products."""

    recurrence: Recurrence
    ih: tuple[Tensor, Tensor]
    hh: tuple[Tensor, Tensor]
    bias: Tensor | None
    hr: tuple[Tensor, Tensor] | None = None

    def products(self) -> tuple[GateProduct | JointProduct, GateProduct | JointProduct]:
        """Return the projections of the input and of the state."""
        gates = self.recurrence.gates
        return product(*self.ih, gates), product(*self.hh, gates)

    def biases(self, states: GateLayout, dtype: torch.dtype) -> tuple[Tensor | None, Tensor | None]:
        """Return the bias of the input's products (G, a, 1, b) and the inner one (a, 1, b), laid
        as the state's products are."""
        if self.bias is None:
            return None, None
        first, inner = self.recurrence.split(self.bias.to(dtype))
        laid = states.lay_result(first.view(self.recurrence.gates, 1, -1))
        return laid, None if inner is None else states.lay_result(inner.view(1, -1))


def loop(
    x: Tensor, state: State, one: Direction, *, sizes: Sequence[int], reverse: bool
) -> tuple[Tensor, State]:
    """Step through packed rows; the input products of all steps are one call.

    Args:
        sizes: rows of each step, falling; a full batch has the same number at each.
        reverse: step from the last to the first.

    Shape:
        x: (sum of sizes, I); state: (N, H) each; result: outputs (sum of sizes, H), last state.
    """
    inputs, states = one.products()
    whole = inputs(inputs.lay(x))  # (G, a, sum of sizes, b)
    if (inputs.turned, inputs.out) != (states.turned, states.out):
        whole = states.lay_result(inputs.rows(whole))
    bias, inner = one.biases(states, whole.dtype)
    if bias is not None:
        whole = whole + bias
    steps = torch.split(whole, list(sizes), dim=2)
    # A result is the next input as it lies, unless it is projected or the pairs of the two sides
    # differ.
    alike = states.inp == states.out and one.hr is None
    first = state[0].unsqueeze(0) if one.hr is not None else states.lay_result(state[0])
    now = (first, *map(states.lay_result, state[1:]))  # (a, N, b) each
    outputs: list[Tensor] = []
    for at in reversed(range(len(sizes))) if reverse else range(len(sizes)):
        rows = sizes[at]
        ends = rows != first.shape[1]
        before = tuple(part[:, :rows] for part in now) if ends else now
        h = before[0]
        if one.hr is not None:
            h = states.lay(h[0])
        elif not alike:
            h = states.lay(states.rows(h))
        new = one.recurrence.step(steps[at], states(h), inner, before)  # (a, n, b) each
        if one.hr is not None:
            w1, w2 = one.hr
            new = (bilinear(states.rows(new[0]), w1[0], w2[0]).unsqueeze(0), *new[1:])
        outputs.append(new[0])
        # Rows that have ended, or in reverse have not begun, keep their state.
        if ends:
            new = tuple(torch.cat([n, o[:, rows:]], 1) for n, o in zip(new, now, strict=True))
        now = new
    y = torch.cat(outputs[::-1] if reverse else outputs, dim=1)  # (a, sum of sizes, b)
    # Autocast steps on states of the input's type and returns its own, as torch's LSTM does.
    flat = states.rows if one.hr is None else (lambda laid: laid[0])
    y, *last = (
        part.to(whole.dtype) for part in (flat(y), flat(now[0]), *map(states.rows, now[1:]))
    )
    return y, tuple(last)


def built(w1: Tensor, w2: Tensor) -> Tensor:
    """Build the dense weight of all gates, with one product; differentiable.

    Shape:
        w1: (G, R, k1, d1); w2: (G, R, d2, k2), G the gates or 1 for all; result: (G*k1*k2, d1*d2).
    """
    many, terms, k1, d1 = w1.shape
    d2, k2 = w2.shape[2:]
    if many == 1:  # a batch of one runs backward in half the speed of a plain product
        return reconstruct(w1[0], w2[0])
    left = w1.reshape(many, terms, k1 * d1).transpose(1, 2)  # (G, k1*d1, R)
    right = w2.transpose(2, 3).reshape(many, terms, k2 * d2)  # (G, R, k2*d2)
    table = torch.bmm(left, right).view(many, k1, d1, k2, d2)
    return table.permute(0, 1, 3, 2, 4).reshape(many * k1 * k2, d1 * d2)


def one_chunk(weights: Sequence[Tensor]) -> list[Tensor]:
    """Move weights into one block of memory, all matrices and then all biases, as cuDNN keeps
    them; it would copy them there at each call, and warn of it."""
    order = sorted(range(len(weights)), key=lambda at: weights[at].dim() < 2)
    flat = torch.cat([weights[at].flatten() for at in order])
    pieces = torch.split(flat, [weights[at].numel() for at in order])
    moved = {at: piece.view_as(weights[at]) for at, piece in zip(order, pieces, strict=True)}
    return [moved[at] for at in range(len(weights))]
