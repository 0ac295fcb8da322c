"""Bits as one more axis of the choice: each option of a unit in each way to store it.

What rounding adds to an error is measured: of a dense weight rounded in its metric, and of the
most promising pairs' factors, rounded in turn at one number of terms, in int4. Other bits lose as
much more or less as they do of the same numbers by themselves; other pairs as the worst of these.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite

import numpy as np
import torch
from torch import Tensor

from bp_convert.bits.compensated import rounded_in
from bp_convert.bits.grid import FORMS, Grid, nbytes
from bp_convert.bits.rounded import rounded_factors
from bp_convert.graph.walk import Site
from bp_convert.kinds.choices import Choices
from bp_convert.kron.als import fit_in_metric, low_rank, natural
from bp_convert.kron.column_order import Columns
from bp_convert.kron.metric import Full, Metric
from bp_convert.search.curves import Curve
from bp_convert.search.units import COSTS, PARTS, FreeLayer, Unit
from bp_convert.values.factors import FactorSpec
from bp_convert.values.literals import Store

FREE: tuple[Store | None, ...] = (None, "bf16", "int8", "int4", "int3")
AS_IS: tuple[Store | None, ...] = (None,)
NO_PAIR = FactorSpec(out=(1, 1), inp=(1, 1))
MEASURED = "int4"
SHARE = 0.1  # of a weight's numbers, that the measured factors have
MOST = 3  # pairs that are measured beside low rank
SWEEPS = 2
WORST = 1e6  # relative squared error of numbers that a type does not hold


@dataclass(frozen=True)
class Noise:
    """Relative squared errors that rounding adds.

    Attributes:
        dense: of the weight as it is, by how it is stored.
        pairs: of factors, by pair and how they are stored.
        others: of pairs that were not measured.
    """

    dense: Mapping[str, float]
    pairs: Mapping[FactorSpec, Mapping[str, float]]
    others: Mapping[str, float]

    def curves(self) -> list[Curve]:
        """Return it in the form that is kept on disk."""
        rows = [(NO_PAIR, self.dense), (NO_PAIR, self.others), *self.pairs.items()]
        return [Curve(spec, np.array([one[word] for word in FORMS])) for spec, one in rows]

    @classmethod
    def of(cls, curves: Sequence[Curve]) -> Noise:
        """Undo ``curves``."""
        dense, others, *pairs = (
            (one.spec, dict(zip(FORMS, map(float, one.errors), strict=True))) for one in curves
        )
        return cls(dense[1], dict(pairs), others[1])


def noise_of(
    matrices: Sequence[Tensor],
    choices: Choices,
    curves: Sequence[Curve],
    metrics: Sequence[Metric],
    *,
    lookup: bool = False,
) -> Noise:
    """Measure what rounding adds.

    Args:
        matrices: (K, D) each, as search computes with them.
        metrics: one for each.
        lookup: they are tables turned, whose rows are scaled.
    """
    total = sum(metric.energy(one) for one, metric in zip(matrices, metrics, strict=True))

    def relative(gaps: Sequence[Tensor]) -> float:
        lost = sum(metric.energy(gap) for gap, metric in zip(gaps, metrics, strict=True))
        return _finite(lost / total) if total else 0.0

    dense = {
        word: relative(
            [
                rounded_dense(one, metric, word, lookup=lookup) - one
                for one, metric in zip(matrices, metrics, strict=True)
            ]
        )
        for word in FORMS
    }
    pairs: dict[FactorSpec, dict[str, float]] = {}
    near = sorted(curves, key=lambda one: one.at(SHARE * matrices[0].numel()))
    picked = [one for one in near if not low_rank(one.spec)][:MOST]
    for curve in [one for one in near if low_rank(one.spec)] + picked:
        rank = max(1, int(SHARE * matrices[0].numel() / curve.spec.params))
        rank = min(rank, len(curve.errors) - 1)
        if rank:
            pairs[curve.spec] = _of_pair(matrices[0], choices, curve.spec, rank, metrics[0])
    worst = {
        word: max([one[word] for one in pairs.values()], default=2 * dense[word]) for word in FORMS
    }
    return Noise(dense, pairs, worst)


def rounded_dense(matrix: Tensor, metric: Metric, word: str, *, lookup: bool) -> Tensor:
    """Return a dense weight (K, D) as it is rounded.

    Args:
        lookup: it is a table turned, whose rows are scaled.
    """
    form = FORMS[word]
    if not isinstance(form, Grid):
        return form.rounded(matrix)
    scales = form.scales(matrix.t()).t() if lookup else form.scales(matrix)
    coarse = metric.matrix if form.bits < 8 and isinstance(metric, Full) else None
    return rounded_in(matrix, scales, form, coarse)


def _of_pair(
    matrix: Tensor, choices: Choices, spec: FactorSpec, rank: int, metric: Metric
) -> dict[str, float]:
    """Return what rounding the factors of a pair adds, relative to what they keep."""
    spec = spec.model_copy(update={"rank": rank})
    columns = Columns.of(spec, choices.kernel)
    fit = fit_in_metric(matrix, spec, columns, metric, sweeps=SWEEPS, solved=torch.float32)
    grid = FORMS[MEASURED]
    assert isinstance(grid, Grid)
    scales = (grid.scales, grid.scales)
    found = rounded_factors(matrix, fit.w1, fit.w2, columns, metric, grid, scales, spec=spec)
    kept = max(1e-3, 1 - fit.error**2)
    added = max(0.0, found.error**2 - fit.error**2) / kept
    whole = natural(fit.w1, fit.w2, columns)[:, : matrix.shape[1]]
    size = max(metric.energy(whole), 1e-300)
    alone = {}
    for word, form in FORMS.items():
        one, two = form.rounded(fit.w1), form.rounded(fit.w2)
        gap = natural(one, two, columns)[:, : matrix.shape[1]] - whole
        alone[word] = _finite(metric.energy(gap) / size)
    scale = added / alone[MEASURED] if alone[MEASURED] else 1.0
    return {word: one * (scale if FORMS[word].bits < 8 else 1.0) for word, one in alone.items()}


def _finite(noise: float) -> float:
    """Return what numbers add that a type does not hold: too much to be chosen."""
    return min(noise, WORST) if isfinite(noise) else WORST


def in_bits(unit: Unit, noise: Noise, stores: Sequence[Store | None]) -> Unit:
    """Return a unit with each of its options in each way to store it."""
    curves: list[Curve] = []
    blocks = []
    kept = unit.picked[:, 1] == 0
    for store in stores:
        place = len(curves)
        cast = store is not None and not isinstance(FORMS[store], Grid)
        if not (cast and len(stores) > 1):  # among others a type of 16 bits is for dense weights
            curves += [_noisy(one, noise, store) for one in unit.curves]
            blocks.append((unit.picked[~kept] + np.array([place, 0]), unit.costs[~kept].copy()))
    made = replace(unit, curves=curves, whole=tuple(stores))
    picks, costs, errors = [], [], []
    for index, store in enumerate(stores):
        for row in unit.costs[kept]:
            picks.append(np.array([[index, 0]]))
            own = row.copy()
            own[-1] = weight_bytes(unit, store)
            costs.append(own[None])
            errors.append(np.array([0.0 if store is None else noise.dense[store]]))
    for picked, table in blocks:
        picks.append(picked)
        for place in np.unique(picked[:, 0]):
            rows = picked[:, 0] == place
            table[rows, -1] = made.bytes_of(curves[place], picked[rows, 1])
        costs.append(table)
        found = [float(curves[place].errors[rank]) for place, rank in picked]
        errors.append(np.array(found))
    return replace(
        made,
        picked=np.concatenate(picks),
        costs=np.concatenate(costs),
        errors=np.concatenate(errors),
    )


def _noisy(curve: Curve, noise: Noise, store: Store | None) -> Curve:
    if store is None:
        return curve
    added = noise.pairs.get(curve.spec, noise.others).get(store, 0.0)
    errors = curve.errors + (1 - curve.errors) * np.float32(min(added, 1.0))
    return Curve(curve.spec, errors.astype(np.float32), store)


def weight_bytes(unit: Unit, store: Store | None) -> float:
    """Return the bytes of a unit's matrices, kept dense."""
    if store is None:
        return float(unit.dense[-1])
    found = 0.0
    for one in _tensors(unit):
        whole = one.numel() * unit.each
        found += min(nbytes(store, one) + PARTS, whole)
    return float(found + _rest(unit))


def _tensors(unit: Unit) -> Sequence[Tensor]:
    """Return the tensors of a unit's matrices as they are stored: a scale is of a row of these, as
    of one kernel of a convolution."""
    if unit.alone and not unit.many:
        held = [one for one in unit.layer.site.held.parameters() if one.dim() > 1]
        if sum(one.numel() for one in held) == unit.matrices * unit.size:
            return held
    return [torch.empty(unit.shape, device="meta")] * unit.matrices


def _rest(unit: Unit) -> float:
    return float(unit.dense[-1] - unit.matrices * unit.size * unit.each)


def dense_unit(site: Site, stores: Sequence[Store | None]) -> Unit:
    """Return a unit for a layer that stays dense for a reason of its own: only how it is stored is
    chosen, by its weights alone."""
    tensors = [one.detach() for one in site.held.parameters()]
    each = float(tensors[0].element_size())
    numbers = sum(one.numel() for one in tensors)
    layer = FreeLayer(site, (0, 0), ((), ()), 0)
    sizes, errors = [], []
    for store in stores:
        gap = total = size = 0.0
        for one in tensors:
            form = FORMS.get(store or "")
            taken = form is not None and nbytes(store, one) < one.numel() * one.element_size()
            size += nbytes(store, one) + (PARTS if taken else 0)
            if form is not None and taken:
                gap += float((form.rounded(one) - one).double().square().sum())
            total += float(one.double().square().sum())
        sizes.append(size)
        errors.append(gap / total if total else 0.0)
    costs = np.zeros((len(stores), len(COSTS)))
    costs[:, 0], costs[:, -1] = numbers, sizes
    dense = np.array([numbers, *(0.0 for _ in COSTS[1:-1]), numbers * each])
    return Unit(
        *(layer, "", 1, (1, numbers), [], 1.0, dense, True),
        picked=np.array([[index, 0] for index in range(len(stores))], dtype=np.int64),
        costs=costs,
        errors=np.array(errors),
        whole=tuple(stores),
        each=each,
    )
