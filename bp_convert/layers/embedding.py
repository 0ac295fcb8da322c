"""An Embedding whose table is a sum of Kronecker products."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import Self

from bp_convert.errors import FactorError
from bp_convert.kron.fits import wrong_pair
from bp_convert.kron.nearest import nearest_kronecker_sum
from bp_convert.kron.policies import paper_factors
from bp_convert.layers.common import BilinearLayer, init_factors_
from bp_convert.torch_private import buffers_of, is_watched
from bp_convert.values.factors import FactorSpec
from bp_convert.ways.kept import Source

GROUPS = 64  # rows of a factor up to which one product for each is made
LONG = 1024  # numbers of one of its rows from which on that pays


class BPEmbedding(BilinearLayer):
    """Look rows of ``sum_r kron(w1[r], w2[r])`` up without building it (paper, section III-E).

    Row v of the table is ``sum_r outer(w1[r, v // v2], w2[r, v % v2])``, flattened row-wise.

    Args:
        num_embeddings: V. The pair may cover more rows than that; the spare ones are never read.
        embedding_dim: E = e1*e2.
        padding_idx: a row that stands apart: it is kept as it is, zero in a fresh layer, in the
            buffer ``padding_row``, and receives no gradient.
        factors: ``out = (e1, e2)``, ``in = (v1, v2)`` and the number of terms; by default the
            nearest-square pairs.
        rank: number of terms R where ``factors`` is not given; cut to full rank.

    Shape:
        input (...) of integers, output (..., E); w1 (R, v1, e1), w2 (R, v2, e2).

    Raises:
        FactorError: pairs that do not fit, or a size or rank below 1.
    """

    FIELDS: ClassVar[tuple[str, ...]] = ("num_embeddings", "embedding_dim", "padding_idx")
    DENSE: ClassVar[type[nn.Module]] = nn.Embedding
    EXPANDS = True
    # torch's fields, for code that reads them.
    max_norm: ClassVar[None] = None
    norm_type: ClassVar[float] = 2.0
    scale_grad_by_freq: ClassVar[bool] = False
    sparse: bool = False

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        *,
        factors: FactorSpec | None = None,
        rank: int = 1,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if factors is None:
            factors = paper_factors(num_embeddings, embedding_dim, rank)
        self.num_embeddings = num_embeddings
        self.embedding_dim = embedding_dim
        self.padding_idx = _row(padding_idx, num_embeddings)
        self.factors = _checked(type(self).__name__, factors, num_embeddings, embedding_dim)
        (e1, e2), (v1, v2), terms = self.factors.out, self.factors.inp, self.factors.rank
        where: Any = {"device": device, "dtype": dtype}
        self.w1 = nn.Parameter(torch.empty(*self._laid(terms, v1), e1, **where))
        self.w2 = nn.Parameter(torch.empty(*self._laid(terms, v2), e2, **where))
        self.padding_row: Tensor
        if self.padding_idx is not None:
            self.register_buffer("padding_row", torch.empty(embedding_dim, **where))
        self.reset_parameters()

    @staticmethod
    def _laid(terms: int, rows: int) -> tuple[int, int]:
        """Return the first sizes of a factor."""
        return terms, rows

    def by_term(self) -> tuple[Tensor, Tensor]:
        """Return the factors as (R, v1, e1) and (R, v2, e2)."""
        return self.w1, self.w2

    def reset_parameters(self) -> None:
        """Draw factors so that the table varies as a fresh ``nn.Embedding``'s: 1."""
        init_factors_(self.w1, self.w2, self.factors.rank, 1.0)
        if self.padding_idx is not None:
            nn.init.zeros_(self.padding_row)

    def forward(self, input: Tensor) -> Tensor:
        """Map indices (...) to rows (..., E), of the factors' dtype under autocast too.

        Raises:
            IndexError: an index outside the vocabulary (on the CPU; a GPU reports it late).
        """
        if self.way == "expanded" and (table := self.built_for(input)) is not None:
            return torch.embedding(table, input)  # what F.embedding comes to
        rows = input.reshape(-1)  # (N,)
        y = self._in_groups(rows) if self._groups(rows) else sum_of_products(*self.look_up(rows))
        if self.padding_idx is not None:
            pads = (rows == self.padding_idx)[:, None]  # (N, 1)
            y = torch.where(pads, self.padding_row.to(y.dtype), y)
        return y.to(self.w1.dtype).view(*input.shape, self.embedding_dim)

    def sources(self) -> Sequence[Source]:
        """Return where the factors are held, and the row that stands apart."""
        rows = () if self.padding_idx is None else ((buffers_of(self), "padding_row"),)
        return *super().sources(), *rows

    def look_up(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return the rows (N, R, e1) and (N, R, e2) of the factors for indices (N,), or one of
        them as (1, R, e) where all indices share it.

        Raises:
            IndexError: an index outside the vocabulary.
        """
        v1, v2 = self.factors.inp
        high, low = self._places(self._within(rows))
        try:
            left = self._gather(self.w1, high, apart=v1 > 1)
            return left, self._gather(self.w2, low, apart=v2 > 1 or v1 == 1)
        except RuntimeError as error:  # the fast path's word for what nn.Embedding calls IndexError
            if bool(((rows < 0) | (rows >= self.num_embeddings)).any()):
                raise self._outside() from error
            raise

    def _groups(self, rows: Tensor) -> bool:
        # How many indices there are of each decides what is called: not in what is recorded.
        plain = type(rows) is Tensor and rows.is_cpu and not torch.compiler.is_compiling()
        return plain and in_groups(self.factors, len(rows)) and not is_watched()

    def _in_groups(self, rows: Tensor) -> Tensor:
        """Return the rows (N, E) for indices (N,): one product for each row of the shorter factor.

        Raises:
            IndexError: an index outside the vocabulary.
        """
        low, high = rows.aminmax()
        if low < 0 or high >= self.num_embeddings:
            raise self._outside()
        (e1, e2), (v1, v2), terms = self.factors.out, self.factors.inp, self.factors.rank
        short, other = self.by_term() if v1 <= v2 else self.by_term()[::-1]
        places = self._places(rows) if v1 <= v2 else self._places(rows)[::-1]
        order = places[0].argsort(stable=True)
        counts = torch.bincount(places[0], minlength=short.shape[1]).tolist()
        taken = other.index_select(1, places[1][order]).permute(1, 2, 0)  # (N, e, R)
        made = [
            part.reshape(-1, terms) @ short[:, at]  # (n*e, e of the shorter)
            for at, part in enumerate(torch.split(taken, counts))
            if len(part)
        ]
        y = torch.cat(made).view(len(rows), other.shape[2], short.shape[2])
        if v1 <= v2:
            y = y.transpose(1, 2)  # (N, e1, e2)
        return y.reshape(-1, e1 * e2).index_select(0, order.argsort())

    def _places(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return which row of each factor indices (N,) meet."""
        v1, v2 = self.factors.inp
        high = rows if v2 == 1 else torch.div(rows, v2, rounding_mode="floor")
        return high, rows if v1 == 1 else rows - high * v2

    def _outside(self) -> IndexError:
        return IndexError(f"index out of range: the table has {self.num_embeddings} rows")

    def _within(self, rows: Tensor) -> Tensor:
        """Send what would meet a spare row out of the table."""
        held = prod(self.factors.inp)
        if held == self.num_embeddings:
            return rows
        return rows.masked_fill(rows >= self.num_embeddings, held)

    @staticmethod
    def _gather(factor: Tensor, rows: Tensor, *, apart: bool) -> Tensor:
        """Take rows (N,) of each term: (N, R, e); (1, R, e) where they are not ``apart``.

        Only the rows that are asked for are read: a long factor is never laid out anew.
        """
        return (factor.index_select(1, rows) if apart else factor).transpose(0, 1)

    @classmethod
    def from_dense(cls, layer: Any, *, factors: FactorSpec | None = None, rank: int = 1) -> Self:
        """Return the nearest bilinear table to a trained one; nothing is shared with it.

        Raises:
            FactorError: a field that a factored table cannot honour (max_norm,
                scale_grad_by_freq, sparse), pairs that do not fit, or weights that are not finite.
        """
        reason = unsupported(layer)
        if reason is not None:
            raise FactorError(
                where=f"{cls.DENSE.__name__}({layer.num_embeddings}, {layer.embedding_dim})",
                found=reason,
                allowed="a plain table",
                fix="keep this layer dense",
            )
        return super().from_dense(layer, factors=factors, rank=rank)

    @torch.no_grad()
    def fit_(self, weight: Tensor) -> float:
        """Set the factors to the nearest Kronecker sum of ``weight`` (V, E); return the relative
        Frobenius error over the vocabulary's rows. The padding row is kept as it is."""
        spec = self.factors
        spare = prod(spec.inp) - self.num_embeddings
        table = F.pad(weight, (0, 0, 0, spare))  # (v1*v2, E)
        fit = nearest_kronecker_sum(table, spec.inp, spec.out, spec.rank)
        w1, w2 = self.by_term()
        w1.copy_(fit.w1)
        w2.copy_(fit.w2.transpose(1, 2))
        if self.padding_idx is not None:
            self.padding_row.copy_(weight[self.padding_idx])
        elif spare == 0:
            return fit.error
        # Spare rows do not count, and the padding row stands apart.
        total = float(torch.linalg.vector_norm(weight, dtype=torch.float64))
        gap = torch.linalg.vector_norm(self.dense_weight() - weight, dtype=torch.float64)
        return float(gap) / total if total else 0.0

    def dense_weight(self) -> Tensor:
        """Build the table (V, E); differentiable."""
        (e1, e2), (v1, v2), terms = self.factors.out, self.factors.inp, self.factors.rank
        w1, w2 = self.by_term()
        table = w1.reshape(terms, -1).t() @ w2.reshape(terms, -1)  # (v1*e1, v2*e2)
        table = table.view(v1, e1, v2, e2).transpose(1, 2).reshape(v1 * v2, e1 * e2)  # (V+, E)
        table = table[: self.num_embeddings]
        if self.padding_idx is None:
            return table
        pads = torch.arange(self.num_embeddings, device=table.device) == self.padding_idx
        return torch.where(pads[:, None], self.padding_row.to(table.dtype), table)

    @staticmethod
    def predict_macs(spec: FactorSpec, shapes: Sequence[tuple[int, ...]]) -> int:
        """Return the multiply-adds of looking up indices of these shapes; one term multiplies
        element-wise, which is not counted."""
        terms = spec.rank if spec.rank > 1 else 0
        return sum(prod(shape) for shape in shapes) * terms * prod(spec.out)

    def extra_repr(self) -> str:
        """Tell the sizes, the pairs and the number of terms."""
        (e1, e2), (v1, v2) = self.factors.out, self.factors.inp
        pad = "" if self.padding_idx is None else f", padding_idx={self.padding_idx}"
        return (
            f"{self.num_embeddings}, {self.embedding_dim}{pad}, "
            f"out={e1}x{e2}, in={v1}x{v2}, rank={self.factors.rank}"
        )


def in_groups(spec: FactorSpec, count: int) -> bool:
    """Return whether so many indices are looked up in groups that share a row of the shorter
    factor, so that its rows, R*e numbers each, are not copied for every index."""
    (e1, e2), (v1, v2) = spec.out, spec.inp
    few, width = min((v1, e1), (v2, e2))
    return 1 < few <= GROUPS and spec.rank * width >= LONG and count >= 2 * few


def unsupported(layer: nn.Embedding | nn.EmbeddingBag) -> str | None:
    """Return which field of a table the factored form cannot honour, or None."""
    if layer.max_norm is not None:
        return f"max_norm={layer.max_norm} renormalises rows that are never stored"
    if layer.scale_grad_by_freq:
        return "scale_grad_by_freq: rows share their factors"
    if layer.sparse and isinstance(layer, nn.Embedding):
        return "sparse=True: the factors' gradients are dense"
    return None


def sum_of_products(left: Tensor, right: Tensor) -> Tensor:
    """Sum the outer products of (N, R, e1) and (N, R, e2) over R: (N, e1*e2).

    Either N may be 1, where all rows share that factor.
    """
    (n1, terms, e1), (n2, _, e2) = left.shape, right.shape
    if terms == 1:
        return (left.transpose(1, 2) * right).flatten(1)  # (N, e1, 1) * (N, 1, e2)
    columns = left.transpose(1, 2)  # (N, e1, R)
    if n2 == 1:  # one product for all rows, as in a low-rank table
        return (columns.reshape(-1, terms) @ right[0]).view(n1, e1 * e2)
    if n1 == 1:
        y = right.transpose(1, 2).reshape(-1, terms) @ left[0]  # (N*e2, e1)
        return y.view(n2, e2, e1).transpose(1, 2).reshape(n2, e1 * e2)
    return torch.bmm(columns, right).flatten(1)


def _checked(name: str, spec: FactorSpec, rows: int, columns: int) -> FactorSpec:
    if prod(spec.out) != columns:
        raise wrong_pair(name, "out", spec.out, f"two factors of {columns}")
    if prod(spec.inp) < rows:
        raise wrong_pair(name, "in", spec.inp, f"a product of at least {rows}")
    full = min(spec.inp[0] * spec.out[0], spec.inp[1] * spec.out[1])
    return spec.model_copy(update={"rank": min(spec.rank, full)})


def _row(index: int | None, rows: int) -> int | None:
    """Return a padding index counted from the front, as nn.Embedding keeps it."""
    if index is None or 0 <= index < rows:
        return index
    if -rows <= index < 0:
        return rows + index
    raise FactorError(
        where="BPEmbedding, padding_idx",
        found=str(index),
        allowed=f"a row of the {rows}",
        fix="give an index within the vocabulary",
    )
