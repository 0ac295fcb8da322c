"""An EmbeddingBag whose table is a sum of Kronecker products."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bp_convert.errors import FactorError
from bp_convert.layers.embedding import BPEmbedding, sum_of_products
from bp_convert.values.factors import FactorSpec

MODES = ("sum", "mean", "max")


class BPEmbeddingBag(BPEmbedding):
    """Sum, average or take the largest of bags of rows of a factored table, without building it.

    Where one factor is the same for all rows, as in a low-rank table, bags are summed before the
    factors meet; sums of bags of equal length are one product each, and no row is built.

    Args:
        num_embeddings: V. The pair may cover more rows than that; the spare ones are never read.
        embedding_dim: E = e1*e2.
        mode: ``sum``, ``mean`` or ``max``.
        sparse: as ``nn.EmbeddingBag``'s, for ``to_dense``; gradients of factors are dense.
        include_last_offset: whether offsets end with the number of indices.
        padding_idx: a row that does not count in any bag.
        factors: ``out = (e1, e2)``, ``in = (v1, v2)`` and the number of terms; by default the
            nearest-square pairs.
        rank: number of terms R where ``factors`` is not given; cut to full rank.

    Shape:
        input (B, L), or (N) with offsets (B); output (B, E); w1 (v1, R, e1), w2 (v2, R, e2).

    Raises:
        FactorError: another mode, pairs that do not fit, or a size or rank below 1.
    """

    FIELDS: ClassVar = (
        *("num_embeddings", "embedding_dim", "mode", "sparse", "include_last_offset"),
        "padding_idx",
    )
    DENSE: ClassVar = nn.EmbeddingBag

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        mode: str = "mean",
        sparse: bool = False,
        include_last_offset: bool = False,
        padding_idx: int | None = None,
        *,
        factors: FactorSpec | None = None,
        rank: int = 1,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if mode not in MODES:
            raise FactorError(
                where="BPEmbeddingBag, mode",
                found=repr(mode),
                allowed=", ".join(MODES),
                fix="name one of these",
            )
        super().__init__(
            *(num_embeddings, embedding_dim, padding_idx),
            factors=factors,
            rank=rank,
            device=device,
            dtype=dtype,
        )
        self.mode = mode
        self.sparse = sparse
        self.include_last_offset = include_last_offset

    @staticmethod
    def _laid(terms: int, rows: int) -> tuple[int, int]:
        return rows, terms  # so that a row is read in one go

    def by_term(self) -> tuple[Tensor, Tensor]:
        """Return the factors as (R, v1, e1) and (R, v2, e2)."""
        return self.w1.transpose(0, 1), self.w2.transpose(0, 1)

    @staticmethod
    def _gather(factor: Tensor, rows: Tensor, *, apart: bool) -> Tensor:
        return factor.index_select(0, rows) if apart else factor

    def forward(
        self,
        input: Tensor,
        offsets: Tensor | None = None,
        per_sample_weights: Tensor | None = None,
    ) -> Tensor:
        """Map bags of indices to (B, E), of the factors' dtype under autocast too.

        Args:
            input: (B, L), or (N) with offsets.
            offsets: (B), where each bag starts; (B + 1) with ``include_last_offset``.
            per_sample_weights: of the input's shape, by which rows are multiplied; for sums.

        Raises:
            ValueError: shapes that do not go together.
            IndexError, RuntimeError: an index outside the vocabulary (a GPU reports it late).
        """
        self._check(input, offsets, per_sample_weights)
        if self.way == "expanded" and (table := self.built_for(input)) is not None:
            return self._bags(table, input, offsets, per_sample_weights, every=True)
        weights = None if per_sample_weights is None else per_sample_weights.reshape(-1)
        v1, v2 = self.factors.inp
        if self.mode != "max" and 1 in (v1, v2):
            y = self._summed_first(input, offsets, weights)
        elif self.mode != "max" and input.dim() == 2:
            y = self._in_one_product(input, weights)
        else:
            rows = input.reshape(-1)
            y = self._bags(sum_of_products(*self.look_up(rows)), input, offsets, weights)
        return y.to(self.w1.dtype)

    def _summed_first(
        self, input: Tensor, offsets: Tensor | None, weights: Tensor | None
    ) -> Tensor:
        """Run where one factor is shared by all rows: a bag of the other one is summed first."""
        (v1, _), (e1, e2) = self.factors.inp, self.factors.out
        moves, size, still = (self.w1, e1, self.w2) if v1 > 1 else (self.w2, e2, self.w1)
        if size == 1:  # low rank: two calls, since on few bags each counts
            table = moves.squeeze(2)  # (V, R)
            bags = self._bags(table, self._within(input), offsets, weights, every=True)
            return bags @ still.squeeze(0)  # (B, R) (R, E)
        bags = self._bags(moves.flatten(1), self._within(input), offsets, weights, every=True)
        bags = bags.view(bags.shape[0], self.factors.rank, size)  # (B, R, e)
        return sum_of_products(bags, self.w2) if v1 > 1 else sum_of_products(self.w1, bags)

    def _in_one_product(self, input: Tensor, weights: Tensor | None) -> Tensor:
        """Run sums of bags of equal length: the terms of all rows of a bag lie side by side."""
        bags, length = input.shape
        left, right = self.look_up(input.reshape(-1))  # (B*L, R, e1), (B*L, R, e2)
        keep = None if self.padding_idx is None else input != self.padding_idx  # (B, L)
        if weights is not None:
            left = left * weights[:, None, None]
        if keep is not None:
            left = left * keep.reshape(-1, 1, 1)
        (e1, e2), terms = self.factors.out, self.factors.rank
        left = left.reshape(bags, length * terms, e1)
        right = right.reshape(bags, length * terms, e2)
        y = torch.bmm(left.transpose(1, 2), right).flatten(1)  # (B, E)
        if self.mode == "mean":
            many = max(1, length) if keep is None else keep.sum(1, keepdim=True).clamp(min=1)
            y = y / many
        return y

    def _bags(
        self,
        rows: Tensor,
        input: Tensor,
        offsets: Tensor | None,
        weights: Tensor | None,
        *,
        every: bool = False,
    ) -> Tensor:
        """Reduce rows of each bag, as ``nn.EmbeddingBag`` does.

        Args:
            rows: (N, M), one for each index; or with ``every`` the table (V, M) that they are of.
        """
        at, pad = input, self.padding_idx
        if not every:
            at = torch.arange(input.numel(), device=input.device).view(input.shape)
            if pad is not None:  # all that is left out goes by one more row
                at = torch.where(input == pad, input.numel(), at)
                rows, pad = F.pad(rows, (0, 0, 0, 1)), input.numel()
        return F.embedding_bag(
            at,
            rows,
            offsets,
            mode=self.mode,
            per_sample_weights=None if weights is None else weights.view(input.shape),
            include_last_offset=self.include_last_offset,
            padding_idx=pad,
        )

    def _check(
        self, input: Tensor, offsets: Tensor | None, per_sample_weights: Tensor | None
    ) -> None:
        if input.dim() not in (1, 2) or (offsets is None) != (input.dim() == 2):
            raise ValueError(
                f"BPEmbeddingBag takes indices (B, L), or (N) with offsets; got "
                f"{tuple(input.shape)} {'without' if offsets is None else 'with'} offsets"
            )
        if per_sample_weights is None:
            return
        if self.mode != "sum" or per_sample_weights.shape != input.shape:
            raise ValueError(
                f"per_sample_weights are for sums, and of the indices' shape "
                f"{tuple(input.shape)}; got {tuple(per_sample_weights.shape)}, mode {self.mode!r}"
            )

    @staticmethod
    def predict_macs(
        spec: FactorSpec, shapes: Sequence[tuple[int, ...]], mode: str = "mean"
    ) -> int:
        """Return the multiply-adds of bags (B, L); what is only summed is not counted."""
        total = 0
        for shape in shapes:
            size = spec.out[0] if spec.inp[0] > 1 else spec.out[1]
            if mode != "max" and 1 in spec.inp and size == 1:
                total += shape[0] * spec.rank
            elif mode != "max" and 1 in spec.inp:
                total += shape[0] * (spec.rank if spec.rank > 1 else 0)
            elif mode != "max":
                total += prod(shape) * spec.rank
            else:
                total += prod(shape) * (spec.rank if spec.rank > 1 else 0)
        return total * prod(spec.out)

    def extra_repr(self) -> str:
        """Tell the sizes, the mode, the pairs and the number of terms."""
        more = ", include_last_offset=True" if self.include_last_offset else ""
        return f"{super().extra_repr()}, mode={self.mode!r}{more}"
