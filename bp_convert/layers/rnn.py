"""The stacks of recurrent layers besides the LSTM: the GRU and the plain RNN."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import nn

from bp_convert.errors import FactorError
from bp_convert.layers.recurrent_stack import RecurrentStack
from bp_convert.values.factors import FactorSpec


class BPGRU(RecurrentStack):
    """An ``nn.GRU`` with bilinear gates.

    Each of the three gates has its own factors for the input and for the hidden state; or, where
    a spec's outputs are 3H, the gates above each other share factors. It runs step by step on the
    factors or, where that is faster, as torch's own GRU on weights built from them.

    Args: as ``nn.GRU``, and
        factors: one FactorSpec per matrix, by role: ``ih_l0``, ``hh_l0``, ``ih_l1``, ... (both
            directions use the same); by default the nearest-square pairs.
        rank: number of terms R where ``factors`` is not given; cut to full rank.

    Shape:
        input and output as nn.GRU's, packed sequences included. Per layer: w1_ih (G, R, h1, i1),
        w2_ih (G, R, i2, h2), w1_hh (G, R, h1, h1'), w2_hh (G, R, h2', h2); G = 3 with h1*h2 = H,
        or G = 1 with h1*h2 = 3H; bias (4H): of the reset and the update gate, and of the new gate
        outside and inside of what the reset gate multiplies.

    Raises:
        FactorError: fields that cannot be, or pairs that do not fit.
    """

    DENSE: ClassVar = nn.GRU
    mode: Any = "GRU"


class BPRNN(RecurrentStack):
    """An ``nn.RNN`` with bilinear weights.

    It runs step by step on the factors or, where that is faster, as torch's own RNN on weights
    built from them.

    Args: as ``nn.RNN``, and
        factors: one FactorSpec per matrix, by role: ``ih_l0``, ``hh_l0``, ``ih_l1``, ... (both
            directions use the same); by default the nearest-square pairs.
        rank: number of terms R where ``factors`` is not given; cut to full rank.

    Shape:
        input and output as nn.RNN's, packed sequences included. Per layer: w1_ih (1, R, h1, i1),
        w2_ih (1, R, i2, h2), w1_hh (1, R, h1, h1'), w2_hh (1, R, h2', h2), bias (H).

    Raises:
        FactorError: fields that cannot be, or pairs that do not fit.
    """

    FIELDS: ClassVar[tuple[str, ...]] = (*RecurrentStack.FIELDS, "nonlinearity")
    DENSE: ClassVar = nn.RNN
    nonlinearity: str = "tanh"

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        nonlinearity: str = "tanh",
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        *,
        factors: Mapping[str, FactorSpec] | None = None,
        rank: int = 1,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            *(input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional),
            factors=factors,
            rank=rank,
            device=device,
            dtype=dtype,
        )
        self.nonlinearity = checked_nonlinearity("BPRNN", nonlinearity)

    @property
    def mode(self) -> Any:
        """Torch's name of what it computes."""
        return f"RNN_{self.nonlinearity.upper()}"


def checked_nonlinearity(where: str, name: str) -> str:
    """Return the name of a plain RNN's nonlinearity.

    Raises:
        FactorError: it is neither ``tanh`` nor ``relu``.
    """
    if name not in ("tanh", "relu"):
        raise FactorError(
            where=where,
            found=f"nonlinearity={name!r}",
            allowed="tanh or relu",
            fix="give one of the two",
        )
    return name
