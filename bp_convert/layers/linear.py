"""A Linear layer whose weight is a sum of Kronecker products."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from typing_extensions import Self

from bp_convert.kron.contract import bilinear
from bp_convert.kron.nearest import nearest_kronecker_sum, reconstruct
from bp_convert.kron.policies import paper_factors
from bp_convert.layers.carry import adopt, blank, fields_of, release
from bp_convert.layers.common import checked, init_factors_, over_nested
from bp_convert.values.factors import FactorSpec


class BPLinear(nn.Module):
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

    FIELDS: ClassVar = ("in_features", "out_features", "bias")  # the widths first

    bias: Tensor | None

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
        self.factors = checked("BPLinear", factors, inputs=in_features, outputs=out_features)
        (k1, k2), (d1, d2), terms = self.factors.out, self.factors.inp, self.factors.rank
        where: Any = {"device": device, "dtype": dtype}
        self.w1 = nn.Parameter(torch.empty(terms, k1, d1, **where))
        self.w2 = nn.Parameter(torch.empty(terms, d2, k2, **where))
        if bias:
            self.bias = nn.Parameter(torch.empty(out_features, **where))
        else:
            self.register_parameter("bias", None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw factors so that the weight varies as a fresh ``nn.Linear``'s: 1 / (3 D)."""
        init_factors_(self.w1, self.w2, self.factors.rank, 1 / (3 * self.in_features))
        if self.bias is not None:
            bound = self.in_features**-0.5
            nn.init.uniform_(self.bias, -bound, bound)

    def forward(self, input: Tensor) -> Tensor:
        """Map (..., D) to (..., K); of a nested tensor each sequence."""
        if input.is_nested:
            return over_nested(self, input)
        y = bilinear(input, self.w1, self.w2)
        if self.bias is None:
            return y
        # Nothing needs the product itself again, so the sum takes its place.
        return y.add_(self.bias if self.bias.dtype == y.dtype else self.bias.to(y.dtype))

    @classmethod
    def from_dense(
        cls, layer: nn.Linear, *, factors: FactorSpec | None = None, rank: int = 1
    ) -> Self:
        """Return the nearest bilinear layer to a trained one; nothing is shared with it.

        Raises:
            FactorError: pairs that do not fit, or weights that are not finite.
        """
        new = cls(
            **fields_of(layer, cls.FIELDS),
            factors=factors,
            rank=rank,
            device=layer.weight.device,
            dtype=layer.weight.dtype,
        )
        new.fit_(layer.weight)
        return adopt(new, layer)

    @torch.no_grad()
    def fit_(self, weight: Tensor) -> float:
        """Set the factors to the nearest Kronecker sum of ``weight`` (K, D); return the relative
        Frobenius error."""
        spec = self.factors
        fit = nearest_kronecker_sum(weight, spec.out, spec.inp, spec.rank)
        self.w1.copy_(fit.w1)
        self.w2.copy_(fit.w2)
        return fit.error

    def dense_weight(self) -> Tensor:
        """Build the weight (K, D); differentiable."""
        return reconstruct(self.w1, self.w2)

    @property
    def weight(self) -> Tensor:
        """The dense weight (K, D), built anew at each access, for code that looks at it."""
        return self.dense_weight()

    def to_dense(self) -> nn.Linear:
        """Return the ``nn.Linear`` of the same weight; nothing is shared with it."""
        return release(blank(nn.Linear, fields_of(self, self.FIELDS), self.w1), self)

    def extra_repr(self) -> str:
        """Tell the widths, the pairs and the number of terms."""
        (k1, k2), (d1, d2) = self.factors.out, self.factors.inp
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, out={k1}x{k2}, in={d1}x{d2}, rank={self.factors.rank}"
        )
