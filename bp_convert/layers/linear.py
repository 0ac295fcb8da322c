"""A Linear layer whose weight is a sum of Kronecker products."""

from __future__ import annotations

from math import inf
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bp_convert.kron.built_product import built_product, pays_to_build
from bp_convert.kron.contract import bilinear, bilinear_macs
from bp_convert.kron.fits import checked
from bp_convert.kron.policies import paper_factors
from bp_convert.layers.common import BilinearLayer, over_nested
from bp_convert.torch_private import parameters_of
from bp_convert.values.factors import FactorSpec
from bp_convert.ways.fused import fused

MANY = 4_000_000  # multiply-adds saved in a call, for which an expanded layer runs on its factors


class BPLinear(BilinearLayer):
    """Apply ``Y = sum_r w1[r] X w2[r] + B`` to inputs reshaped row-wise to X (paper, eq. 3).

    Computes what an ``nn.Linear`` with ``weight = sum_r kron(w1[r], w2[r]^T)`` computes, in two
    small matrix products and without building that weight.

    Args:
        in_features: D = d1*d2.
        out_features: K = k1*k2.
        bias: add a learnable bias.
        factors: pairs and number of terms; by default both widths' nearest-square pairs.
        rank: number of terms R where ``factors`` is not given; cut to full rank.

    Shape:
        input (..., D), output (..., K); w1 (R, k1, d1), w2 (R, d2, k2), bias (K).

    Raises:
        FactorError: pairs whose products are not the widths, or a width or rank below 1.
    """

    FIELDS: ClassVar[tuple[str, ...]] = ("in_features", "out_features", "bias")
    DENSE: ClassVar = nn.Linear
    EXPANDS = FUSES = True

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        factors: FactorSpec | None = None,
        rank: int = 1,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if factors is None:
            factors = paper_factors(in_features, out_features, rank)
        self.in_features = in_features
        self.out_features = out_features
        factors = checked("BPLinear", factors, inputs=in_features, outputs=out_features)
        self.hold_(factors, bias=bias, device=device, dtype=dtype)

    def forward(self, input: Tensor) -> Tensor:
        """Map (..., D) to (..., K); of a nested tensor each sequence."""
        if self.way == "expanded" and (built := self.built_for(input)) is not None:
            weight, turned, held, most = built
            if input.numel() < most:
                bias = held("bias", self)
                bias = self.bias if bias is self else bias  # one that is computed is not held
                if bias is not None and input.dim() == 2:
                    return torch.addmm(bias, input, turned)  # what F.linear comes to
                if not input.is_nested:
                    return F.linear(input, weight, bias)
        if input.is_nested:
            return over_nested(self, input)
        w1, w2, bias = self.w1, self.w2, self.bias
        if self.way == "fused" and not self.training:
            y = fused(input, w1, w2, bias, self.factors)
            if y is not None:
                return y
        if self.way == "expanded" and self.trains_on_plain(input, w1, w2, bias):
            rows = input.numel() // self.in_features
            if pays_to_build(bilinear_macs(self.factors), self.factors, rows):
                return built_product(input, w1, w2, bias)
        return bilinear(input, w1, w2, bias)

    def expand(self) -> Any:
        """Build the weight; and tell from how many numbers on a call goes on the factors all the
        same, since it saves so many multiply-adds.

        Returns:
            The weight (K, D), the same turned, what gets the bias of where parameters are held, and
            that number.
        """
        weight = super().expand()
        if weight is None:
            return None
        dense = self.in_features * self.out_features
        saved = dense - 2 * bilinear_macs(self.factors)  # small products are less efficient
        most = self.in_features * MANY / saved if saved > 0 else inf
        return weight, weight.t(), parameters_of(self).get, most

    def extra_repr(self) -> str:
        """Tell the widths, the pairs and the number of terms."""
        (k1, k2), (d1, d2) = self.factors.out, self.factors.inp
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, out={k1}x{k2}, in={d1}x{d2}, rank={self.factors.rank}"
        )
