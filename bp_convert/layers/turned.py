"""A linear layer whose weight lies the other way round, (D, K): transformers' Conv1D, of GPT-2."""

from __future__ import annotations

import sys
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from bp_convert.fields.carry import blank, fields_of, release
from bp_convert.layers.linear import BPLinear
from bp_convert.values.factors import FactorSpec


class NotImported(nn.Module):
    """Stands for a class that no program can have an object of yet."""


def conv1d() -> type[nn.Module]:
    """Return transformers' class; nothing is imported for it."""
    home = sys.modules.get("transformers.pytorch_utils")
    found: type[nn.Module] = getattr(home, "Conv1D", NotImported)
    return found


class BPConv1D(BPLinear):
    """Compute what transformers' ``Conv1D`` of ``weight = sum_r kron(w1[r], w2[r]^T)^T`` computes.

    Args:
        nx: number of inputs D = d1*d2.
        nf: number of outputs K = k1*k2.
        factors: pairs and number of terms; by default both widths' nearest-square pairs.
        rank: number of terms R where ``factors`` is not given; cut to full rank.

    Shape:
        input (..., D), output (..., K); w1 (R, k1, d1), w2 (R, d2, k2), bias (K).

    Raises:
        FactorError: pairs whose products are not the widths, or a width or rank below 1.
    """

    FIELDS: ClassVar = ("nx", "nf")

    def __init__(
        self,
        nx: int,
        nf: int,
        *,
        factors: FactorSpec | None = None,
        rank: int = 1,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(nx, nf, factors=factors, rank=rank, device=device, dtype=dtype)
        self.nx, self.nf = nx, nf

    def fit_(self, weight: Tensor) -> float:
        """Set the factors to the nearest Kronecker sum of ``weight`` (D, K); return the relative
        Frobenius error."""
        return super().fit_(weight.t())

    @property
    def weight(self) -> Tensor:
        """The dense weight (D, K), built anew at each access, for code that looks at it."""
        return self.dense_weight().t()

    def to_dense(self) -> Any:
        """Return transformers' layer of the same weight; nothing is shared with it.

        Raises:
            ImportError: transformers is not installed.
        """
        from transformers.pytorch_utils import Conv1D

        return release(blank(Conv1D, fields_of(self, self.FIELDS), self.w1), self)
