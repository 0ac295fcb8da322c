"""An LSTM whose matrices are sums of Kronecker products."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import nn

from bp_convert.layers.recurrent_stack import RecurrentStack


class BPLSTM(RecurrentStack):
    """An ``nn.LSTM`` with bilinear gates (paper, section III-F).

    Each of the four gates has its own factors for the input and for the hidden state, and one
    bias; or, where a spec's outputs are 4H, the four gates above each other share factors. A
    projection of the state has factors too. It runs step by step on the factors or, where that is
    faster, as torch's fused LSTM on weights built from them.

    Args: as ``nn.LSTM``, and
        factors: one FactorSpec per matrix, by role: ``ih_l0``, ``hh_l0``, ``ih_l1``, ... (both
            directions use the same), and ``hr_l0``, ... where ``proj_size`` is given; by default
            the nearest-square pairs.
        rank: number of terms R where ``factors`` is not given; cut to full rank.

    Shape:
        input (T, N, I), (N, T, I) with ``batch_first``, (T, I), or a PackedSequence; output as
        nn.LSTM's. Per layer: w1_ih (G, R, h1, i1), w2_ih (G, R, i2, h2), w1_hh (G, R, h1, h1'),
        w2_hh (G, R, h2', h2), bias (4H); G = 4 with h1*h2 = H, or G = 1 with h1*h2 = 4H.

    Raises:
        FactorError: fields that cannot be, or pairs that do not fit.
    """

    FIELDS: ClassVar[tuple[str, ...]] = (*RecurrentStack.FIELDS, "proj_size")
    DENSE: ClassVar = nn.LSTM
    mode: Any = "LSTM"
