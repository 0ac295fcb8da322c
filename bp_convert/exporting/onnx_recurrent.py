"""ONNX's own LSTM, GRU and RNN in place of torch's, which a trace would unroll to one length."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from bp_convert.errors import ExportError
from bp_convert.kinds import is_twin

# Where torch's gates stand in ONNX's order: input, output, forget, cell; update, reset, hidden.
_ORDER = {"LSTM": (0, 3, 1, 2), "GRU": (1, 0, 2), "RNN": (0,)}
_TYPES = {nn.LSTM: "LSTM", nn.GRU: "GRU", nn.RNN: "RNN"}


def recurrent_forward(layer: Any) -> Callable[..., Any] | None:
    """Return what computes a recurrent layer, torch's or bilinear, by ONNX's operator; None for
    any other layer, for projections, which ONNX lacks, and where torch is too old to say it."""
    plain = layer.to_dense() if is_twin(layer) and hasattr(layer, "all_weights") else layer
    found = next((name for kind, name in _TYPES.items() if isinstance(plain, kind)), None)
    if found is None or getattr(plain, "proj_size", False) or not hasattr(torch.onnx, "ops"):
        return None
    operator: str = found
    attributes: dict[str, Any] = {"hidden_size": plain.hidden_size}
    if operator == "RNN":
        attributes["activations"] = ["Relu" if plain.nonlinearity == "relu" else "Tanh"]
    if operator == "GRU":
        attributes["linear_before_reset"] = 1
    sides = 2 if plain.bidirectional else 1
    if sides == 2:
        attributes["direction"] = "bidirectional"
        if "activations" in attributes:
            attributes["activations"] *= 2

    def forward(input: Any, hx: Any = None) -> Any:
        if isinstance(input, PackedSequence):
            raise _packed(layer)
        single = input.dim() == 2
        first = layer.batch_first and not single
        x = input.unsqueeze(1) if single else input.transpose(0, 1) if first else input  # (T, N, I)
        given = [] if hx is None else [*hx] if operator == "LSTM" else [hx]
        given = [one.unsqueeze(1) if single else one for one in given]
        ends: list[list[Tensor]] = []
        for at in range(layer.num_layers):
            weights = layer.all_weights[at * sides : (at + 1) * sides]
            start = [one[at * sides : (at + 1) * sides] for one in given]
            y, *last = _one_layer(operator, x, weights, start, attributes)
            x = y.transpose(1, 2).flatten(2)  # (T, N, sides*H)
            ends.append(last)
        states = [torch.cat(one) if len(one) > 1 else one[0] for one in zip(*ends, strict=True)]
        y = x.squeeze(1) if single else x.transpose(0, 1) if first else x
        states = [one.squeeze(1) if single else one for one in states]
        return y, tuple(states) if operator == "LSTM" else states[0]

    return forward


def _one_layer(
    operator: str,
    x: Tensor,
    weights: list[list[Tensor]],
    start: list[Tensor],
    attributes: dict[str, Any],
) -> list[Tensor]:
    """Run one layer in all its directions: (T, sides, N, H), and the last states (sides, N, H)."""
    order = _ORDER[operator]

    def laid(place: int) -> Tensor:
        found = []
        for side in weights:
            rows = len(side[place]) // len(order)
            found.append(torch.cat([side[place].narrow(0, one * rows, rows) for one in order]))
        return torch.stack(found)

    bias = torch.cat([laid(2), laid(3)], 1) if len(weights[0]) > 2 else None
    states = [*start, *[None] * (2 - len(start))]
    hidden = [len(weights), x.shape[1], attributes["hidden_size"]]
    count = 3 if operator == "LSTM" else 2
    return [
        *torch.onnx.ops.symbolic_multi_out(
            operator,
            (x, laid(0), laid(1), bias, None, *states[: count - 1]),
            attributes,
            dtypes=(x.dtype,) * count,
            shapes=([x.shape[0], *hidden], *[hidden] * (count - 1)),
        )
    ]


def _packed(layer: nn.Module) -> ExportError:
    return ExportError(
        where=type(layer).__name__,
        found="a packed sequence, whose steps hang on lengths in the data",
        allowed="padded sequences",
        fix="export a forward that does not pack; bp_convert.load runs the model as it is",
    )
