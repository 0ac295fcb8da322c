"""Every promising pair of one weight, and how far off it is for each number of terms.

Pairs are searched from coarse to fine: first divisors that stand a factor of ``COARSE`` apart,
low-rank always among them, then the neighbours of whatever is best at some share of the
parameters, until nothing better turns up. ``benchmarks/pairs.py`` compares that with all pairs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import log, prod

import numpy as np
import torch
from torch import Tensor

from bp_convert.kinds import Choices
from bp_convert.kron.als import affordable, fit_in_metric, low_rank, whitened_rows
from bp_convert.kron.column_order import Columns
from bp_convert.kron.compute import to_compute
from bp_convert.kron.metric import Diagonal, Metric, Plain, both
from bp_convert.kron.shared_grams import SharedGrams
from bp_convert.kron.spectrum import squared_errors, whitened
from bp_convert.values.factors import FactorSpec, Pair
from bp_convert.values.literals import Store

COARSE = 4
SHARES = (0.01, 0.02, 0.05, 0.1, 0.25, 0.5)  # of the parameters, at which pairs are compared
KEPT = 5  # pairs that are kept at each share
WIDE = 1024  # terms beyond which only low-rank is followed up: a decomposition costs its cube
TRIED = (0.01, 0.03, 0.08, 0.2, 0.45)  # shares at which a curve is corrected by fits
REACH = 1.8  # times the fewest and most terms of those fits, how far the correction is trusted
NEAR = 1.5  # times the best error at a share, up to which a pair is worth a fit
PICKED = 3  # pairs at each of those shares
HOPELESS = 1.5  # times low-rank's squared error there, beyond which the other pairs are left out
SWEEPS = 3
TRIAL = 1e9  # multiply-adds of a half sweep's normal equations, above which there is none
TRIAL_SIDE = 3000  # unknowns of one system, likewise


@dataclass(frozen=True)
class Curve:
    """One pair, and its relative squared error with R = 0, 1, ... terms.

    Attributes:
        spec: the pair, with one term.
        errors: (full rank + 1), float32, falling from 1 to 0, or to what rounding loses.
        store: how the factors are stored; None as the weight is.
    """

    spec: FactorSpec
    errors: np.ndarray
    store: Store | None = None

    def at(self, params: float) -> float:
        """Return the error with as many terms as ``params`` numbers buy; infinity for none."""
        terms = int(params // self.spec.params)
        return float(self.errors[min(terms, len(self.errors) - 1)]) if terms else float("inf")


def curves_of(
    matrices: Sequence[Tensor],
    choices: Choices,
    metrics: Sequence[Metric] | None = None,
    outputs: Sequence[Metric | None] | None = None,
    *,
    low_rank_only: bool = False,
    among: Collection[FactorSpec] = (),
) -> list[Curve]:
    """Return the curves of the pairs that are best somewhere.

    Args:
        matrices: (K, D) each; they share the pair, their errors are pooled.
        metrics: one for each matrix; None for the Frobenius norm.
        outputs: for each matrix how much its outputs count; None where all count alike.
        low_rank_only: look at low-rank alone, which is truncated SVD.
        among: the pairs to look at beside low-rank, with one term; by default they are searched.
    """
    metrics = metrics or [Plain()] * len(matrices)
    outputs = outputs or [None] * len(matrices)
    search = _Search([*map(to_compute, matrices)], choices, metrics, outputs)
    return search.run(low_rank_only, among)


def best_of(curves: Iterable[Curve], size: int, count: int) -> list[Curve]:
    """Return the curves that are among so many best at some share of a weight's size, the best
    first."""
    curves, kept = list(curves), dict[FactorSpec, Curve]()
    for share in SHARES:
        budget = share * size
        ranked = sorted(
            (one for one in curves if one.spec.params <= budget),
            key=lambda one: (one.at(budget), one.spec.params, one.spec.out, one.spec.inp),
        )
        kept.update({one.spec: one for one in ranked[:count]})
    return list(kept.values())


@dataclass
class _Search:
    matrices: Sequence[Tensor]
    choices: Choices
    metrics: Sequence[Metric]
    outputs: Sequence[Metric | None]
    found: dict[FactorSpec, Curve] = field(default_factory=dict)
    white: tuple[object, Sequence[Tensor]] = (None, ())
    shared: SharedGrams = field(default_factory=SharedGrams)

    def __post_init__(self) -> None:
        self.weighed = any(isinstance(one, Diagonal) for one in self.outputs)
        self.size = self.matrices[0].numel()
        self.totals = [
            both(*each) for each in zip(self.matrices, self.metrics, self.outputs, strict=True)
        ]

    def run(self, low_rank_only: bool, among: Collection[FactorSpec]) -> list[Curve]:
        axes, pairs = next(iter(self.choices.ins.items()))
        columns = pairs[0][0] * pairs[0][1]
        thin = FactorSpec(out=(self.choices.outs[-1][0], 1), inp=(1, columns), axes=axes)
        self._measure([thin])
        lowest = self.found.get(thin)  # not there where it saves nothing, as for a single output
        if low_rank_only:
            return list(self.found.values())
        if among:
            self._measure(among)
        else:
            self._climb()
        kept = self._best()
        if lowest is not None and lowest not in kept:
            kept.append(lowest)
        if any(not isinstance(metric, Plain) for metric in self.metrics) and any(self.totals):
            reached = self._trials(kept, lowest)
            kept = [
                self._corrected(one, reached.get(one.spec, {}))
                for one in kept
                if low_rank(one.spec) or one.spec in reached
            ]
        return kept

    # Which pairs

    def _climb(self) -> None:
        """Measure from coarse to fine."""
        self._measure(self._coarse())
        seen: set[FactorSpec] = set()
        while True:
            best = [one.spec for one in self._best() if one.spec not in seen]
            if not best:
                return
            seen.update(best)
            self._measure(near for spec in best for near in self._neighbours(spec))

    def _coarse(self) -> list[FactorSpec]:
        outs = _spaced(self.choices.outs)
        return [
            FactorSpec(out=out, inp=inp, axes=axes)
            for axes, ins in self.choices.ins.items()
            for inp in _spaced(ins)
            for out in outs
        ]

    def _neighbours(self, spec: FactorSpec) -> Iterable[FactorSpec]:
        outs = self.choices.outs
        for axes, ins in self.choices.ins.items():
            if axes == spec.axes and spec.inp in ins:
                place = ins.index(spec.inp)
            else:  # the pair whose first factor is nearest
                place = min(range(len(ins)), key=lambda i: abs(log(ins[i][0] / spec.inp[0])))
            near = range(max(0, place - 1), min(len(ins), place + 2))
            at = outs.index(spec.out)
            for i in near if axes == spec.axes else (place,):
                for o in range(max(0, at - 1), min(len(outs), at + 2)):
                    yield FactorSpec(out=outs[o], inp=ins[i], axes=axes)

    def _best(self) -> list[Curve]:
        """Return the curves that are among the best at some share, the best first."""
        return best_of(self.found.values(), self.size, KEPT)

    # Their errors

    def _measure(self, specs: Iterable[FactorSpec]) -> None:
        wanted = [
            spec
            for spec in dict.fromkeys(specs)
            if spec not in self.found
            and spec.params < self.size
            and not (spec.out[0] == spec.inp[1] == 1)  # low-rank with its factors exchanged
            and (spec.full_rank <= WIDE or low_rank(spec))
            # Weights of single outputs cannot be told apart where both factors have some.
            and (not self.weighed or min(spec.out) == 1)
        ]
        # Pairs of the same columns follow each other, so that these are whitened once; the largest
        # first, as the others' Gram matrices are parts of theirs.
        for spec in sorted(wanted, key=lambda one: (one.axes, one.inp, -one.full_rank, one.out)):
            self.found[spec] = Curve(spec, self._errors(spec))

    def _errors(self, spec: FactorSpec) -> np.ndarray:
        total = sum(self.totals)
        pooled = np.zeros(spec.full_rank + 1)
        for place, energy in enumerate(self.totals):
            pooled += self._spectrum(spec, place).numpy() * energy
        return (pooled / total if total > 0 else pooled * 0).astype(np.float32)

    def _spectrum(self, spec: FactorSpec, place: int) -> Tensor:
        counts, weight = self.outputs[place], self.matrices[place]
        roots = None if counts is None else counts.roots(Columns(spec.out))
        if roots is not None:
            return squared_errors(whitened_rows(self._whitened(spec)[place], roots), spec)
        if low_rank(spec):
            return squared_errors(self._whitened(spec)[place], spec)
        # Without a metric, tables of other pairs differ by the order of their columns alone.
        plain = isinstance(self.metrics[place], Plain) and prod(spec.inp) == weight.shape[1]
        return self.shared.squared_errors(
            (place, None if plain else spec.inp),
            lambda: self._whitened(spec)[place],
            weight.dtype,
            spec,
            Columns.of(spec, self.choices.kernel),
        )

    def _whitened(self, spec: FactorSpec) -> Sequence[Tensor]:
        if low_rank(spec):
            pairs = zip(self.metrics, self.matrices, strict=True)
            return [metric.root(one) for metric, one in pairs]
        key = (spec.inp, spec.axes)
        if self.white[0] != key:
            columns = Columns.of(spec, self.choices.kernel)
            pairs = zip(self.metrics, self.matrices, strict=True)
            self.white = (
                key,
                [whitened(one, metric, columns) for metric, one in pairs],
            )
        return self.white[1]

    def _trials(
        self, curves: Sequence[Curve], lowest: Curve | None
    ) -> dict[FactorSpec, dict[int, float]]:
        """Fit the pairs that may win in the whole metric at a few numbers of terms; return the
        squared errors that this reaches, by pair and number.

        What fitting gained a pair at one share is expected of it at the next. Where even the most
        promising pair stays far behind low-rank, no other is tried.
        """
        others = [one for one in curves if not low_rank(one.spec)]
        gained = {one.spec: 1.0 for one in others}  # fitted over estimated error, so far
        reached: dict[FactorSpec, dict[int, float]] = {}
        for share in TRIED if others else ():
            budget = share * self.size
            limit = NEAR**2 * min(one.at(budget) for one in self.found.values())
            near = [one for one in others if one.at(budget) <= limit]
            near.sort(key=lambda one: gained[one.spec] * one.at(budget))
            for curve in near[:PICKED]:
                spec = curve.spec
                rank = int(budget // spec.params)
                if not 1 <= rank < spec.full_rank:
                    continue
                error = self._fitted(spec.model_copy(update={"rank": rank}))
                reached.setdefault(spec, {})[rank] = error
                gained[spec] = error / max(curve.at(budget), 1e-12)
                if lowest is not None and error > HOPELESS * lowest.at(budget):
                    break
        return reached

    @staticmethod
    def _corrected(curve: Curve, reached: Mapping[int, float]) -> Curve:
        """Return the curve with the errors that fitting in the whole metric reaches.

        The nearest sum in the nearest Kronecker product of the metric only ranks; what fitting
        reaches is tried at a few numbers of terms and carried over to those between. Fewer terms
        are taken to give nothing, and more of them nothing more.
        """
        if not reached:
            return curve
        tried = sorted(reached)
        ratios = [
            log(max(reached[rank], 1e-12) / max(float(curve.errors[rank]), 1e-12)) for rank in tried
        ]
        terms = np.arange(len(curve.errors))
        between = np.interp(terms, tried, ratios)
        errors = np.minimum.accumulate(np.minimum(curve.errors * np.exp(between), 1.0))
        errors[terms < tried[0] / REACH] = 1.0
        beyond = terms > tried[-1] * REACH
        errors[beyond] = errors[~beyond][-1]
        errors[-1] = 0.0
        return Curve(curve.spec, errors.astype(np.float32))

    def _fitted(self, spec: FactorSpec) -> float:
        columns = Columns.of(spec, self.choices.kernel)
        gap = 0.0
        every = zip(self.metrics, self.matrices, self.outputs, self.totals, strict=True)
        for metric, one, counts, total in every:
            sweeps = SWEEPS if affordable(spec, metric, TRIAL, TRIAL_SIDE) else 0
            near = fit_in_metric(
                *(one, spec, columns, metric),
                outputs=counts,
                sweeps=sweeps,
                solved=torch.float32,
                total=total,
            )
            gap += near.error**2 * total
        return gap / max(sum(self.totals), 1e-300)


def _spaced(pairs: Sequence[Pair]) -> list[Pair]:
    """Return the first pair, the last, and those between that stand a factor apart."""
    kept = [pairs[0]]
    for pair in pairs[1:-1]:
        if pair[0] >= COARSE * kept[-1][0] and COARSE * pair[0] <= pairs[-1][0]:
            kept.append(pair)
    return kept if len(pairs) == 1 else [*kept, pairs[-1]]
