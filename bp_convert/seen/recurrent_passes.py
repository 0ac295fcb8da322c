"""What the weights of a recurrent module see over time, and how much their outputs count."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence

from bp_convert.recurrence.steps import RECURRENCES, frame_of, mode_of, named
from bp_convert.seen.pick import Pick


@dataclass(frozen=True)
class Started:
    """What a recurrent module is called on, where it is given a state."""

    x: Any
    hx: Any


@dataclass(frozen=True)
class Pass:
    """One direction of one layer over a batch; of a cell, one step.

    Attributes:
        suffix: of the names of its parameters, such as ``l0_reverse``; none of a cell.
        x: (T, N, D) inputs.
        before: (T, N, H) the state that each step starts from.
        cell: (N, H) the cell state that an LSTM starts from; else None.
        mask: (T, N) which steps count.
    """

    suffix: str
    x: Tensor
    before: Tensor
    cell: Tensor | None
    mask: Tensor

    def role(self, part: str) -> str:
        """Name a role; both directions share it."""
        return named(part, self.suffix.removesuffix("_reverse"))

    def order(self) -> Iterator[int]:
        """Yield the steps in the order in which they are taken."""
        steps = range(len(self.x))
        return iter(reversed(steps) if self.suffix.endswith("_reverse") else steps)


@torch.no_grad()
def recurrent_rows(module: Any, given: Any, pick: Pick) -> dict[str, list[Tensor]]:
    """Return what the weights of each layer see over time, by role; the rows of the reverse
    direction come second."""
    found: dict[str, list[Tensor]] = {}
    for one in _passes(module, given):
        met = {"ih": one.x, "hh": one.before}
        if getattr(module, "proj_size", 0):
            met["hr"] = _unprojected(module, one)
        for part, rows in met.items():
            found.setdefault(one.role(part), []).append(_some(rows, one.mask, pick))
    return found


@torch.no_grad()
def recurrent_weights(module: Any, given: Any) -> dict[str, list[Tensor]]:
    """Return how far each of the gates' outputs (G*H) moves the state h of the same step: the mean
    square of the derivative, by role; those of the reverse direction come second.

    A gate that is saturated, or multiplies little, may be far off at no cost.
    """
    found: dict[str, list[Tensor]] = {}
    slopes = {"LSTM": _lstm, "GRU": _gru}.get(mode_of(module), _plain)
    for one in _passes(module, given):
        x, y = _products(module, one)
        zeros = torch.zeros(x.shape[-1], dtype=torch.float64, device=x.device)
        total = {"ih": zeros, "hh": zeros.clone()}
        for at, slope in slopes(module, one, x, y):
            counts = one.mask if at is None else one.mask[at]
            for part, each in zip(total, slope, strict=True):
                square = (each * counts[..., None]).square().flatten(0, -2)
                total[part] += square.sum(0, dtype=torch.float64)
        for part, whole in total.items():
            found.setdefault(one.role(part), []).append(whole / one.mask.sum().clamp(min=1))
    return found


def sides_of(module: Any) -> tuple[str, ...]:
    """Return what the names of each direction's parameters end with."""
    return ("", "_reverse") if getattr(module, "bidirectional", False) else ("",)


# Derivatives of h by the outputs of both weights: of a step each, or of all steps at once

_Slopes = Iterator[tuple[int | None, tuple[Tensor, Tensor]]]


def _lstm(module: Any, one: Pass, x: Tensor, y: Tensor) -> _Slopes:
    for at, (i, f, g, o), c, new in _gates(one, x + y):
        reach = o * (1 - new.tanh().square())  # dh/dc
        parts = (
            reach * g * i * (1 - i),
            reach * c * f * (1 - f),
            reach * i * (1 - g.square()),
            new.tanh() * o * (1 - o),
        )
        each = torch.cat(parts, -1)
        yield at, (each, each)


def _gru(module: Any, one: Pass, x: Tensor, y: Tensor) -> _Slopes:
    (xr, xz, xn), (yr, yz, yn) = x.chunk(3, -1), y.chunk(3, -1)
    r, z = (xr + yr).sigmoid(), (xz + yz).sigmoid()
    n = (xn + r * yn).tanh()
    reach = (1 - z) * (1 - n.square())  # dh by what the new gate's tanh is of
    shared = (reach * yn * r * (1 - r), (one.before - n) * z * (1 - z))
    yield None, (torch.cat([*shared, reach], -1), torch.cat([*shared, reach * r], -1))


def _plain(module: Any, one: Pass, x: Tensor, y: Tensor) -> _Slopes:
    z = x + y
    relu = mode_of(module) == "RNN_RELU"
    each = (z > 0).to(z.dtype) if relu else 1 - z.tanh().square()
    yield None, (each, each)


def _gates(one: Pass, z: Tensor) -> Iterator[tuple[int, tuple[Tensor, ...], Tensor, Tensor]]:
    """Step an LSTM on its gates (T, N, 4H); yield the place, the gates, the cell state before and
    after."""
    assert one.cell is not None
    c = one.cell
    for at in one.order():
        i, f, g, o = z[at].chunk(4, -1)
        i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
        new = f * c + i * g
        yield at, (i, f, g, o), c, new
        c = torch.where(one.mask[at][:, None], new, c)


def _unprojected(module: Any, one: Pass) -> Tensor:
    """Return what an LSTM's projection reads (T, N, H)."""
    x, y = _products(module, one)
    found = {at: gates[3] * new.tanh() for at, gates, _, new in _gates(one, x + y)}
    return torch.stack([found[at] for at in range(len(x))])


def _products(module: Any, one: Pass) -> tuple[Tensor, Tensor]:
    """Return the outputs of both weights (T, N, G*H), biases included."""
    found = []
    for part, rows in (("ih", one.x), ("hh", one.before)):
        y = rows @ getattr(module, named(f"weight_{part}", one.suffix)).t()
        bias = getattr(module, named(f"bias_{part}", one.suffix), None)
        found.append(y if bias is None else y + bias)
    return found[0], found[1]


def _passes(module: Any, given: Any) -> Iterator[Pass]:
    """Run layer after layer, direction after direction."""
    hx = None
    if isinstance(given, Started):
        given, hx = given.x, given.hx
    states = None if hx is None else RECURRENCES[mode_of(module)].states(hx)
    if isinstance(module, nn.RNNCellBase):
        yield _step(module, given, states)
        return
    x, mask = _unpacked(module, given)  # (T, N, I), (T, N)
    frame = frame_of(module)
    if states is None:
        sizes = (frame.state, frame.hidden)[: frame.recurrence.carried]
        many = len(frame.suffixes())
        states = tuple(x.new_zeros(many, x.shape[1], size) for size in sizes)
    elif states[0].dim() == 2:
        states = tuple(one.unsqueeze(1) for one in states)
    done = 0
    for layer in range(module.num_layers):
        sides = []
        for suffix in frame.sides(layer):
            start = tuple(one[done] for one in states)
            y, before = _one_direction(module, suffix, x, mask, start)
            yield Pass(suffix, x, before, start[1] if len(start) > 1 else None, mask)
            sides.append(y)
            done += 1
        x = torch.cat(sides, -1)


def _step(cell: Any, x: Tensor, states: tuple[Tensor, ...] | None) -> Pass:
    """Return the one step of a cell."""
    x = x.reshape(1, -1, x.shape[-1])  # (1, N, I)
    if states is None:
        zeros = x.new_zeros(x.shape[1], cell.hidden_size)
        states = (zeros,) * RECURRENCES[mode_of(cell)].carried
    h, *c = (one.reshape(-1, one.shape[-1]) for one in states)  # (N, H)
    mask = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
    return Pass("", x, h.unsqueeze(0), c[0] if c else None, mask)


def _unpacked(module: Any, x: Tensor | PackedSequence) -> tuple[Tensor, Tensor]:
    if isinstance(x, PackedSequence):
        x, lengths = pad_packed_sequence(x)
        steps = torch.arange(len(x))[:, None]
        return x, (steps < lengths[None]).to(x.device)
    if x.dim() == 2:
        x = x.unsqueeze(1)
    elif module.batch_first:
        x = x.transpose(0, 1)
    return x, torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)


def _one_direction(
    module: Any, suffix: str, x: Tensor, mask: Tensor, start: tuple[Tensor, ...]
) -> tuple[Tensor, Tensor]:
    """Run one layer in one direction over (T, N, D); return its outputs, 0 behind a sequence's
    end, and the states before each step."""
    hidden = module.hidden_size
    made: dict[str, Any] = {"bias": module.bias, "device": "meta", "dtype": x.dtype}
    if module.mode == "LSTM":
        one: Any = nn.LSTM(x.shape[-1], hidden, proj_size=module.proj_size, **made)
    elif module.mode == "GRU":
        one = nn.GRU(x.shape[-1], hidden, **made)
    else:
        one = nn.RNN(x.shape[-1], hidden, nonlinearity=module.mode[4:].lower(), **made)
    for name in dict(one.named_parameters()):
        own = named(name.removesuffix("_l0"), suffix)
        setattr(one, name, nn.Parameter(getattr(module, own).detach()))
    hx = RECURRENCES[module.mode].given_back(tuple(part.unsqueeze(0) for part in start))
    if not suffix.endswith("_reverse"):
        y: Tensor = one(x, hx)[0]
        return y * mask[..., None], torch.cat([start[0][None], y[:-1]])
    # Each sequence is turned round on its own, so that padding stays behind its end.
    steps = torch.arange(len(x), device=x.device)[:, None]
    turned = torch.where(mask, mask.sum(0) - 1 - steps, steps)[..., None]  # (T, N, 1)
    y = one(x.gather(0, turned.expand_as(x)), hx)[0]
    before = torch.cat([start[0][None], y[:-1]])
    back = turned.expand_as(y)
    return (y * mask[..., None]).gather(0, back), before.gather(0, back)


def _some(x: Tensor, mask: Tensor, pick: Pick) -> Tensor:
    rows = x[mask]
    chosen = pick.some(len(rows))
    return rows if chosen is None else rows[chosen.to(rows.device)]
