"""Kronecker sums fitted in a metric: closed form where there is one, alternation elsewhere."""

from __future__ import annotations

import torch
from torch import Tensor

from bp_convert.kron.column_order import Columns
from bp_convert.kron.metric import Diagonal, Full, Metric, Plain, Roots, both, spared
from bp_convert.kron.nearest import KroneckerFit, nearest_kronecker_sum, reconstruct
from bp_convert.kron.scale import balanced, unit
from bp_convert.kron.spectrum import whitened
from bp_convert.values.factors import FactorSpec

SWEEPS = 12
SETTLED = 3e-3  # gain of a sweep, relative to the error that is left, at which it stops
MAX_WORK = 6e9  # multiply-adds of a half sweep's normal equations, above which there is none
MAX_SIDE = 6000  # unknowns of one system of normal equations
TIKHONOV = 1e-9  # of the mean diagonal, so that terms that repeat each other do not run away


def fit_in_metric(
    weight: Tensor,
    spec: FactorSpec,
    columns: Columns,
    metric: Metric,
    *,
    outputs: Metric | None = None,
    sweeps: int = SWEEPS,
    solved: torch.dtype = torch.float64,
    total: float | None = None,
    name: str = "weight",
) -> KroneckerFit:
    """Return factors of ``spec`` that minimise ``tr(G (W - W') C (W - W')^T)``.

    Low-rank terms have a closed form. Kronecker terms start from the nearest sum in the nearest
    Kronecker product of the metric, where the problem keeps its form, and alternate least squares
    in the whole metric from there, as long as its normal equations are affordable. At full rank
    the factors are the nearest sum's, exact in any metric. Factors are balanced (``kron.scale``).

    Args:
        weight: (K, D), columns as (channel, kernel place).
        columns: how the columns are shared between the factors.
        outputs: G, a form on the K outputs: how much each counts; None where all count alike.
            Where both factors have outputs, the nearest product of a form for each stands for it.
        solved: in which the normal equations are solved.
        total: ``tr(G W C W^T)`` where it is known.

    Returns:
        The factors, and the error relative to ``tr(G W C W^T)``, rooted.

    Raises:
        FactorError: entries that are not finite.
    """
    weight = weight.detach().to(torch.promote_types(weight.dtype, torch.float32))
    w1, w2 = factors_in_metric(
        *(weight, spec, columns, metric), outputs=outputs, sweeps=sweeps, solved=solved, name=name
    )
    weight, metric = spared(weight, metric, columns)
    near, size = unit(weight)
    total = both(near, metric, outputs) if total is None else total / size**2
    gap = near - natural(w1, w2, columns) / size
    lost = both(gap, metric, outputs)
    return KroneckerFit(w1, w2, (lost / total) ** 0.5 if total else 0.0)


def factors_in_metric(
    weight: Tensor,
    spec: FactorSpec,
    columns: Columns,
    metric: Metric,
    *,
    outputs: Metric | None = None,
    sweeps: int = SWEEPS,
    solved: torch.dtype = torch.float64,
    name: str = "weight",
) -> tuple[Tensor, Tensor]:
    """Return the factors of ``fit_in_metric`` alone, w1 (R, k1, d1) and w2 (R, d2, k2): measuring
    what they lose takes as long as a closed form does."""
    weight = weight.detach().to(torch.promote_types(weight.dtype, torch.float32))
    weight, metric = spared(weight, metric, columns)
    near, size = unit(weight)
    if spec.rank >= spec.full_rank:
        return _nearest(weight, spec, columns, Plain(), name)
    if not bool(near.any()):
        return _nothing(weight, spec)
    w1, w2 = _weighed(near, spec, columns, metric, outputs, sweeps, solved, name)
    return balanced(w1, w2 * size)


def _nothing(weight: Tensor, spec: FactorSpec) -> tuple[Tensor, Tensor]:
    """Return the terms of a weight of zeros."""
    (k1, k2), (d1, d2) = spec.out, spec.inp
    return balanced(weight.new_zeros(spec.rank, k1, d1), weight.new_zeros(spec.rank, d2, k2))


def _weighed(
    weight: Tensor,
    spec: FactorSpec,
    columns: Columns,
    metric: Metric,
    outputs: Metric | None,
    sweeps: int,
    solved: torch.dtype,
    name: str,
) -> tuple[Tensor, Tensor]:
    """Fit, with the outputs whitened where they count differently: a product of a form for each
    factor leaves a Kronecker sum what it is."""
    roots = None if outputs is None else outputs.roots(Columns(spec.out))
    if roots is not None:
        one, two = roots
        white = whitened_rows(weight, roots)
        w1, w2 = _weighed(white, spec, columns, metric, None, sweeps, solved, name)
        rank, k1, d1 = w1.shape
        k2 = w2.shape[2]
        back = one.solve(w1.transpose(1, 2).reshape(rank * d1, k1))  # (R*d1, k1)
        return back.view(rank, d1, k1).transpose(1, 2), two.solve(w2.reshape(-1, k2)).view_as(w2)
    if low_rank(spec):
        near = nearest_kronecker_sum(metric.root(weight), spec.out, spec.inp, spec.rank, name=name)
        return near.w1, metric.unroot(near.w2.squeeze(2)).unsqueeze(2)  # (R, K, 1), (R, D, 1)
    w1, w2 = _nearest(weight, spec, columns, metric, name)
    if sweeps and affordable(spec, metric):
        w1, w2 = _alternate(weight, spec, columns, metric, w1, w2, sweeps, solved)
    return w1, w2


def whitened_rows(weight: Tensor, roots: Roots) -> Tensor:
    """Return ``(M1 kron M2)^T W`` (K, D) for the roots M1 (k1, k1) and M2 (k2, k2) of a form on the
    outputs."""
    one, two = roots
    white = weight.t().reshape(-1, two.size)  # (D*k1, k2)
    white = two.times(white).view(-1, one.size, two.size)
    return one.times_left(white).reshape(weight.shape[1], -1).t()


def low_rank(spec: FactorSpec) -> bool:
    """Return whether the terms are outer products of a column and a row."""
    return spec.out[1] == 1 and spec.inp[0] == 1


def affordable(
    spec: FactorSpec, metric: Metric, work: float = MAX_WORK, side: int = MAX_SIDE
) -> bool:
    """Return whether the normal equations of the metric can be set up, in so many multiply-adds,
    and solved, for so many unknowns."""
    (d1, d2), rank = spec.inp, spec.rank
    if isinstance(metric, Diagonal):
        return rank * rank * rank * max(d1, d2) <= work
    if not isinstance(metric, Full):
        return False
    return rank * max(d1, d2) <= side and (rank * d1 * d2) ** 2 <= work


def natural(w1: Tensor, w2: Tensor, columns: Columns) -> Tensor:
    """Build the weight (K, D) with its columns as (channel, kernel place)."""
    table = reconstruct(w1, w2)
    if columns.order is None:
        return table
    back = torch.empty_like(columns.order)
    back[columns.order] = torch.arange(len(back))
    return table.index_select(1, back)


def _nearest(
    weight: Tensor, spec: FactorSpec, columns: Columns, metric: Metric, name: str
) -> tuple[Tensor, Tensor]:
    """Return the nearest sum in the nearest Kronecker product of the metric."""
    near = nearest_kronecker_sum(
        whitened(weight, metric, columns), spec.out, spec.inp, spec.rank, name=name
    )
    roots = metric.roots(columns)
    if roots is None:
        return near.w1, near.w2
    one, two = roots
    # One solve for all terms: a batch of them would copy the root for each.
    rank, k1, d1 = near.w1.shape
    _, d2, k2 = near.w2.shape
    w1 = one.solve(near.w1.reshape(rank * k1, d1)).view(rank, k1, d1)
    solved = two.solve(near.w2.transpose(1, 2).reshape(rank * k2, d2))
    return w1, solved.view(rank, k2, d2).transpose(1, 2)


def _alternate(
    weight: Tensor,
    spec: FactorSpec,
    columns: Columns,
    metric: Metric,
    w1: Tensor,
    w2: Tensor,
    sweeps: int,
    solved: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Solve for one factor with the other held, in turn; never worse than the start."""
    (k1, k2), (d1, d2) = spec.out, spec.inp
    dtype = w1.dtype
    target = metric.apply(weight)  # (K, D)
    if columns.order is not None:
        target = target.index_select(1, columns.order)
    target = target.view(k1, k2, d1, d2).to(solved)
    step = _diagonal_step if isinstance(metric, Diagonal) else _full_step
    form = half_forms(metric, columns, solved)
    best, kept = _error(weight, w1, w2, columns, metric), (w1, w2)
    for _ in range(sweeps):
        # With the roles turned, w1 is solved for by the same step: (R, d1, k1), (R, k2, d2).
        w2 = step(w1.to(solved), target, form[0])
        w1t = step(w2.transpose(1, 2), target.permute(1, 0, 3, 2), form[1])  # (R, d1, k1)
        w1, w2 = balanced(w1t.transpose(1, 2), w2)
        now = _error(weight, w1.to(dtype), w2.to(dtype), columns, metric)
        if not now < best:
            break
        settled = best - now <= SETTLED * now
        best, kept = now, (w1.to(dtype), w2.to(dtype))
        if settled:
            break
    return kept[0].contiguous(), kept[1].contiguous()


def _error(weight: Tensor, w1: Tensor, w2: Tensor, columns: Columns, metric: Metric) -> float:
    error = metric.energy(weight - natural(w1, w2, columns))
    return error if error == error else float("inf")


def half_forms(metric: Metric, columns: Columns, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the metric laid out for solving for w2, and for w1."""
    d1, d2 = columns.inp
    if isinstance(metric, Diagonal):
        table = metric.weights.view(d1, d2).to(dtype)
        return table, table.t()
    assert isinstance(metric, Full)
    blocks = metric.blocks(columns).permute(0, 2, 1, 3)  # (d1, d1', d2, d2')
    flat = blocks.reshape(d1 * d1, d2 * d2).to(dtype)
    return flat, flat.t()


def _full_step(w1: Tensor, target: Tensor, form: Tensor) -> Tensor:
    """Solve for w2 (R, d2, k2) with w1 (R, k1, d1) held."""
    return _solve(*half_problem(w1, target, form)).view(len(w1), target.shape[3], target.shape[1])


def half_problem(w1: Tensor, target: Tensor, form: Tensor) -> tuple[Tensor, Tensor]:
    """Return the normal equations of w2 (R, d2, k2) with w1 (R, k1, d1) held, N and B.

    Those of all k2 are the same: sum over (r', e') of
    ``N[(r, e), (r', e')] w2[r', e', k2] = B[(r, e), k2]``.

    Args:
        target: (k1, k2, d1, d2), the weight in the metric.
        form: of ``half_forms``, its first; with the roles of the factors turned, its second.
    """
    rank, _, d1 = w1.shape
    d2, k2 = target.shape[3], target.shape[1]
    pairs = torch.einsum("rka,skb->rsab", w1, w1).reshape(rank * rank, d1 * d1)
    normal = (pairs @ form).view(rank, rank, d2, d2).transpose(1, 2).reshape(rank * d2, rank * d2)
    return normal, torch.einsum("rka,klae->rel", w1, target).reshape(rank * d2, k2)


def _diagonal_step(w1: Tensor, target: Tensor, form: Tensor) -> Tensor:
    """The same for a diagonal metric (d1, d2), whose equations fall apart into d2 small ones."""
    pairs = torch.einsum("rka,ska->ars", w1, w1)  # (d1, R, R)
    normal = torch.einsum("ae,ars->ers", form, pairs)  # (d2, R, R)
    right = torch.einsum("rka,klae->erl", w1, target)  # (d2, R, k2)
    return _solve(normal, right).transpose(0, 1)


def _solve(normal: Tensor, right: Tensor) -> Tensor:
    limits = torch.finfo(normal.dtype)
    mean = normal.diagonal(dim1=-2, dim2=-1).mean(-1).clamp(min=limits.tiny)
    normal.diagonal(dim1=-2, dim2=-1).add_(max(TIKHONOV, 8 * limits.eps) * mean[..., None])
    lower, info = torch.linalg.cholesky_ex(normal)
    solution: Tensor
    if int(info.max()) > 0:
        solution = torch.linalg.lstsq(normal, right).solution
    else:
        solution = torch.cholesky_solve(right, lower)
    return solution
