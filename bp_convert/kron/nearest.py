"""The nearest sum of Kronecker products to a matrix (Van Loan and Pitsianis, 1993)."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite
from typing import Protocol

import torch
from torch import Tensor

from bp_convert.errors import FactorError
from bp_convert.kron.gram import CHUNK, gram
from bp_convert.kron.pairs import check_positive
from bp_convert.kron.scale import balanced, unit
from bp_convert.values.factors import Pair

# Up to this small side the Gram matrix is diagonalised whole, in float64.
GRAM_SIDE = 256
OVERSAMPLE = 8
MAX_STEPS = 12
SETTLED = 2e-3  # gain of a step, relative to the squared error, at which iteration stops


@dataclass(frozen=True)
class KroneckerFit:
    """Factors of ``sum_r kron(w1[r], w2[r]^T)`` and how far they are from the matrix.

    Attributes:
        w1: (R, k1, d1).
        w2: (R, d2, k2).
        error: relative Frobenius error, 0 to 1.
    """

    w1: Tensor
    w2: Tensor
    error: float


def rearrange(weight: Tensor, out: Pair, inp: Pair) -> Tensor:
    """Lay a (K, D) matrix out so that each Kronecker term becomes an outer product.

    Shape:
        weight: (k1*k2, d1*d2); result: (k1*d1, k2*d2).
    """
    (k1, k2), (d1, d2) = out, inp
    blocks = weight.reshape(k1, k2, d1, d2).permute(0, 2, 1, 3)  # (k1, d1, k2, d2)
    return blocks.reshape(k1 * d1, k2 * d2)


def reconstruct(w1: Tensor, w2: Tensor) -> Tensor:
    """Build ``sum_r kron(w1[r], w2[r]^T)`` with one product; differentiable.

    Shape:
        w1: (R, k1, d1); w2: (R, d2, k2); result: (k1*k2, d1*d2).
    """
    rank, k1, d1 = w1.shape
    _, d2, k2 = w2.shape
    # The small factor is turned, so that what moves of the weight is rows of d2 numbers.
    turned = w2.transpose(1, 2).reshape(rank, k2 * d2)
    table = w1.reshape(rank, k1 * d1).t() @ turned  # (k1*d1, k2*d2)
    return table.view(k1, d1, k2, d2).transpose(1, 2).reshape(k1 * k2, d1 * d2)


def nearest_kronecker_sum(
    weight: Tensor, out: Pair, inp: Pair, rank: int, *, name: str = "weight"
) -> KroneckerFit:
    """Return the R terms nearest to ``weight`` in the Frobenius norm.

    The rearranged matrix's leading singular triplets give them; the squared error is the tail of
    its squared singular values. Small problems diagonalise the smaller Gram matrix, large ones
    iterate on a thin random block, with matrix products and thin factorisations only. Factors are
    balanced (``kron.scale``). At full rank the result is exact to the last bit, and the norms of
    a term's factors within a factor of two. Deterministic; the global random state is not
    touched. Beside the factors it needs one rearranged copy of the weight, in float32 or float64.

    Args:
        weight: (k1*k2, d1*d2), any floating dtype; computed in float32 at least.
        rank: number of terms; above min(k1*d1, k2*d2) it is taken as that.
        name: what to call the weight in an error.

    Raises:
        FactorError: pairs that do not multiply to the shape, a rank below 1, or entries that are
            not finite.
    """
    _check(weight, out, inp, rank, name)
    table = rearrange(weight.detach(), out, inp)  # (k1*d1, k2*d2)
    if table.dtype not in (torch.float32, torch.float64):
        table = table.to(torch.float32)
    rank = min(rank, *table.shape)
    energy = _energy(table, None)
    if not isfinite(energy):
        check_finite(weight, name)
    with torch.autocast(table.device.type, enabled=False):
        if rank == min(table.shape):
            return fit_of(
                DenseTable(table), _rows(table), (out, inp), energy, weight.dtype, even=True
            )
        near, size = unit(table)
        left, right = low_rank(DenseTable(near), rank)
        found = left, right * size
        return fit_of(DenseTable(table), found, (out, inp), energy, weight.dtype)


class Rearranged(Protocol):
    """A rearranged matrix (m, n), as what decomposing it asks for."""

    shape: tuple[int, int]
    dtype: torch.dtype
    device: torch.device

    def t(self) -> Rearranged:
        """Return the transposed matrix."""

    def times(self, block: Tensor) -> Tensor:
        """Return table @ block, (m, s) of (n, s)."""

    def across(self, basis: Tensor) -> Tensor:
        """Return basis^T @ table, (s, n) of (m, s)."""

    def gram(self) -> Tensor:
        """Return table @ table^T in float64."""

    def energy(self) -> float:
        """Return the sum of squares."""

    def rest(self, left: Tensor, right: Tensor) -> float:
        """Return the sum of squares of what factors (m, R), (R, n) leave."""


class DenseTable:
    """A matrix that is there."""

    def __init__(self, table: Tensor) -> None:
        self.table = table
        self.shape = table.shape[0], table.shape[1]
        self.dtype, self.device = table.dtype, table.device

    def t(self) -> DenseTable:
        return DenseTable(self.table.t())

    def times(self, block: Tensor) -> Tensor:
        return self.table @ block

    def across(self, basis: Tensor) -> Tensor:
        return basis.t() @ self.table

    def gram(self) -> Tensor:
        return gram(self.table)

    def energy(self) -> float:
        return _energy(self.table, None)

    def rest(self, left: Tensor, right: Tensor) -> float:
        return _energy(self.table, (left, right))


def fit_of(
    table: Rearranged,
    found: tuple[Tensor, Tensor],
    pairs: tuple[Pair, Pair],
    energy: float,
    dtype: torch.dtype,
    *,
    even: bool = False,
) -> KroneckerFit:
    """Return thin factors (k1*d1, R), (R, k2*d2) of a rearranged matrix as terms of ``dtype``.

    Args:
        energy: the matrix's sum of squares.
        even: both factors of each term are of one size already.
    """
    left, right = found
    (k1, k2), (d1, d2) = pairs
    rank = len(right)
    w1 = left.t().reshape(rank, k1, d1)
    w2 = right.reshape(rank, k2, d2).transpose(1, 2)
    w1, w2 = (w1, w2) if even else balanced(w1, w2)
    w1, w2 = w1.to(dtype).contiguous(), w2.to(dtype).contiguous()
    left = w1.reshape(rank, k1 * d1).t().to(table.dtype)  # as they are stored
    right = w2.transpose(1, 2).reshape(rank, k2 * d2).to(table.dtype)
    rest = table.rest(left, right)
    return KroneckerFit(w1, w2, (rest / energy) ** 0.5 if energy else 0.0)


def check_finite(weight: Tensor, name: str) -> None:
    """Refuse weights of which some are not finite.

    Raises:
        FactorError: the error counts them.
    """
    count = int((~torch.isfinite(weight)).sum())
    if count:
        raise FactorError(
            where=name,
            found=f"{count} of {weight.numel()} entries are not finite",
            allowed="finite numbers",
            fix="repair or exclude this layer; its training diverged",
        )


def _energy(table: Tensor, factors: tuple[Tensor, Tensor] | None) -> float:
    """Return the sum of squares of a table, or of what its factors leave of it.

    The differences themselves are squared, a part at a time: a difference of two energies would
    lose a small one.
    """
    rows = max(1, CHUNK // table.shape[1])
    total = 0.0
    for start in range(0, table.shape[0], rows):
        part = table[start : start + rows]
        if factors is not None:
            part = torch.addmm(part, factors[0][start : start + rows], factors[1], alpha=-1)
        total += float(torch.linalg.vector_norm(part, dtype=torch.float64)) ** 2
    return total


def _rows(table: Tensor) -> tuple[Tensor, Tensor]:
    """Return factors (m, R), (R, n) of all of a matrix: its rows, or columns, beside unit vectors.

    That needs no decomposition and is exact to the last bit, as the scales are powers of two. It
    is also the better place to train on from: a step then moves all directions of the weight
    alike, where singular vectors hold back those of small singular values.
    """
    if table.shape[0] > table.shape[1]:
        left, right = _rows(table.t())
        return right.t(), left.t()
    norms = torch.linalg.vector_norm(table, dim=1, dtype=torch.float64)
    # A row of zeros has a 1 beside it: it trains as in the dense layer.
    scale = torch.where(norms > 0, norms, 1.0).log2().div(2).round().exp2().to(table.dtype)
    return torch.diag(scale), table / scale[:, None]


def low_rank(table: Rearranged, rank: int) -> tuple[Tensor, Tensor]:
    """Return thin factors (m, R), (R, n) of the best rank-R matrix, R below m and n."""
    flat = table.shape[0] > table.shape[1]
    if flat:
        table = table.t()
    rows = table.shape[0]
    if rows <= GRAM_SIDE or 4 * rank >= rows:
        basis = _gram_basis(table, rank)
    else:
        basis = _block_basis(table, rank)
    other = table.across(basis)  # the best partner of an orthonormal basis
    return (other.t(), basis.t()) if flat else (basis, other)


def _gram_basis(table: Rearranged, rank: int) -> Tensor:
    """Return the leading left singular vectors (m, R) from the Gram matrix, in float64."""
    vectors: Tensor = torch.linalg.eigh(table.gram())[1]  # of rising values
    return vectors[:, -rank:].flip(1).to(table.dtype)


def _block_basis(table: Rearranged, rank: int) -> Tensor:
    """Return leading left singular vectors (m, R) by subspace iteration on a thin block.

    Stops once a step gains little against the squared error that is left, or less than rounding
    shows (Halko, Martinsson and Tropp, 2011, algorithm 4.4, with a test of convergence).
    """
    generator = torch.Generator().manual_seed(1993)
    size = min(table.shape[0], rank + max(OVERSAMPLE, rank // 2))
    shape = (table.shape[1], size)
    start = torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")
    block = table.times(start.to(table.device, table.dtype))  # (m, s)
    energy, before = table.energy(), 0.0
    for _ in range(MAX_STEPS):
        basis: Tensor = torch.linalg.qr(block)[0]
        core = table.across(basis)  # (s, n)
        values, vectors = torch.linalg.eigh(gram(core))  # rising
        captured = float(values[-rank:].sum())
        rounding = torch.finfo(table.dtype).eps * energy
        if captured - before <= max(SETTLED * (energy - captured), rounding):
            break
        before = captured
        block = table.times(core.t() / (captured or 1.0) ** 0.5)  # (m, s), of the table's size
    lead: Tensor = vectors[:, -rank:].flip(1)
    return basis @ lead.to(table.dtype)


def _check(weight: Tensor, out: Pair, inp: Pair, rank: int, name: str) -> None:
    (k1, k2), (d1, d2) = out, inp
    if weight.dim() != 2 or tuple(weight.shape) != (k1 * k2, d1 * d2):
        raise FactorError(
            where=name,
            found=f"shape {tuple(weight.shape)} with pairs out {out}, in {inp}",
            allowed=f"shape ({k1 * k2}, {d1 * d2})",
            fix="give pairs whose products are the weight's rows and columns",
        )
    check_positive(rank, "rank")
