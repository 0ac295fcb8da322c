"""What may become of each weight, with what it costs: the rows that a budget is spent on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

import numpy as np

from bp_convert.bits.grid import FORMS, LEAST
from bp_convert.graph.walk import Site
from bp_convert.kinds import Factors, Spread, Widths, predict, whole
from bp_convert.kinds.shapes import Shape
from bp_convert.kinds.speed import Speed
from bp_convert.kron.contract import bilinear_macs
from bp_convert.search.curves import Curve
from bp_convert.values.factors import FactorSpec
from bp_convert.values.literals import Store, Ways
from bp_convert.values.plan import Way

REPLACED = 500  # bytes of a file, on the safe side, that say what a layer's factors are,
FACTORS = 300  # for two of them in the place of a matrix,
PARTS = 650  # and for the further tensor that a packed one takes
FINE = 48  # numbers of terms up to which every one is an option
STEP = 1.03  # ratio of neighbouring numbers of terms above
COSTS = ("params", "macs", "time", "time32", "latency", "bytes")


@dataclass(frozen=True)
class Timed:
    """A layer's time in the model where a target limits the model's.

    Attributes:
        dense: measured, in microseconds, of a pass at the batch that the target speaks of.
        shapes: inputs of its calls at that batch.
        factor: by which its predictions are corrected.
    """

    dense: float
    shapes: Sequence[Shape]
    factor: float = 1.0

    def predicted(
        self, site: Site, widths: Widths, factors: Factors, way: Way = "factored"
    ) -> float:
        """Return its time converted."""
        found = predict(site.kind, site.module, widths, factors, self.shapes)
        return self.dense * self.factor * (1.0 if found is None else found.on(way) / found.dense)


@dataclass(frozen=True)
class FreeLayer:
    """One layer that a budget may be spent on.

    Attributes:
        site: the layer.
        widths: its inputs and outputs after widening.
        shapes: inputs of its calls, for one example and for 32; empty where not known.
        dense_macs: multiply-adds of one example as it is.
        floor: share of its parameters below which it may not go.
        ways: how it may run.
        timed: its time where a target limits that.
    """

    site: Site
    widths: Widths
    shapes: tuple[Sequence[Shape], Sequence[Shape]]
    dense_macs: int
    floor: float = 0.0
    timed: Timed | None = None
    ways: Ways = "factored"

    def any_factors(self) -> Factors:
        """Return some factors that fit, for what hangs on none in particular."""
        kind, module = self.site.kind, self.site.module
        choices = kind.choices(module, self.widths)
        return {role: next(iter(one.specs())) for role, one in choices.items()}

    @cached_property
    def builds(self) -> bool:
        """Whether even the fewest terms run on a weight that is built, as small LSTMs do."""
        choices = self.site.kind.choices(self.site.module, self.widths)
        fewest = {
            role: min(one.specs(), key=lambda spec: spec.params) for role, one in choices.items()
        }
        return self.macs(fewest) > self.dense_macs

    @cached_property
    def sizes(self) -> dict[str, tuple[int, int]]:
        """(K, D) of each role's matrices."""
        found = self.site.kind.matrices(self.site.module, Spread())
        return {role: (ones[0].shape[0], ones[0].shape[1]) for role, ones in found.items()}

    @cached_property
    def weights(self) -> int:
        """Numbers in all its weight matrices."""
        found = self.site.kind.matrices(self.site.module, Spread())
        return sum(one.numel() for ones in found.values() for one in ones)

    def macs(self, factors: Factors) -> int:
        """Return the multiply-adds of one example on factors."""
        return self.site.kind.macs(self.site.module, self.widths, factors, self.shapes[0])

    def times(self, factors: Factors) -> list[tuple[float, float]]:
        """Return the times of its calls, dense and on factors: predicted for one example and for
        32, zeros where there is nothing to go by; and what a target of latency counts."""
        kind, module = self.site.kind, self.site.module
        found = [predict(kind, module, self.widths, factors, shapes) for shapes in self.shapes]
        way = self._way(factors, found[0])
        told = [(0.0, 0.0) if one is None else (one.dense, one.on(way)) for one in found]
        return [*told, self.latency(factors, way)]

    def way_of(self, factors: Factors) -> Way:
        """Return how its twin on these factors would run."""
        known = self.site.kind, self.site.module, self.widths
        found = predict(*known, factors, self.shapes[0])
        if found is None and self.ways == "expanded" and getattr(known[0].twin, "EXPANDS", False):
            return "expanded"
        return self._way(factors, found)

    def _way(self, factors: Factors, found: Speed | None) -> Way:
        """Return the way of all its calls: the faster one of those that a target of latency counts,
        else of one example.

        Args:
            found: the times of one example.
        """
        if self.timed is not None:
            kind, module = self.site.kind, self.site.module
            found = predict(kind, module, self.widths, factors, self.timed.shapes)
        return "factored" if found is None else found.way(self.ways)

    def latency(self, factors: Factors, way: Way) -> tuple[float, float]:
        """Return what a target of latency counts, dense and converted; zeros where none does."""
        if self.timed is None:
            return 0.0, 0.0
        return self.timed.dense, self.timed.predicted(self.site, self.widths, factors, way)

    def role_times(self, role: str, spec: FactorSpec, numbers: int) -> list[float]:
        """Return a role's share of the converted times where costs do not add up: as if the other
        roles were of low rank, with as large a share of their parameters.

        Args:
            numbers: in the role's matrices.
        """
        share = spec.params / prod((*spec.out, *spec.inp))
        factors = {role: spec}
        for other, (rows, columns) in self.sizes.items():
            if other != role:
                rank = max(1, round(share * rows * columns / (rows + columns)))
                factors[other] = FactorSpec(out=(rows, 1), inp=(1, columns), rank=rank)
        return [numbers / self.weights * converted for _, converted in self.times(factors)]


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
        dense: (len(COSTS),) of the role as it is.
        alone: it is the layer's only role, so that keeping it keeps the layer.
        picked: (options, 2) the curve and the number of terms of each; no terms keep the weight.
        costs: (options, len(COSTS)).
        errors: (options,) relative squared error of each.
        whole: how the weight may be stored where it is kept; an option without terms has the place
            here where others have that of their curve.
        each: bytes of a number that is stored as it is.
    """

    layer: FreeLayer
    role: str
    matrices: int
    shape: tuple[int, int]
    curves: list[Curve]
    sensitivity: float
    dense: np.ndarray
    alone: bool
    picked: np.ndarray
    costs: np.ndarray
    errors: np.ndarray
    whole: tuple[Store | None, ...] = (None,)
    each: float = 4.0

    @property
    def size(self) -> int:
        """Numbers in one of its matrices."""
        return self.shape[0] * self.shape[1]

    @property
    def name(self) -> str:
        return self.layer.site.name

    @property
    def many(self) -> bool:
        """Whether several layers stand behind it."""
        return False

    def members(
        self, spec: FactorSpec | None
    ) -> list[tuple[FreeLayer, FactorSpec | None, dict[str, str]]]:
        """Return each layer behind it with its own factors, and which of those it shares, given
        an option's; no factors where it stays."""
        return [(self.layer, spec, {})]

    def spec(self, at: int) -> FactorSpec | None:
        """Return the factors of an option; None where the layer stays."""
        curve, rank = map(int, self.picked[at])
        if rank:
            return self.curves[curve].spec.model_copy(update={"rank": rank})
        return None if self.alone else whole(self.shape[1], self.shape[0])

    def store(self, at: int) -> Store | None:
        """Return how an option is stored; None as it is."""
        place, rank = map(int, self.picked[at])
        return self.curves[place].store if rank else self.whole[place]

    def add(self, place: int, terms: np.ndarray) -> int:
        """Add options, numbers of terms of one of its curves; return the last one's place."""
        curve = self.curves[place]
        picked = np.stack([np.full_like(terms, place), terms], 1)
        self.picked = np.concatenate([self.picked, picked])
        self.costs = np.concatenate([self.costs, self._costs(curve, terms)])
        self.errors = np.concatenate([self.errors, curve.errors[terms].astype(np.float64)])
        return len(self.errors) - 1

    def add_all(self) -> None:
        """Add the options of all of its curves."""
        for place, curve in enumerate(self.curves):
            terms = _terms(curve, self.size if self.alone else self.size + 1)
            if len(terms):
                self.add(place, terms)

    def costs_of(self, spec: FactorSpec) -> np.ndarray:
        """Return the costs of some factors."""
        one = spec.model_copy(update={"rank": 1})
        found: np.ndarray = self._costs(Curve(one, np.zeros(0)), np.array([spec.rank]))[0]
        return found

    def only(self, at: np.ndarray | slice) -> Unit:
        """Return the unit with some of its options."""
        return replace(self, picked=self.picked[at], costs=self.costs[at], errors=self.errors[at])

    def kept(self) -> Unit:
        """Return a unit that can only stay what it is."""
        return replace(self.only(self.picked[:, 1] == 0), curves=[])

    def bytes_of(self, curve: Curve, terms: np.ndarray) -> np.ndarray:
        """Return the bytes of factors for each number of terms."""
        turned = self.layer.site.kind.lookup
        found = factor_bytes(curve.spec, terms, curve.store, self.each, turned=turned)
        return self.matrices * found + REPLACED * self.alone

    def _costs(self, curve: Curve, terms: np.ndarray) -> np.ndarray:
        """Return the costs for each number of terms: counted at a few, and linear between."""
        spec = curve.spec
        found = np.empty((len(terms), len(COSTS)))
        found[:, 0] = terms * spec.params * self.matrices
        found[:, -1] = self.bytes_of(curve, terms)
        at = terms[np.unique(np.linspace(0, len(terms) - 1, 5).astype(int))]
        counted = [self._counted(spec.model_copy(update={"rank": int(rank)})) for rank in at]
        for column, values in enumerate(zip(*counted, strict=True), 1):
            found[:, column] = np.interp(terms, at, values)
        return found

    def _counted(self, spec: FactorSpec) -> list[float]:
        """Return the costs but parameters and bytes. A role among others counts for itself where
        costs add up, else it runs on its factors, or on the weight built once."""
        if self.alone or self.layer.site.kind.additive:
            factors = {self.role: spec}
            times = (converted for _, converted in self.layer.times(factors))
            return [float(self.layer.macs(factors)), *times]
        numbers = self.matrices * self.size
        steps = self.dense[1] / max(1, numbers)  # rows that it multiplies
        factored = steps * self.matrices * bilinear_macs(spec)
        built = self.dense[1] + numbers * spec.rank
        macs = built if self.layer.builds else min(factored, built)
        return [macs, *self.layer.role_times(self.role, spec, self.matrices * self.size)]


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
    one = 0 if alone else matrices
    share = matrices * size / max(1, layer.weights)
    times = [share * before for before, _ in layer.times(layer.any_factors())]
    numbers = matrices * size + one
    each = bytes_each(layer)
    taken = numbers * each + (0 if alone else matrices * FACTORS)
    dense = np.array([numbers, layer.dense_macs * share, *times, taken])
    nothing, stays = np.zeros((1, 2), dtype=np.int64), np.zeros(1)
    unit = Unit(
        *(layer, role, matrices, shape, curves, sensitivity, dense, alone),
        picked=nothing,
        costs=dense[None],
        errors=stays,
        each=each,
    )
    unit.add_all()
    return unit.only(unit.costs[:, 0] >= layer.floor * matrices * size) if layer.floor else unit


def bytes_each(layer: FreeLayer) -> float:
    """Return the bytes of one of a layer's numbers."""
    held = layer.site.held.parameters()
    return float(next((one.element_size() for one in held if one.is_floating_point()), 4))


def factor_bytes(
    spec: FactorSpec,
    terms: np.ndarray,
    store: Store | None,
    each: float,
    *,
    turned: bool = False,
) -> np.ndarray:
    """Return the bytes of two factors for each number of terms.

    Args:
        turned: they are of a table, whose first factor lies with its rows first.
    """
    (k1, k2), (d1, d2) = spec.out, spec.inp
    found = np.full(len(terms), float(FACTORS))
    for one, two in ((d1, k1) if turned else (k1, d1), (d2, k2)):
        numbers = terms * float(one * two)
        form = FORMS.get(store or "")
        if form is None:
            found += numbers * each
            continue
        packed = terms * float(form.nbytes((1, one, two))) + PARTS
        found += np.where(numbers < LEAST, numbers * each, packed)
    return found


def _terms(curve: Curve, size: int) -> np.ndarray:
    """Return the numbers of terms that are worth a look: those that save something."""
    most = min(len(curve.errors) - 1, (size - 1) // curve.spec.params)
    found = list(range(1, min(most, FINE) + 1))
    while found and found[-1] < most:
        found.append(min(most, max(found[-1] + 1, int(found[-1] * STEP))))
    return np.array(found, dtype=np.int64)
