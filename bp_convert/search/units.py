"""What may become of each weight, with what it costs: the rows that a budget is spent on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from bp_convert.graph.walk import Site
from bp_convert.kinds import Factors, Spread, Widths, predict, whole
from bp_convert.kinds.speed import BUILT
from bp_convert.kron.contract import bilinear_macs
from bp_convert.search.curves import Curve
from bp_convert.values.factors import FactorSpec

FINE = 48  # numbers of terms up to which every one is an option
STEP = 1.03  # ratio of neighbouring numbers of terms above
Shape = tuple[int, ...]
COSTS = ("params", "macs", "time", "time32")


@dataclass(frozen=True)
class FreeLayer:
    """One layer that a budget may be spent on.

    Attributes:
        site: the layer.
        widths: its inputs and outputs after widening.
        shapes: inputs of its calls, for one example and for 32; empty where not known.
        dense_macs: multiply-adds of one example as it is.
        floor: share of its parameters below which it may not go.
    """

    site: Site
    widths: Widths
    shapes: tuple[Sequence[Shape], Sequence[Shape]]
    dense_macs: int
    floor: float = 0.0

    def any_factors(self) -> Factors:
        """Return some factors that fit, for what hangs on none in particular."""
        kind, module = self.site.kind, self.site.module
        choices = kind.choices(module, self.widths)
        return {role: next(iter(one.specs())) for role, one in choices.items()}

    @cached_property
    def builds(self) -> bool:
        """Whether even the fewest terms run on a weight that is built, as small LSTMs do."""
        kind, module = self.site.kind, self.site.module
        fewest = {
            role: min(one.specs(), key=lambda spec: spec.params)
            for role, one in kind.choices(module, self.widths).items()
        }
        return kind.macs(module, self.widths, fewest, self.shapes[0]) > self.dense_macs


@dataclass
class Unit:
    """One role of a layer, and its options.

    Attributes:
        layer: the layer.
        role: key of the factors.
        matrices: how many matrices share the role's spec.
        shape: (K, D) of each.
        curves: pairs with their errors.
        sensitivity: growth of the model's squared error with this role's.
        picked: (options, 2) the curve and the number of terms of each; no terms keep the weight.
        costs: (options, len(COSTS)).
        errors: (options,) relative squared error of each.
        dense: (len(COSTS),) of the role as it is.
        alone: it is the layer's only role, so that keeping it keeps the layer.
    """

    layer: FreeLayer
    role: str
    matrices: int
    shape: tuple[int, int]
    curves: list[Curve]
    sensitivity: float
    picked: np.ndarray
    costs: np.ndarray
    errors: np.ndarray
    dense: np.ndarray
    alone: bool

    @property
    def size(self) -> int:
        """Numbers in one of its matrices."""
        return self.shape[0] * self.shape[1]

    @property
    def name(self) -> str:
        return self.layer.site.name

    def spec(self, at: int) -> FactorSpec | None:
        """Return the factors of an option; None where the layer stays."""
        curve, rank = map(int, self.picked[at])
        if rank:
            return self.curves[curve].spec.model_copy(update={"rank": rank})
        return None if self.alone else whole(self.shape[1], self.shape[0])


def make_unit(
    layer: FreeLayer,
    role: str,
    shape: tuple[int, int],
    matrices: int,
    curves: list[Curve],
    sensitivity: float,
    *,
    alone: bool,
) -> Unit:
    """List the options of a role.

    Args:
        shape: (K, D) of its matrices.
        alone: it is the layer's only role, so that keeping it keeps the layer.
    """
    size = shape[0] * shape[1]
    dense = _dense_costs(layer, matrices, size, alone=alone)
    picked = [np.zeros((1, 2), dtype=np.int64)]
    costs = [dense[None]]
    errors = [np.zeros(1)]
    for place, curve in enumerate(curves):
        terms = _terms(curve, size if alone else size + 1)
        if not len(terms):
            continue
        picked.append(np.stack([np.full_like(terms, place), terms], 1))
        costs.append(_costs(layer, role, matrices, size, curve.spec, terms, dense, alone=alone))
        errors.append(curve.errors[terms].astype(np.float64))
    unit = Unit(
        layer,
        role,
        matrices,
        shape,
        curves,
        sensitivity,
        np.concatenate(picked),
        np.concatenate(costs),
        np.concatenate(errors),
        dense,
        alone,
    )
    if layer.floor:
        _drop(unit, unit.costs[:, 0] >= layer.floor * matrices * size)
    return unit


def with_option(unit: Unit, place: int, rank: int) -> int:
    """Add an option, a number of terms of one of the unit's curves; return its place."""
    curve = unit.curves[place]
    terms = np.array([rank], dtype=np.int64)
    costs = _costs(
        unit.layer,
        unit.role,
        unit.matrices,
        unit.size,
        curve.spec,
        terms,
        unit.dense,
        alone=unit.alone,
    )
    unit.picked = np.concatenate([unit.picked, [[place, rank]]])
    unit.costs = np.concatenate([unit.costs, costs])
    unit.errors = np.append(unit.errors, float(curve.errors[rank]))
    return len(unit.errors) - 1


def kept(unit: Unit) -> Unit:
    """Return a unit that can only stay what it is."""
    return replace(
        unit, picked=unit.picked[:1], costs=unit.costs[:1], errors=unit.errors[:1], curves=[]
    )


def _drop(unit: Unit, keep: np.ndarray) -> None:
    unit.picked = unit.picked[keep]
    unit.costs = unit.costs[keep]
    unit.errors = unit.errors[keep]


def _terms(curve: Curve, size: int) -> np.ndarray:
    """Return the numbers of terms that are worth a look: those that save something."""
    most = min(len(curve.errors) - 1, (size - 1) // curve.spec.params)
    found = list(range(1, min(most, FINE) + 1))
    while found and found[-1] < most:
        found.append(min(most, max(found[-1] + 1, int(found[-1] * STEP))))
    return np.array(found, dtype=np.int64)


def _dense_costs(layer: FreeLayer, matrices: int, size: int, *, alone: bool) -> np.ndarray:
    one = 0 if alone else matrices
    share = matrices * size / max(1, _weights(layer))
    times = []
    for shapes in layer.shapes:
        speed = _speed(layer, shapes)
        times.append(0.0 if speed is None else speed * share)
    return np.array([matrices * size + one, layer.dense_macs * share, *times])


def _weights(layer: FreeLayer) -> int:
    """Count the numbers in all weight matrices of a layer."""
    found = layer.site.kind.matrices(layer.site.module, Spread())
    return sum(one.numel() for ones in found.values() for one in ones)


def _speed(layer: FreeLayer, shapes: Sequence[Shape]) -> float | None:
    """Return the predicted time of the layer as it is."""
    site = layer.site
    found = predict(site.kind, site.module, layer.widths, layer.any_factors(), shapes)
    return None if found is None else found.dense


def _costs(
    layer: FreeLayer,
    role: str,
    matrices: int,
    size: int,
    spec: FactorSpec,
    terms: np.ndarray,
    dense: np.ndarray,
    *,
    alone: bool,
) -> np.ndarray:
    """Return the costs for each number of terms: counted at a few, and linear between."""
    found = np.empty((len(terms), len(COSTS)))
    found[:, 0] = terms * spec.params * matrices
    picked = np.unique(np.linspace(0, len(terms) - 1, 5).astype(int))
    counted = np.array(
        [
            _counted(layer, role, matrices, size, spec.model_copy(update={"rank": int(r)}), dense)
            if not alone
            else _counted_alone(layer, role, spec.model_copy(update={"rank": int(r)}))
            for r in terms[picked]
        ]
    )
    for column in range(1, len(COSTS)):
        found[:, column] = np.interp(terms, terms[picked], counted[:, column - 1])
    return found


def _counted_alone(layer: FreeLayer, role: str, spec: FactorSpec) -> list[float]:
    site, factors = layer.site, {role: spec}
    costs = [float(site.kind.macs(site.module, layer.widths, factors, layer.shapes[0]))]
    for shapes in layer.shapes:
        speed = predict(site.kind, site.module, layer.widths, factors, shapes)
        costs.append(0.0 if speed is None else speed.converted)
    return costs


def _counted(
    layer: FreeLayer,
    role: str,
    matrices: int,
    size: int,
    spec: FactorSpec,
    dense: np.ndarray,
) -> list[float]:
    """Return the costs of a role among others: on its factors, or on the weight built once."""
    steps = dense[1] / max(1, matrices * size)  # rows that it multiplies
    factored = steps * matrices * bilinear_macs(spec)
    built = dense[1] + matrices * size * spec.rank
    return [built if layer.builds else min(factored, built), *(BUILT * dense[2:])]
