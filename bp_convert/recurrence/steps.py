"""The recurrences of torch's modules: what a step computes, and the sizes of what it multiplies."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

State = tuple[Tensor, ...]  # h, and an LSTM's c


@dataclass(frozen=True)
class Recurrence:
    """What one mode of torch's recurrent modules computes.

    Attributes:
        gates: matrices that stand above each other in one weight of torch's.
        inner: gates, the last ones, whose recurrent bias cannot be added to the other one: a
            GRU's reset gate multiplies it.
        carried: tensors of a state.
        step: makes the next state from a step's products of the input (G, ...), of the state
            (G, ...), the inner bias or None, and the state.
        fused: torch's own run over all layers and steps.
        cell: torch's own step.
    """

    gates: int
    inner: int
    carried: int
    step: Callable[[Tensor, Tensor, Tensor | None, State], State]
    fused: Callable[..., Any]
    cell: Callable[..., Any]

    def states(self, hx: Any) -> State:
        """Return a state in torch's form as a tuple of tensors."""
        return tuple(hx) if self.carried > 1 else (hx,)

    def given_back(self, states: State) -> Any:
        """Return a tuple of tensors in torch's form."""
        return states if self.carried > 1 else states[0]

    # Biases: torch has two of G*H; a bilinear layer adds up all but the inner ones, ((G + inner)*H)

    def split(self, bias: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return what is added to the input's products (G*H), and the inner bias."""
        if not self.inner:
            return bias, None
        first = self.gates * len(bias) // (self.gates + self.inner)
        return bias[:first], bias[first:]

    def joined(self, ih: Tensor, hh: Tensor) -> Tensor:
        """Make a bilinear layer's bias of torch's two."""
        if not self.inner:
            return ih + hh
        at = (self.gates - self.inner) * len(ih) // self.gates
        return torch.cat([ih[:at] + hh[:at], ih[at:], hh[at:]])

    def apart(self, bias: Tensor) -> tuple[Tensor, Tensor]:
        """Make torch's two biases, ih and hh, of a bilinear layer's one."""
        first, second = self.split(bias)
        if second is None:
            return bias.view_as(bias), torch.zeros_like(bias)
        return first, torch.cat([first.new_zeros(len(first) - len(second)), second])


def _lstm(x: Tensor, y: Tensor, inner: Tensor | None, state: State) -> State:
    i, f, g, o = (x + y).unbind(0)
    c = torch.addcmul(f.sigmoid() * state[1], i.sigmoid(), g.tanh())
    return o.sigmoid() * c.tanh(), c


def _gru(x: Tensor, y: Tensor, inner: Tensor | None, state: State) -> State:
    r, z = (x[:2] + y[:2]).sigmoid().unbind(0)
    hidden = y[2] if inner is None else y[2] + inner
    n = torch.addcmul(x[2], r, hidden).tanh()
    return (torch.addcmul(n, z, state[0] - n),)


def _tanh(x: Tensor, y: Tensor, inner: Tensor | None, state: State) -> State:
    return ((x[0] + y[0]).tanh(),)


def _relu(x: Tensor, y: Tensor, inner: Tensor | None, state: State) -> State:
    return ((x[0] + y[0]).relu(),)


RECURRENCES: Mapping[str, Recurrence] = {  # by torch's name of the mode
    "LSTM": Recurrence(4, 0, 2, _lstm, torch.lstm, torch.lstm_cell),  # input, forget, cell, output
    "GRU": Recurrence(3, 1, 1, _gru, torch.gru, torch.gru_cell),  # reset, update, new
    "RNN_TANH": Recurrence(1, 0, 1, _tanh, torch.rnn_tanh, torch.rnn_tanh_cell),
    "RNN_RELU": Recurrence(1, 0, 1, _relu, torch.rnn_relu, torch.rnn_relu_cell),
}
CELLS: Mapping[type[nn.Module], str] = {
    nn.LSTMCell: "LSTM",
    nn.GRUCell: "GRU",
    nn.RNNCell: "RNN_",
}


def mode_of(module: Any) -> str:
    """Return the mode of a recurrent module of torch's, stack or cell, or of its twin."""
    if hasattr(module, "mode"):
        return str(module.mode)
    mode = next(name for cell, name in CELLS.items() if isinstance(module, cell))
    return f"{mode}{module.nonlinearity.upper()}" if mode.endswith("_") else mode


@dataclass(frozen=True)
class GateMatrix:
    """What a role of a recurrent module stands for: (gates * outputs, inputs)."""

    gates: int
    inputs: int
    outputs: int


@dataclass(frozen=True)
class Frame:
    """The sizes of a recurrent module.

    Attributes:
        layers: 0 for a cell.
        proj: the size of a projected state; 0 where there is none.
    """

    mode: str
    inputs: int
    hidden: int
    proj: int = 0
    layers: int = 0
    both: bool = False

    @property
    def recurrence(self) -> Recurrence:
        return RECURRENCES[self.mode]

    @property
    def state(self) -> int:
        """The width of h, and of what a direction puts out."""
        return self.proj or self.hidden

    def resized(self, inputs: int, outputs: int) -> Frame:
        """Return the frame at other widths; what a projection reads grows with what it makes."""
        if not self.proj:
            return replace(self, inputs=inputs, hidden=outputs)
        return replace(
            self, inputs=inputs, proj=outputs, hidden=projected(self.hidden, self.proj, outputs)
        )

    def sides(self, layer: int) -> list[str]:
        """Return what the names of the tensors of a layer's directions end with."""
        if not self.layers:
            return [""]
        return [f"l{layer}", f"l{layer}_reverse"] if self.both else [f"l{layer}"]

    def suffixes(self) -> list[str]:
        """Return those of all layers."""
        return [side for layer in range(max(1, self.layers)) for side in self.sides(layer)]

    def matrices(self) -> dict[str, GateMatrix]:
        """Return the matrices by role, such as ``ih_l0``, or ``ih`` of a cell; both directions
        share a role."""
        gates, found = self.recurrence.gates, {}
        for layer in range(max(1, self.layers)):
            side = self.sides(layer)[0]
            inputs = self.state * (1 + self.both) if layer else self.inputs
            found[named("ih", side)] = GateMatrix(gates, inputs, self.hidden)
            found[named("hh", side)] = GateMatrix(gates, self.state, self.hidden)
            if self.proj:
                found[named("hr", side)] = GateMatrix(1, self.hidden, self.proj)
        return found


def frame_of(module: Any) -> Frame:
    """Return the sizes that the attributes of a recurrent module tell."""
    return Frame(
        mode_of(module),
        module.input_size,
        module.hidden_size,
        getattr(module, "proj_size", 0),
        getattr(module, "num_layers", 0),
        getattr(module, "bidirectional", False),
    )


def named(part: str, suffix: str) -> str:
    """Return ``weight_ih_l0`` for ``weight_ih`` and ``l0``; a cell's names have no suffix."""
    return f"{part}_{suffix}" if suffix else part


def projected(hidden: int, proj: int, outputs: Any) -> Any:
    """Return the hidden size that goes with a projection of ``outputs`` instead of ``proj``."""
    times, rest = divmod(hidden, proj)
    return outputs * hidden // proj if rest else outputs * times
