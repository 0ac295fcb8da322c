"""A stack of matrices of one size, such as a layer's experts: dense, and each a sum of Kronecker
products of its own."""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bp_convert.experts.posing import At, Posing
from bp_convert.kron.contract import bilinear, bilinear_each
from bp_convert.kron.fits import checked
from bp_convert.kron.nearest import nearest_kronecker_sum, reconstruct
from bp_convert.kron.policies import paper_factors
from bp_convert.layers.common import BilinearLayer
from bp_convert.values.factors import FactorSpec


class Stack(Posing):
    """A stack of dense matrices, as a class of experts holds it in a parameter (E, K, D).

    Args:
        in_features: number of inputs D.
        out_features: number of outputs K.
        many: number of matrices E.

    Attributes:
        read: how often matrices were read other than by a product.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        many: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features, self.many = in_features, out_features, many
        self.read = 0
        empty = torch.empty(many, out_features, in_features, device=device, dtype=dtype)
        self.weight = nn.Parameter(empty)
        nn.init.uniform_(self.weight, -(in_features**-0.5), in_features**-0.5)

    @classmethod
    def of(cls, weight: nn.Parameter) -> Stack:
        """Return a stack of this very parameter."""
        many, outputs, inputs = weight.shape
        made = cls(inputs, outputs, many, device="meta")
        made.weight = weight
        return made

    @property
    def first(self) -> nn.Parameter:
        return self.weight

    @property
    def shape(self) -> torch.Size:
        return self.weight.shape

    def matrices(self, at: At = None) -> Tensor:
        self.read += 1
        return self.weight if at is None else self.weight[at]

    def apply_to(self, x: Tensor, at: At, *, back: bool) -> Tensor:
        weight = self.weight if at is None else self.weight[at]
        if weight.dim() == 2:
            return F.linear(x, weight.t() if back else weight)
        return torch.matmul(x, weight if back else weight.transpose(1, 2))


class BPStack(Posing, BilinearLayer):
    """Stand for a parameter (E, K, D) whose matrices are ``W[e] = sum_r kron(w1[e,r], w2[e,r]^T)``.

    It takes the parameter's place in the class that holds it, which goes on as before:
    ``F.linear(x, stack[e])``, ``x @ stack[e]``, batched and grouped products run on the factors.
    What else is done with it builds the matrices first.

    Args:
        in_features: D = d1*d2, the last axis.
        out_features: K = k1*k2.
        many: number of matrices E, at least 2.
        factors: pairs and number of terms; by default both widths' nearest-square pairs.
        rank: number of terms R where ``factors`` is not given; cut to full rank.

    Shape:
        w1 (E, R, k1, d1), w2 (E, R, d2, k2).

    Raises:
        FactorError: pairs whose products are not the widths, or a width or rank below 1.
    """

    FIELDS: ClassVar[tuple[str, ...]] = ("in_features", "out_features", "many")
    DENSE: ClassVar = Stack

    def __init__(
        self,
        in_features: int,
        out_features: int,
        many: int,
        *,
        factors: FactorSpec | None = None,
        rank: int = 1,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if factors is None:
            factors = paper_factors(in_features, out_features, rank)
        self.in_features, self.out_features, self.many = in_features, out_features, many
        factors = checked("BPStack", factors, inputs=in_features, outputs=out_features)
        self.hold_(factors, bias=False, device=device, dtype=dtype, groups=many)

    @property
    def first(self) -> nn.Parameter:
        return self.w1

    @property
    def shape(self) -> torch.Size:
        return torch.Size((self.many, self.out_features, self.in_features))

    def matrices(self, at: At = None) -> Tensor:
        w1, w2 = (self.w1, self.w2) if at is None else (self.w1[at], self.w2[at])
        if w1.dim() == 3:
            return reconstruct(w1, w2)
        return torch.stack([reconstruct(*one) for one in zip(w1, w2, strict=True)])

    def dense_weight(self) -> Tensor:
        """Build the matrices; differentiable."""
        return self.matrices()

    @torch.no_grad()
    def fit_(self, weight: Tensor) -> float:
        """Set the factors to the nearest Kronecker sum of each matrix; return the relative
        Frobenius error of them all."""
        spec, lost, total = self.factors, 0.0, 0.0
        for number, matrix in enumerate(weight):
            fit = nearest_kronecker_sum(matrix, spec.out, spec.inp, spec.rank)
            self.w1[number].copy_(fit.w1)
            self.w2[number].copy_(fit.w2)
            energy = float(matrix.double().square().sum())
            lost, total = lost + fit.error**2 * energy, total + energy
        return (lost / total) ** 0.5 if total else 0.0

    def apply_to(self, x: Tensor, at: At, *, back: bool) -> Tensor:
        w1, w2 = (self.w1, self.w2) if at is None else (self.w1[at], self.w2[at])
        if back:  # kron(w1, w2^T)^T = kron(w1^T, w2)
            w1, w2 = w1.transpose(-2, -1), w2.transpose(-2, -1)
        return bilinear(x, w1, w2) if w1.dim() == 3 else bilinear_each(x, w1, w2)

    def extra_repr(self) -> str:
        """Tell the sizes, the pairs and the number of terms."""
        (k1, k2), (d1, d2) = self.factors.out, self.factors.inp
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"many={self.many}, out={k1}x{k2}, in={d1}x{d2}, rank={self.factors.rank}"
        )
