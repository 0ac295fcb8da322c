"""A layer of two inputs, ``x1^T A[k] x2``, whose weight is a sum of Kronecker products."""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bp_convert.kron.contract import bilinear, bilinear_macs
from bp_convert.kron.fits import checked
from bp_convert.kron.policies import paper_factors
from bp_convert.layers.common import BilinearLayer, init_factors_
from bp_convert.values.factors import FactorSpec


class BPBilinear(BilinearLayer):
    """Compute what an ``nn.Bilinear`` computes whose weight, read as a matrix (K, I1*I2), is
    ``sum_r kron(w1[r], w2[r]^T)``.

    Where the pair of the inputs is I1 x I2, each input is projected by itself; else the factors
    multiply the outer product of the two.

    Args:
        in1_features: I1.
        in2_features: I2; d1*d2 = I1*I2.
        out_features: K = k1*k2.
        bias: add a learnable bias.
        factors: pairs and number of terms; by default the nearest-square pairs.
        rank: number of terms R where ``factors`` is not given; cut to full rank.

    Shape:
        inputs (..., I1) and (..., I2), output (..., K); w1 (R, k1, d1), w2 (R, d2, k2), bias (K).

    Raises:
        FactorError: pairs whose products are not the widths, or a width or rank below 1.
    """

    FIELDS: ClassVar = ("in1_features", "in2_features", "out_features", "bias")
    DENSE: ClassVar = nn.Bilinear
    EXPANDS = True

    def __init__(
        self,
        in1_features: int,
        in2_features: int,
        out_features: int,
        bias: bool = True,
        *,
        factors: FactorSpec | None = None,
        rank: int = 1,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        inputs = in1_features * in2_features
        if factors is None:
            factors = paper_factors(inputs, out_features, rank)
        self.in1_features = in1_features
        self.in2_features = in2_features
        self.out_features = out_features
        factors = checked("BPBilinear", factors, inputs=inputs, outputs=out_features)
        self.hold_(factors, bias=bias, device=device, dtype=dtype)

    def reset_parameters(self) -> None:
        """Draw factors so that the weight varies as a fresh torch layer's: 1 / (3 I1)."""
        init_factors_(self.w1, self.w2, self.factors.rank, 1 / (3 * self.in1_features))
        if self.bias is not None:
            nn.init.uniform_(self.bias, -(self.in1_features**-0.5), self.in1_features**-0.5)

    def forward(self, input1: Tensor, input2: Tensor) -> Tensor:
        """Map (..., I1) and (..., I2) to (..., K)."""
        if self.way == "expanded" and (weight := self.built_for(input1)) is not None:
            return F.bilinear(input1, input2, weight, self.bias)
        (k1, k2), (d1, d2), terms = self.factors.out, self.factors.inp, self.factors.rank
        lead = input1.shape[:-1]
        if (d1, d2) == (self.in1_features, self.in2_features):
            left = input1.reshape(-1, d1) @ self.w1.reshape(terms * k1, d1).t()  # (N, R*k1)
            right = input2.reshape(-1, d2) @ self.w2.transpose(0, 1).reshape(d2, terms * k2)
            parts = left.view(-1, terms, k1).transpose(1, 2), right.view(-1, terms, k2)
            y = torch.bmm(*parts).reshape(*lead, k1 * k2)
        else:
            y = bilinear(
                (input1.unsqueeze(-1) * input2.unsqueeze(-2)).flatten(-2), self.w1, self.w2
            )
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def fit_(self, weight: Tensor) -> float:
        """Set the factors to the nearest Kronecker sum of ``weight`` (K, I1, I2); return the
        relative Frobenius error."""
        return super().fit_(weight.flatten(1))

    def dense_weight(self) -> Tensor:
        """Build the weight (K, I1, I2); differentiable."""
        return super().dense_weight().view(-1, self.in1_features, self.in2_features)

    @staticmethod
    def predict_macs(spec: FactorSpec, inputs: tuple[int, int]) -> int:
        """Return the multiply-adds of one row."""
        (k1, k2), (d1, d2) = spec.out, spec.inp
        if (d1, d2) == inputs:
            return spec.rank * (k1 * d1 + d2 * k2 + k1 * k2)
        return bilinear_macs(spec)

    def extra_repr(self) -> str:
        """Tell the widths, the pairs and the number of terms."""
        (k1, k2), (d1, d2) = self.factors.out, self.factors.inp
        return (
            f"in1_features={self.in1_features}, in2_features={self.in2_features}, "
            f"out_features={self.out_features}, bias={self.bias is not None}, "
            f"out={k1}x{k2}, in={d1}x{d2}, rank={self.factors.rank}"
        )
