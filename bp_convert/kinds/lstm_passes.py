"""What the weights of an LSTM see over time, and how much each of their outputs counts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence

from bp_convert.kinds.pick import Pick


@dataclass(frozen=True)
class Pass:
    """One direction of one layer over a batch.

    Attributes:
        layer: its number.
        suffix: of the names of its parameters, such as ``l0_reverse``.
        x: (T, N, D) inputs.
        before: (T, N, H) the state that each step starts from.
        mask: (T, N) which steps count.
    """

    layer: int
    suffix: str
    x: Tensor
    before: Tensor
    mask: Tensor

    @property
    def turned(self) -> bool:
        """Whether it steps from the last to the first."""
        return self.suffix.endswith("_reverse")


@torch.no_grad()
def lstm_rows(module: nn.LSTM, x: Tensor | PackedSequence, pick: Pick) -> dict[str, list[Tensor]]:
    """Return what the input and recurrent weights of each layer see over time, by role; the rows
    of the reverse direction come second."""
    found: dict[str, list[Tensor]] = {}
    for one in _passes(module, x):
        found.setdefault(f"ih_l{one.layer}", []).append(_some(one.x, one.mask, pick))
        found.setdefault(f"hh_l{one.layer}", []).append(_some(one.before, one.mask, pick))
    return found


@torch.no_grad()
def lstm_weights(module: nn.LSTM, x: Tensor | PackedSequence) -> dict[str, list[Tensor]]:
    """Return how far each of the gates' outputs (4H) moves the state h of the same step: the mean
    square of the derivative, by role; those of the reverse direction come second.

    A gate that is saturated, or multiplies little, may be far off at no cost.
    """
    found: dict[str, list[Tensor]] = {}
    for one in _passes(module, x):
        weight, state = (getattr(module, f"weight_{role}_{one.suffix}") for role in ("ih", "hh"))
        z = one.x @ weight.t() + one.before @ state.t()  # (T, N, 4H)
        if module.bias:
            for role in ("ih", "hh"):
                z = z + getattr(module, f"bias_{role}_{one.suffix}")
        mean = _derivatives(z, one.mask, turned=one.turned)
        for role in ("ih", "hh"):
            found.setdefault(f"{role}_l{one.layer}", []).append(mean)
    return found


def sides_of(module: nn.LSTM) -> tuple[str, ...]:
    """Return what the names of each direction's parameters end with."""
    return ("", "_reverse") if module.bidirectional else ("",)


def _derivatives(z: Tensor, mask: Tensor, *, turned: bool) -> Tensor:
    """Return the mean square of dh/dz (4H) over the steps that count."""
    total = torch.zeros(z.shape[-1], dtype=torch.float64, device=z.device)
    c = torch.zeros_like(z[0, :, : z.shape[-1] // 4])
    for at in reversed(range(len(z))) if turned else range(len(z)):
        i, f, g, o = z[at].chunk(4, -1)
        i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
        new = f * c + i * g
        reach = o * (1 - new.tanh().square())  # dh/dc
        each = (
            reach * g * i * (1 - i),
            reach * c * f * (1 - f),
            reach * i * (1 - g.square()),
            new.tanh() * o * (1 - o),
        )
        counts = mask[at, :, None]
        total += (torch.cat(each, -1) * counts).square().sum(0, dtype=torch.float64)
        c = new * counts
    return total / mask.sum().clamp(min=1)


def _passes(module: nn.LSTM, x: Tensor | PackedSequence) -> Iterator[Pass]:
    """Run layer after layer, direction after direction."""
    x, mask = _unpacked(module, x)  # (T, N, I), (T, N)
    for layer in range(module.num_layers):
        sides = []
        for side in sides_of(module):
            suffix = f"l{layer}{side}"
            y = _one_direction(module, suffix, x, mask)
            before = torch.zeros_like(y)
            if side:
                before[:-1] = y[1:]
            else:
                before[1:] = y[:-1]
            yield Pass(layer, suffix, x, before, mask)
            sides.append(y)
        x = torch.cat(sides, -1)


def _unpacked(module: nn.LSTM, x: Tensor | PackedSequence) -> tuple[Tensor, Tensor]:
    if isinstance(x, PackedSequence):
        x, lengths = pad_packed_sequence(x)
        steps = torch.arange(len(x))[:, None]
        return x, (steps < lengths[None]).to(x.device)
    if x.dim() == 2:
        x = x.unsqueeze(1)
    elif module.batch_first:
        x = x.transpose(0, 1)
    return x, torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)


def _one_direction(module: nn.LSTM, suffix: str, x: Tensor, mask: Tensor) -> Tensor:
    """Run one layer in one direction over (T, N, D); states are 0 behind a sequence's end."""
    hidden = getattr(module, f"weight_hh_{suffix}").shape[1]
    one = nn.LSTM(x.shape[-1], hidden, bias=module.bias, device="meta", dtype=x.dtype)
    for name in dict(one.named_parameters()):
        own = name.removesuffix("_l0")
        setattr(one, name, nn.Parameter(getattr(module, f"{own}_{suffix}").detach()))
    if not suffix.endswith("_reverse"):
        y: Tensor = one(x)[0]
        return y * mask[..., None]
    # Each sequence is turned round on its own, so that padding stays behind its end.
    steps = torch.arange(len(x), device=x.device)[:, None]
    turned = torch.where(mask, mask.sum(0) - 1 - steps, steps)[..., None]  # (T, N, 1)
    y = one(x.gather(0, turned.expand_as(x)))[0]
    return (y * mask[..., None]).gather(0, turned.expand_as(y))


def _some(x: Tensor, mask: Tensor, pick: Pick) -> Tensor:
    rows = x[mask]
    chosen = pick.some(len(rows))
    return rows if chosen is None else rows[chosen.to(rows.device)]
