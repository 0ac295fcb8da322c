"""What a weight's error costs: the metric of the inputs that the weight meets.

An error E of a weight (K, D) changes the outputs by ``tr(E C E^T)`` on average, where C (D, D) is
the second moment of the inputs. Without data C is the identity and the cost is the Frobenius norm.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor

from bp_convert.kron.column_order import Columns
from bp_convert.kron.root import Root
from bp_convert.kron.scale import unit

RIDGE = 1e-3  # of the mean eigenvalue: what the data never showed still costs a little
HELD = 32  # pairs whose roots a metric holds
ROUNDS = 4  # of the alternation for the nearest Kronecker product of a metric

Roots = tuple[Root, Root]
Step = Callable[[Tensor], Tensor]


class Metric(ABC):
    """A symmetric positive definite form on a weight's D columns, (channel, kernel place).

    Attributes:
        level: what stands before the form, in energies alone: fits do not hang on it.
    """

    level: float = 1.0

    @abstractmethod
    def apply(self, matrix: Tensor) -> Tensor:
        """Return ``M C`` for a matrix (K, D)."""

    @abstractmethod
    def root(self, matrix: Tensor) -> Tensor:
        """Return ``M L`` with ``C = L L^T``: its plain norm is the metric's."""

    @abstractmethod
    def unroot(self, matrix: Tensor) -> Tensor:
        """Return ``M L^-1``, the way back."""

    @abstractmethod
    def roots(self, columns: Columns) -> Roots | None:
        """Return L1 (d1, d1) and L2 (d2, d2) with ``C ~ (L1 L1^T) kron (L2 L2^T)``, the nearest
        Kronecker product in the columns' order; None for the identity."""

    def energy(self, matrix: Tensor) -> float:
        """Return ``tr(M C M^T)``; what is not finite stays so."""
        near, size = unit(matrix)
        product = self.apply(near)
        found = float((product * near).sum(dtype=torch.float64)) * size**2 * self.level
        return 0.0 if found < 0 else found


class Plain(Metric):
    """The identity: all columns count alike."""

    def apply(self, matrix: Tensor) -> Tensor:
        return matrix

    def root(self, matrix: Tensor) -> Tensor:
        return matrix

    def unroot(self, matrix: Tensor) -> Tensor:
        return matrix

    def roots(self, columns: Columns) -> None:
        return None


class Full(Metric):
    """A second moment (D, D) as gathered, with a small ridge so that it can be inverted.

    Data of fewer examples than columns, of zeros only, or of columns that never vary leave C
    singular; the ridge, a share of the mean eigenvalue, then stands for what was not seen.
    """

    def __init__(self, moment: Tensor, ridge: float = RIDGE, level: float = 1.0) -> None:
        self.level = level
        mean = float(moment.diagonal().double().mean())
        self.matrix = (moment + moment.t()) / 2
        self.added = ridge * mean if mean > 0 else 1.0
        self.matrix.diagonal().add_(self.added)
        self._lower: Tensor | None = None
        self._roots: dict[Columns, Roots] = {}  # asked for again by each pair, and each fit

    def apply(self, matrix: Tensor) -> Tensor:
        return matrix @ self.matrix.to(matrix.dtype)

    def root(self, matrix: Tensor) -> Tensor:
        return matrix @ self.lower.to(matrix.dtype)

    def unroot(self, matrix: Tensor) -> Tensor:
        lower = self.lower.to(matrix.dtype)
        found: Tensor = torch.linalg.solve_triangular(lower, matrix, upper=False, left=False)
        return found

    def roots(self, columns: Columns) -> Roots:
        found = self._roots.get(columns)
        if found is None:
            one, two = nearest_product(self.blocks(columns))
            found = Root((cholesky(one),)), Root((cholesky(two),))
            while len(self._roots) >= HELD:
                self._roots.pop(next(iter(self._roots)))
            self._roots[columns] = found
        return found

    def blocks(self, columns: Columns) -> Tensor:
        """Return C as (d1, d2, d1, d2), in the columns' order."""
        moment = self.matrix
        if columns.order is not None:
            moment = moment.index_select(0, columns.order).index_select(1, columns.order)
        return moment.view(*columns.inp, *columns.inp)

    @property
    def lower(self) -> Tensor:
        """The root L, lower triangular."""
        if self._lower is None:
            self._lower = cholesky(self.matrix)
        return self._lower


class Product(Metric):
    """``A kron B`` over channels and kernel places, for weights too wide for a full metric.

    Args:
        channels: second moment (C, C) of the channels, over all places.
        places: second moment (S, S) of the kernel's places, over all channels.
    """

    def __init__(
        self, channels: Tensor, places: Tensor, ridge: float = RIDGE, level: float = 1.0
    ) -> None:
        self.level = level
        self.channels = Full(channels, ridge)
        self.places = Full(places, ridge)
        self.sizes = (channels.shape[0], places.shape[0])

    def apply(self, matrix: Tensor) -> Tensor:
        return self._both(matrix, self.channels.apply, self.places.apply)

    def root(self, matrix: Tensor) -> Tensor:
        return self._both(matrix, self.channels.root, self.places.root)

    def unroot(self, matrix: Tensor) -> Tensor:
        return self._both(matrix, self.channels.unroot, self.places.unroot)

    def roots(self, columns: Columns) -> Roots:
        one, two = nearest_product(self.channels.blocks(Columns(columns.channels)))
        order = columns.kernel_order
        places = self.places.matrix.index_select(0, order).index_select(1, order)
        near, far = nearest_product(places.view(*columns.places, *columns.places))
        return Root((cholesky(one), cholesky(near))), Root((cholesky(two), cholesky(far)))

    def _both(self, matrix: Tensor, first: Step, second: Step) -> Tensor:
        channels, places = self.sizes
        rows = matrix.shape[0]
        x = second(matrix.reshape(-1, places))  # (K*C, S)
        x = x.view(rows, channels, places).transpose(1, 2).reshape(-1, channels)  # (K*S, C)
        return first(x).view(rows, places, channels).transpose(1, 2).reshape(rows, -1)


class Diagonal(Metric):
    """A weight for each column, such as how often a row of an embedding is looked up."""

    def __init__(self, weights: Tensor, level: float = 1.0) -> None:
        self.weights = weights
        self.level = level

    def apply(self, matrix: Tensor) -> Tensor:
        return matrix * self.weights.to(matrix.dtype)

    def root(self, matrix: Tensor) -> Tensor:
        return matrix * self.weights.sqrt().to(matrix.dtype)

    def unroot(self, matrix: Tensor) -> Tensor:
        return matrix / self.weights.sqrt().to(matrix.dtype)

    def roots(self, columns: Columns) -> Roots:
        one, two = nearest_outer(self.weights.view(columns.inp))
        return Root((one.sqrt(),)), Root((two.sqrt(),))

    def spared(self, spare: int) -> Diagonal:
        """Return the metric with spare columns, which weigh as little as any."""
        least = float(self.weights.min())
        wide = torch.nn.functional.pad(self.weights, (0, spare), value=least)
        return Diagonal(wide, self.level)


def both(matrix: Tensor, metric: Metric, outputs: Metric | None) -> float:
    """Return ``tr(G M C M^T)``: what an error costs where outputs count by G, too."""
    if outputs is None:
        return metric.energy(matrix)
    return metric.energy(outputs.root(matrix.t()).t()) * outputs.level


def nearest_product(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return A (d1, d1) and B (d2, d2) with ``A kron B`` nearest to C, given as (d1, d2, d1, d2).

    Alternates from the mean: each step is a contraction of C with the other factor, and keeps
    both positive definite (Van Loan and Pitsianis, 1993, section 5).
    """
    size = blocks.shape[1]
    two = torch.eye(size, dtype=blocks.dtype, device=blocks.device) / size**0.5
    one = two
    for _ in range(ROUNDS if min(blocks.shape[:2]) > 1 else 1):
        one = torch.einsum("apbq,pq->ab", blocks, two)
        one = one / _norm(one)
        two = torch.einsum("apbq,ab->pq", blocks, one)
        scale = _norm(two)
        two = two / scale
    return one * scale, two


def _norm(matrix: Tensor) -> Tensor:
    """Return the norm, above zero; in float64, as squares of large moments overflow."""
    norm: Tensor = torch.linalg.vector_norm(matrix, dtype=torch.float64)
    return norm.clamp(min=torch.finfo(matrix.dtype).tiny)


def nearest_outer(table: Tensor) -> tuple[Tensor, Tensor]:
    """Return positive a (d1), b (d2) with ``a b^T`` nearest to a positive table (d1, d2)."""
    two = table.new_ones(table.shape[1])
    one = table.new_ones(table.shape[0])
    for _ in range(ROUNDS):
        one = table @ two / two.square().sum()
        two = table.t() @ one / one.square().sum()
    return one, two


def cholesky(matrix: Tensor) -> Tensor:
    """Return the lower root of a positive definite matrix; rounding below zero gets a ridge."""
    matrix = (matrix + matrix.t()) / 2
    scale = float(matrix.diagonal().abs().mean())
    lower: Tensor
    for ridge in (0.0, 1e-7, 1e-5, 1e-3, 1e-1):
        held = (
            matrix
            if not ridge
            else matrix + ridge * scale * torch.eye(len(matrix), device=matrix.device)
        )
        lower, info = torch.linalg.cholesky_ex(held)
        if int(info) == 0 and bool(torch.isfinite(lower).all()):
            return lower
    return torch.diag(matrix.diagonal().clamp(min=scale or 1.0).sqrt())


def spared(weight: Tensor, metric: Metric, columns: Columns) -> tuple[Tensor, Metric]:
    """Return weight and metric with spare columns of zeros where the pair covers more than the
    weight has, as an embedding's may."""
    spare = columns.inp[0] * columns.inp[1] - weight.shape[1]
    if not spare:
        return weight, metric
    if isinstance(metric, Diagonal):
        metric = metric.spared(spare)
    return torch.nn.functional.pad(weight, (0, spare)), metric
