"""An LSTM whose matrices are sums of Kronecker products: how it runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from typing_extensions import Self

from bp_convert.layers.lstm_checks import check_input, check_state, steps_and_batch
from bp_convert.layers.lstm_cost import lstm_macs, prefers_factored
from bp_convert.layers.lstm_factors import LSTMFactors
from bp_convert.layers.lstm_paths import Direction, built, loop, one_chunk

State = tuple[Tensor, Tensor]


class BPLSTM(LSTMFactors):
    """An ``nn.LSTM`` with bilinear gates (paper, section III-F).

    Each of the four gates has its own factors for the input and for the hidden state, and one
    bias; or, where a spec's outputs are 4H, the four gates above each other share factors. There
    are two ways to run it and a rule that picks (``lstm_cost.prefers_factored``): step by step on
    the factors, with the input products of all steps done at once; or, where the hidden size is
    small or the terms are many, torch's fused LSTM on weights built from the factors. On CUDA
    devices it is always the latter.

    Args: as ``nn.LSTM``, and
        factors: one FactorSpec per matrix, by role: ``ih_l0``, ``hh_l0``, ``ih_l1``, ... (both
            directions use the same); by default the nearest-square pairs.
        rank: number of terms R where ``factors`` is not given; cut to full rank.

    Shape:
        input (T, N, I), (N, T, I) with ``batch_first``, (T, I), or a PackedSequence; output as
        nn.LSTM's. Per layer: w1_ih (G, R, h1, i1), w2_ih (G, R, i2, h2), w1_hh (G, R, h1, h1'),
        w2_hh (G, R, h2', h2), bias (4H); G = 4 with h1*h2 = H, or G = 1 with h1*h2 = 4H.

    Raises:
        FactorError: proj_size, fields that cannot be, or pairs that do not fit.
    """

    _kept: tuple[list[Tensor], list[Tensor]] | None = None

    def forward(
        self, input: Tensor | PackedSequence, hx: State | None = None
    ) -> tuple[Tensor | PackedSequence, State]:
        """Return (output, (h_n, c_n)) as ``nn.LSTM`` does."""
        if isinstance(input, PackedSequence):
            return self._packed(input, hx)
        if input.dim() not in (2, 3):
            raise ValueError(f"BPLSTM: expected 2 or 3 axes, got {input.dim()}")
        single = input.dim() == 2
        x = input.unsqueeze(1) if single else input.transpose(0, 1) if self.batch_first else input
        check_input(x, self.input_size)  # (T, N, I)
        if hx is not None:
            count, batch = self.passes(), x.shape[1]
            sizes = (count,) if single else (count, batch)
            check_state(hx, (*sizes, self.hidden_size))
            hx = (hx[0].unsqueeze(1), hx[1].unsqueeze(1)) if single else hx
        y, h, c = self._run(x, hx, None)
        if single:
            return y.squeeze(1), (h.squeeze(1), c.squeeze(1))
        return (y.transpose(0, 1) if self.batch_first else y), (h, c)

    def _packed(self, packed: PackedSequence, hx: State | None) -> tuple[PackedSequence, State]:
        check_input(packed.data, self.input_size)
        if hx is not None:
            check_state(hx, (self.passes(), int(packed.batch_sizes[0]), self.hidden_size))
            if packed.sorted_indices is not None:
                order = packed.sorted_indices
                hx = (hx[0].index_select(1, order), hx[1].index_select(1, order))
        y, h, c = self._run(packed.data, hx, packed.batch_sizes)
        if packed.unsorted_indices is not None:
            back = packed.unsorted_indices
            h, c = h.index_select(1, back), c.index_select(1, back)
        return packed._replace(data=y), (h, c)

    def _run(
        self, x: Tensor, hx: State | None, sizes: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Run all layers on (T, N, I), or on packed rows (sum of sizes, I)."""
        steps, batch = (x.shape[0], x.shape[1]) if sizes is None else (len(sizes), int(sizes[0]))
        if hx is None:
            zeros = x.new_zeros(self.passes(), batch, self.hidden_size)
            hx = (zeros, zeros)
        if self._factored(x, steps, batch):
            if sizes is not None:
                return self._loop(x, *hx, sizes.tolist())
            y, h, c = self._loop(x.flatten(0, 1), *hx, [batch] * steps)
            return y.view(steps, batch, y.shape[-1]), h, c
        parts = (self._weights(x), self.bias, self.num_layers, self.dropout, self.training)
        if sizes is None:
            y, h, c = torch.lstm(x, hx, *parts, self.bidirectional, False)
        else:
            y, h, c = torch.lstm(x, sizes, hx, *parts, self.bidirectional)
        return y, h, c

    def _factored(self, x: Tensor, steps: int, batch: int) -> bool:
        if torch.compiler.is_compiling():
            batch = 1  # so that a graph for a free batch size does not hang on it
        return x.device.type != "cuda" and prefers_factored(self.factors, steps, batch)

    def _weights(self, x: Tensor) -> list[Tensor]:
        """Return the dense weights in torch's order.

        In eval mode without gradients a CPU keeps them, with a copy of the parameters that they
        were built from; the next call compares values, since a parameter's version misses writes
        through ``.data``. They are no part of the state and are never copied or moved.
        """
        parameters = list(self.parameters())
        plain = type(x) is Tensor and all(type(p) is nn.Parameter and p.is_cpu for p in parameters)
        lasting = not (self.training or torch.is_grad_enabled() or torch.compiler.is_compiling())
        if not (plain and lasting):
            return self._build()
        kept = self._kept
        if kept is not None and all(map(_same, kept[0], parameters)):
            return kept[1]
        weights = self._build()
        if weights[0].dtype == parameters[0].dtype:  # autocast would build narrower ones
            self._kept = ([p.clone() for p in parameters], weights)
        return weights

    def _build(self) -> list[Tensor]:
        weights = []
        for suffix in self.suffixes():
            weights += [built(*self.pair(role, suffix)) for role in ("ih", "hh")]
            if self.bias:
                bias = self.bias_of(suffix)
                weights += [bias, torch.zeros_like(bias)]
        return one_chunk(weights, 4 if self.bias else 2) if weights[0].is_cuda else weights

    def train(self, mode: bool = True) -> Self:
        """Set the mode; weights kept for inference are dropped."""
        self._kept = None
        return super().train(mode)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        self._kept = None
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_kept": None}

    def _loop(
        self, x: Tensor, h: Tensor, c: Tensor, sizes: list[int]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Step on the factors through packed rows (sum of sizes, I)."""
        states: list[State] = []
        for layer in range(self.num_layers):
            sides = []
            for side, suffix in enumerate(self.sides(layer)):
                at = len(states)
                one = Direction(
                    self.pair("ih", suffix),
                    self.pair("hh", suffix),
                    self.bias_of(suffix) if self.bias else None,
                )
                y, *state = loop(x, h[at], c[at], one, sizes=sizes, reverse=side == 1)
                sides.append(y)
                states.append((state[0], state[1]))
            x = sides[0] if len(sides) == 1 else torch.cat(sides, -1)
            if self.dropout and self.training and layer + 1 < self.num_layers:
                x = nn.functional.dropout(x, self.dropout)
        last_h, last_c = zip(*states, strict=True)
        return x, torch.stack(last_h), torch.stack(last_c)

    def predict_macs(self, shape: tuple[int, ...]) -> int:
        """Return the multiply-adds of one call on an input of this shape, as
        ``lstm_cost.lstm_macs``."""
        steps, batch = steps_and_batch(shape, self.batch_first)
        return lstm_macs(self.factors, steps, batch, 2 if self.bidirectional else 1)

    def flatten_parameters(self) -> None:
        """Do nothing; nn.LSTM's callers expect the method."""


def _same(kept: Tensor, now: Tensor) -> bool:
    return kept.dtype == now.dtype and torch.equal(kept, now)
