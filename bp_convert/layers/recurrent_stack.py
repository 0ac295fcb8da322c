"""What bilinear stacks of recurrent layers share: how they run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from bp_convert.layers.recurrent_factors import RecurrentFactors
from bp_convert.recurrence.checks import (
    check_fields,
    check_input,
    check_state,
    steps_and_batch,
)
from bp_convert.recurrence.path_cost import gains, prefers_factored, recurrent_macs
from bp_convert.recurrence.paths import Direction, loop
from bp_convert.recurrence.steps import State
from bp_convert.values.factors import FactorSpec


class RecurrentStack(RecurrentFactors):
    """A stack of recurrent layers, like torch's of the same mode.

    There are two ways to run it and a rule that picks (``path_cost.prefers_factored``): step
    by step on the factors, with the input products of all steps done at once; or, where the hidden
    size is small or the terms are many, torch's own run on weights built from the factors, which
    are kept as those of an expanded layer are. On CUDA devices it is always the latter; so it is
    where it is expanded, but for large calls that factors make cheaper.
    """

    FIELDS: ClassVar[tuple[str, ...]] = (
        *("input_size", "hidden_size", "num_layers", "bias", "batch_first"),
        *("dropout", "bidirectional"),
    )

    _gains: tuple[float, float, float] = (0.0, 0.0, 0.0)  # see ``path_cost.gains``

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        proj_size: int = 0,
        *,
        factors: Mapping[str, FactorSpec] | None = None,
        rank: int = 1,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.input_size = input_size
        self.hidden_size = hidden_size
        self.num_layers = num_layers
        self.bias = bias
        self.batch_first = batch_first
        self.dropout = float(dropout)
        self.bidirectional = bidirectional
        self.proj_size = proj_size
        check_fields(type(self).__name__, self.frame, dropout)
        self.hold_(factors, rank, device, dtype)
        self._gains = gains(self.factors, self.mode)

    def forward(self, input: Tensor | PackedSequence, hx: Any = None) -> tuple[Any, Any]:
        """Return (output, state) as torch's layer does."""
        states = None if hx is None else self.recurrence.states(hx)
        if isinstance(input, PackedSequence):
            return self._packed(input, states)
        name = type(self).__name__
        if input.dim() not in (2, 3):
            raise ValueError(f"{name}: expected 2 or 3 axes, got {input.dim()}")
        single = input.dim() == 2
        x = input.unsqueeze(1) if single else input.transpose(0, 1) if self.batch_first else input
        check_input(name, x, self.input_size)  # (T, N, I)
        if states is not None:
            self._check(states, () if single else (x.shape[1],))
            states = tuple(one.unsqueeze(1) for one in states) if single else states
        y, last = self._run(x, states, None)
        if single:
            return y.squeeze(1), self.recurrence.given_back(tuple(one.squeeze(1) for one in last))
        return (y.transpose(0, 1) if self.batch_first else y), self.recurrence.given_back(last)

    def _packed(self, packed: PackedSequence, states: State | None) -> tuple[PackedSequence, Any]:
        check_input(type(self).__name__, packed.data, self.input_size)
        if states is not None:
            self._check(states, (int(packed.batch_sizes[0]),))
            if packed.sorted_indices is not None:
                order = packed.sorted_indices
                states = tuple(one.index_select(1, order) for one in states)
        y, last = self._run(packed.data, states, packed.batch_sizes)
        if packed.unsorted_indices is not None:
            back = packed.unsorted_indices
            last = tuple(one.index_select(1, back) for one in last)
        return packed._replace(data=y), self.recurrence.given_back(last)

    def _check(self, states: State, batch: tuple[int, ...]) -> None:
        sizes = [(self.passes(), *batch, width) for width in self._widths()]
        check_state(type(self).__name__, states, sizes)

    def _widths(self) -> tuple[int, ...]:
        """Return the widths of a state's tensors."""
        widths = (self.proj_size or self.hidden_size, self.hidden_size)
        return widths[: self.recurrence.carried]

    def _run(self, x: Tensor, states: State | None, sizes: Tensor | None) -> tuple[Tensor, State]:
        """Run all layers on (T, N, I), or on packed rows (sum of sizes, I)."""
        steps, batch = (x.shape[0], x.shape[1]) if sizes is None else (len(sizes), int(sizes[0]))
        if states is None:
            states = tuple(x.new_zeros(self.passes(), batch, width) for width in self._widths())
        kept = self.way == "expanded" and not self._cheap(x, steps)
        weights = self.built_for(x) if kept else None
        if weights is None and self._factored(x, steps, batch):
            if sizes is not None:
                return self._loop(x, states, sizes.tolist())
            y, last = self._loop(x.flatten(0, 1), states, [batch] * steps)
            return y.view(steps, batch, y.shape[-1]), last
        hx = self.recurrence.given_back(states)
        weights = weights or self.built_for(x) or self.expand()
        parts = (weights, self.bias, self.num_layers, self.dropout, self.training)
        if sizes is None:
            y, *after = self.recurrence.fused(x, hx, *parts, self.bidirectional, False)
        else:
            y, *after = self.recurrence.fused(x, sizes, hx, *parts, self.bidirectional)
        return y, tuple(after)

    def _cheap(self, x: Tensor, steps: int) -> bool:
        """Whether a call is so large that it goes on the factors though others do not."""
        if torch.compiler.is_compiling():
            return False
        call, step, row = self._gains
        return call + step * steps + row * (x.numel() // max(1, x.shape[-1])) > 0

    def _factored(self, x: Tensor, steps: int, batch: int) -> bool:
        if torch.compiler.is_compiling():
            batch = 1  # so that a graph for a free batch size does not hang on it
        if x.device.type == "cuda":
            return False
        return prefers_factored(self.factors, steps, batch, self.mode)

    def _loop(self, x: Tensor, states: State, sizes: list[int]) -> tuple[Tensor, State]:
        """Step on the factors through packed rows (sum of sizes, I)."""
        found: list[State] = []
        for layer in range(self.num_layers):
            sides = []
            for side, suffix in enumerate(self.frame.sides(layer)):
                one = Direction(
                    self.recurrence,
                    self.pair("ih", suffix),
                    self.pair("hh", suffix),
                    self.bias_of(suffix) if self.bias else None,
                    self.pair("hr", suffix) if self.proj_size else None,
                )
                state = tuple(part[len(found)] for part in states)
                y, last = loop(x, state, one, sizes=sizes, reverse=side == 1)
                sides.append(y)
                found.append(last)
            x = sides[0] if len(sides) == 1 else torch.cat(sides, -1)
            if self.dropout and self.training and layer + 1 < self.num_layers:
                x = nn.functional.dropout(x, self.dropout)
        return x, tuple(map(torch.stack, zip(*found, strict=True)))

    def passes(self) -> int:
        """Return how many layers and directions there are."""
        return self.num_layers * (2 if self.bidirectional else 1)

    def predict_macs(self, shape: tuple[int, ...]) -> int:
        """Return the multiply-adds of one call on an input of this shape, as
        ``path_cost.recurrent_macs``."""
        steps, batch = steps_and_batch(shape, self.batch_first)
        directions = 2 if self.bidirectional else 1
        return recurrent_macs(self.factors, steps, batch, directions, self.mode)

    def flatten_parameters(self) -> None:
        """Do nothing; callers of torch's layers expect the method."""
