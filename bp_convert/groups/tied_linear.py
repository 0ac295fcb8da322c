"""A Linear layer that computes with the table of an embedding, on the table's own factors."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bp_convert.errors import FactorError
from bp_convert.kron.contract import bilinear
from bp_convert.kron.fits import wrong_pair
from bp_convert.kron.nearest import nearest_kronecker_sum, reconstruct
from bp_convert.kron.policies import paper_factors
from bp_convert.layers.common import over_nested
from bp_convert.layers.embedding import BPEmbedding
from bp_convert.layers.linear import BPLinear
from bp_convert.torch_private import buffers_of
from bp_convert.values.factors import FactorSpec
from bp_convert.ways.kept import Source


class BPTiedLinear(BPLinear):
    """Apply ``y = T x + b``, where the table T (V, E) is that of a ``BPEmbedding``: ``tie_`` makes
    the table's factors its own. They lie as the table's do.

    Args:
        in_features: E = e1*e2.
        out_features: V. The pair may cover more rows than that, as a table's may.
        bias: add a learnable bias.
        factors: ``out = (v1, v2)``, ``in = (e1, e2)`` and the number of terms; by default the
            nearest-square pairs.
        rank: number of terms R where ``factors`` is not given; cut to full rank.

    Shape:
        input (..., E), output (..., V); w1 (R, v1, e1), w2 (R, v2, e2), bias (V).

    Raises:
        FactorError: pairs that do not fit, or a width or rank below 1.
    """

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
        nn.Module.__init__(self)
        if factors is None:
            factors = paper_factors(in_features, out_features, rank)
        if prod(factors.inp) != in_features:
            raise wrong_pair("BPTiedLinear", "in", factors.inp, f"two factors of {in_features}")
        if prod(factors.out) < out_features:
            allowed = f"a product of at least {out_features}"
            raise wrong_pair("BPTiedLinear", "out", factors.out, allowed)
        self.in_features = in_features
        self.out_features = out_features
        self.factors = factors.model_copy(update={"rank": min(factors.rank, factors.full_rank)})
        # Whose padding row counts; in a list, as it is no part of this layer.
        self.table: list[BPEmbedding] = []
        (v1, v2), (e1, e2), terms = self.factors.out, self.factors.inp, self.factors.rank
        where: Any = {"device": device, "dtype": dtype}
        self.w1 = nn.Parameter(torch.empty(terms, v1, e1, **where))
        self.w2 = nn.Parameter(torch.empty(terms, v2, e2, **where))
        if bias:
            self.bias = nn.Parameter(torch.empty(out_features, **where))
        else:
            self.register_parameter("bias", None)
        self.reset_parameters()

    def tie_(self, table: BPEmbedding) -> None:
        """Take a table's factors, and its padding row, for its own.

        Raises:
            FactorError: factors of other sizes.
        """
        if (self.w1.shape, self.w2.shape) != (table.w1.shape, table.w2.shape):
            raise FactorError(
                where="BPTiedLinear.tie_",
                found=f"a table of {table.factors}",
                allowed=f"one whose pairs and terms are those of {self.factors}, out and in "
                "exchanged",
                fix="make both of the same pairs and number of terms",
            )
        self.w1, self.w2 = table.w1, table.w2
        self.table = [table]

    @property
    def padding(self) -> tuple[int, Tensor] | None:
        """The row that stands apart in the table, and what it is; None where none does."""
        table = next((one for one in self.table if one.padding_idx is not None), None)
        if table is None or table.padding_idx is None:
            return None
        return table.padding_idx, table.padding_row

    def forward(self, input: Tensor) -> Tensor:
        """Map (..., E) to (..., V); of a nested tensor each sequence."""
        if input.is_nested:
            return over_nested(self, input)
        if self.way == "expanded" and (built := self.built_for(input)) is not None:
            weight, *_, most = built
            if input.numel() < most:
                return F.linear(input, weight, self.bias)
        y = bilinear(input, self.w1, self.w2.transpose(1, 2))
        if y.shape[-1] > self.out_features:
            y = y[..., : self.out_features].contiguous()
        if self.padding is not None:
            at, row = self.padding
            y[..., at] = F.linear(input, row[None].to(self.w1.dtype)).squeeze(-1)
        if self.bias is None:
            return y
        return y.add_(self.bias if self.bias.dtype == y.dtype else self.bias.to(y.dtype))

    def sources(self) -> Sequence[Source]:
        """Return where the factors are held, and the row that stands apart."""
        tables = self.table if self.padding is not None else ()
        return *super().sources(), *((buffers_of(one), "padding_row") for one in tables)

    @torch.no_grad()
    def fit_(self, weight: Tensor) -> float:
        """Set the factors to the nearest Kronecker sum of ``weight`` (V, E), and so the table's to
        which they are tied; return the relative Frobenius error."""
        spare = prod(self.factors.out) - self.out_features
        spec = self.factors
        fit = nearest_kronecker_sum(F.pad(weight, (0, 0, 0, spare)), spec.out, spec.inp, spec.rank)
        self.w1.copy_(fit.w1)
        self.w2.copy_(fit.w2.transpose(1, 2))
        total = float(torch.linalg.vector_norm(weight, dtype=torch.float64))
        gap = torch.linalg.vector_norm(self.dense_weight() - weight, dtype=torch.float64)
        return float(gap) / total if total else 0.0

    def dense_weight(self) -> Tensor:
        """Build the weight (V, E); differentiable. Without data while a loader fills it in."""
        parts = [self.w1, self.w2, *(() if self.padding is None else self.padding[1:])]
        if any(one.is_meta for one in parts):
            return self.w1.new_empty(self.out_features, self.in_features, device="meta")
        table = reconstruct(self.w1, self.w2.transpose(1, 2))[: self.out_features]
        if self.padding is None:
            return table
        at, row = self.padding
        pads = torch.arange(self.out_features, device=table.device) == at
        return torch.where(pads[:, None], row.to(table.dtype), table)
