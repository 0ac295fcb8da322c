"""Recurrent cells whose matrices are sums of Kronecker products: one step at each call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from bp_convert.kron.contract import bilinear_macs
from bp_convert.layers.recurrent_factors import RecurrentFactors
from bp_convert.layers.rnn import checked_nonlinearity
from bp_convert.recurrence.checks import check_state, groups
from bp_convert.recurrence.paths import GateProduct, JointProduct, product
from bp_convert.values.factors import FactorSpec


class BilinearCell(RecurrentFactors):
    """What bilinear cells share: a step on the factors.

    Args: as torch's cell, and
        factors: one FactorSpec for each of the roles ``ih`` and ``hh``, with H outputs for factors
            of each gate, or G*H for factors that the gates share; by default the nearest-square
            pairs.
        rank: number of terms R where ``factors`` is not given; cut to full rank.
    """

    FIELDS: ClassVar[tuple[str, ...]] = ("input_size", "hidden_size", "bias")

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        bias: bool = True,
        *,
        factors: Mapping[str, FactorSpec] | None = None,
        rank: int = 1,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.input_size = input_size
        self.hidden_size = hidden_size
        self.bias = bias
        self.hold_(factors, rank, device, dtype)

    def forward(self, input: Tensor, hx: Any = None) -> Any:
        """Return the next state as torch's cell does."""
        name, recurrence = type(self).__name__, self.recurrence
        if input.dim() not in (1, 2):
            raise ValueError(f"{name}: expected 1 or 2 axes, got {input.dim()}")
        if input.shape[-1] != self.input_size:
            raise RuntimeError(
                f"{name}: input.size(-1) must be {self.input_size}, got {input.shape[-1]}"
            )
        single = input.dim() == 1
        x = input.unsqueeze(0) if single else input  # (N, I)
        if hx is None:
            zeros = x.new_zeros(x.shape[0], self.hidden_size)
            state = (zeros,) * recurrence.carried
        else:
            state = recurrence.states(hx)
            shape = (*input.shape[:-1], self.hidden_size)
            check_state(name, state, [shape] * len(state))
            state = tuple(one.unsqueeze(0) for one in state) if single else state  # (N, H)
        if self.way == "expanded" and (weights := self.built_for(x)) is not None:
            new = recurrence.states(recurrence.cell(x, recurrence.given_back(state), *weights))
            return recurrence.given_back(tuple(one.squeeze(0) for one in new) if single else new)
        bias = inner = None
        if self.bias:
            bias, inner = recurrence.split(self.bias_of(""))
        gates = recurrence.gates
        inputs = _rows(product(*self.pair("ih", ""), gates), x)  # (G, N, H)
        if bias is not None:
            inputs = inputs + bias.to(inputs.dtype).view(gates, 1, -1)
        states = _rows(product(*self.pair("hh", ""), gates), state[0])
        inner = None if inner is None else inner.to(states.dtype)
        new = recurrence.step(inputs, states, inner, state)
        return recurrence.given_back(tuple(one.squeeze(0) for one in new) if single else new)

    @classmethod
    def predict_macs(cls, factors: Mapping[str, FactorSpec], matrices: Any, rows: int) -> int:
        """Return the multiply-adds of a step on this many rows, with these factors or some of
        them."""
        return rows * sum(
            groups(spec, matrices[role]) * bilinear_macs(spec) for role, spec in factors.items()
        )


class BPLSTMCell(BilinearCell):
    """An ``nn.LSTMCell`` with bilinear gates.

    Args: as ``nn.LSTMCell``, and
        factors: one FactorSpec for each of ``ih`` and ``hh``, with H outputs for factors of each
            gate, or 4H for factors that the gates share; by default the nearest-square pairs.
        rank: number of terms R where ``factors`` is not given; cut to full rank.

    Shape:
        input (N, I) or (I,); state h and c (N, H) or (H,). w1_ih (G, R, h1, i1), w2_ih
        (G, R, i2, h2), w1_hh (G, R, h1, h1'), w2_hh (G, R, h2', h2), bias_gates (4H).
    """

    DENSE: ClassVar = nn.LSTMCell
    mode: Any = "LSTM"


class BPGRUCell(BilinearCell):
    """An ``nn.GRUCell`` with bilinear gates.

    Args: as ``nn.GRUCell``, and
        factors: one FactorSpec for each of ``ih`` and ``hh``, with H outputs for factors of each
            gate, or 3H for factors that the gates share; by default the nearest-square pairs.
        rank: number of terms R where ``factors`` is not given; cut to full rank.

    Shape:
        input (N, I) or (I,); state (N, H) or (H,). w1_ih (G, R, h1, i1), w2_ih (G, R, i2, h2),
        w1_hh (G, R, h1, h1'), w2_hh (G, R, h2', h2), bias_gates (4H) as a BPGRU's.
    """

    DENSE: ClassVar = nn.GRUCell
    mode: Any = "GRU"


class BPRNNCell(BilinearCell):
    """An ``nn.RNNCell`` with bilinear weights.

    Args: as ``nn.RNNCell``, and
        factors: one FactorSpec for each of ``ih`` and ``hh``; by default the nearest-square pairs.
        rank: number of terms R where ``factors`` is not given; cut to full rank.

    Shape:
        input (N, I) or (I,); state (N, H) or (H,). w1_ih (1, R, h1, i1), w2_ih (1, R, i2, h2),
        w1_hh (1, R, h1, h1'), w2_hh (1, R, h2', h2), bias_gates (H).
    """

    FIELDS: ClassVar[tuple[str, ...]] = (*BilinearCell.FIELDS, "nonlinearity")
    DENSE: ClassVar = nn.RNNCell
    nonlinearity: str = "tanh"

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        bias: bool = True,
        nonlinearity: str = "tanh",
        *,
        factors: Mapping[str, FactorSpec] | None = None,
        rank: int = 1,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            *(input_size, hidden_size, bias), factors=factors, rank=rank, device=device, dtype=dtype
        )
        self.nonlinearity = checked_nonlinearity("BPRNNCell", nonlinearity)

    @property
    def mode(self) -> Any:
        """Torch's name of what it computes."""
        return f"RNN_{self.nonlinearity.upper()}"


def _rows(gates: GateProduct | JointProduct, x: Tensor) -> Tensor:
    """Project rows (N, D) to the gates (G, N, H)."""
    return gates.rows(gates(gates.lay(x)))
