"""The two ways to run a bilinear LSTM, what each costs, and which is the faster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bp_convert.kron.contract import order_costs, w2_first
from bp_convert.values.factors import FactorSpec

GATES = 4  # in torch's order: input, forget, cell, output


@dataclass(frozen=True)
class Direction:
    """The factors of one direction of one layer."""

    ih: tuple[Tensor, Tensor]
    hh: tuple[Tensor, Tensor]
    bias: Tensor | None


def prefers_factored(hidden: int, steps: int, batch: int, load: float) -> bool:
    """Return whether stepping on the factors beats torch's fused LSTM on built weights.

    Measured with ``benchmarks/lstm.py``: the dense recurrence reads 4 H^2 weights at each step,
    the loop pays some thirty small operations instead; building the weights costs about as much
    as one dense step. Compared in microseconds of a two-core machine.

    Args:
        load: recurrent multiply-adds of the factors over the dense matrix's.
    """
    weights = 4 * hidden * hidden
    dense_step = 5 + weights * (1 + batch / 16) / 1.2e4
    factored_step = 70 + load * weights * batch / 1e4 + hidden * batch / 400
    return steps * factored_step < steps * dense_step + weights / 2e3


def gates(x: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    """Apply the four gates' bilinear projections to (N, D): (N, 4, K).

    The gates lie side by side with the terms, so that there are two products for all of them.

    Shape:
        w1: (4, R, k1, d1); w2: (4, R, d2, k2).
    """
    four, terms, k1, d1 = w1.shape
    d2, k2 = w2.shape[2:]
    if w2_first(k1, k2, d1, d2):
        right = w2.permute(2, 0, 1, 3).reshape(d2, four * terms * k2)  # (d2, 4*R*k2)
        t = x.reshape(-1, d2) @ right  # (N*d1, 4*R*k2)
        t = t.view(-1, d1, four, terms, k2).transpose(1, 2)  # (N, 4, d1, R, k2)
        left = w1.permute(0, 2, 3, 1).reshape(four, k1, d1 * terms)  # (4, k1, d1*R)
        y = left @ t.reshape(-1, four, d1 * terms, k2)  # (N, 4, k1, k2)
    else:
        left = w1.transpose(1, 2).reshape(four * k1 * terms, d1)  # (4*k1*R, d1)
        t = left @ x.reshape(-1, d1, d2)  # (N, 4*k1*R, d2)
        right = w2.reshape(four, terms * d2, k2)  # (4, R*d2, k2)
        y = t.view(-1, four, k1, terms * d2) @ right  # (N, 4, k1, k2)
    return y.flatten(2)


def loop(
    x: Tensor, h: Tensor, c: Tensor, one: Direction, *, reverse: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Step through (T, N, I); the input products of all steps are one call.

    Shape:
        h, c: (N, H); result: outputs (T, N, H), last h and c.
    """
    steps, batch = x.shape[:2]
    hidden = h.shape[-1]
    whole = gates(x.reshape(-1, x.shape[-1]), *one.ih).view(steps, batch, GATES, hidden)
    if one.bias is not None:
        whole = whole + one.bias.to(whole.dtype).view(GATES, hidden)
    outputs: list[Tensor] = []
    for step in reversed(range(steps)) if reverse else range(steps):
        z = whole[step] + gates(h, *one.hh)  # (N, 4, H)
        i, f, g, o = z.unbind(1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        h = torch.sigmoid(o) * torch.tanh(c)
        outputs.append(h)
    if not outputs:
        return x.new_zeros(0, batch, hidden), h, c
    return torch.stack(outputs[::-1] if reverse else outputs), h, c


def fused(
    x: Tensor,
    sizes: Tensor | None,
    hx: tuple[Tensor, Tensor],
    weights: Sequence[Tensor],
    *,
    bias: bool,
    num_layers: int,
    dropout: float,
    training: bool,
    bidirectional: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Call torch's LSTM on (T, N, I), or on packed data with its batch sizes."""
    rest = (list(weights), bias, num_layers, dropout, training, bidirectional)
    if sizes is None:
        y, h, c = torch.lstm(x, hx, *rest, False)
    else:
        y, h, c = torch.lstm(x, sizes, hx, *rest)
    return y, h, c


def factored_macs(ih: FactorSpec, hh: FactorSpec, steps: int, batch: int) -> int:
    """Return the multiply-adds of one layer and direction, stepping on the factors."""
    return GATES * steps * batch * (min(order_costs(ih)) + min(order_costs(hh)))


def fused_macs(ih: FactorSpec, hh: FactorSpec, steps: int, batch: int) -> int:
    """Return the multiply-adds of one layer and direction: the weights built, then dense steps."""
    total = 0
    for spec in (ih, hh):
        size = spec.out[0] * spec.out[1] * spec.inp[0] * spec.inp[1]
        total += GATES * size * (spec.rank + steps * batch)
    return total
