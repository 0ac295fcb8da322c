"""Options of layers that share factors: one row stands for all of them, and counts what is shared
once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from bp_convert.graph.walk import Site
from bp_convert.groups.members import Tied
from bp_convert.search.curves import Curve
from bp_convert.search.units import COSTS, REPLACED, FreeLayer, Unit, bytes_each
from bp_convert.values.factors import FactorSpec

Own = Callable[[Site, FactorSpec], FactorSpec]  # a member's factors, given the group's
Shares = Callable[[Site], dict[str, str]]


@dataclass
class GroupUnit(Unit):
    """Layers that share factors, and their options together.

    Attributes:
        others: the layers besides the first.
        own: gives a member's factors, given the group's.
        shares: tells which factors of a member are another's, and whose.
        numbers: in the weights that the options stand for.
    """

    others: Sequence[FreeLayer] = ()
    own: Own = lambda _, spec: spec
    shares: Shares = lambda _: {}
    numbers: int = 0

    @property
    def many(self) -> bool:
        return True

    @property
    def size(self) -> int:
        return self.numbers

    def members(
        self, spec: FactorSpec | None
    ) -> list[tuple[FreeLayer, FactorSpec | None, dict[str, str]]]:
        return [
            (one, None if spec is None else self.own(one.site, spec), self.shares(one.site))
            for one in (self.layer, *self.others)
        ]

    def bytes_of(self, curve: Curve, terms: np.ndarray) -> np.ndarray:
        return super().bytes_of(curve, terms) + REPLACED * len(self.others)

    def _counted(self, spec: FactorSpec) -> list[float]:
        found = np.zeros(len(COSTS) - 2)
        for layer, own, _ in self.members(spec):
            assert own is not None
            factors = {self.role: own}
            times = [converted for _, converted in layer.times(factors)]
            found += np.array([float(layer.macs(factors)), *times])
        return [float(one) for one in found]


def group_unit(
    layers: Sequence[FreeLayer],
    curves: list[Curve],
    sensitivity: float,
    *,
    shape: tuple[int, int],
    own: Own,
    shares: Shares,
) -> Unit:
    """List the options of layers that share factors.

    Args:
        layers: whose factors are shared comes first.
        curves: of what the shared factors stand for.
        shape: (K, D) of that.
        own: gives a member's factors, given those of a curve.
        shares: tells which factors of a member are another's, and whose.
    """
    numbers = shape[0] * shape[1]
    dense = np.zeros(len(COSTS))
    for one in layers:
        times = [before for before, _ in one.times(one.any_factors())]
        dense[1:-1] += np.array([float(one.dense_macs), *times])
    each = bytes_each(layers[0])
    dense[0], dense[-1] = numbers, numbers * each
    unit = GroupUnit(
        *(layers[0], "weight", 1, shape, curves, sensitivity, dense, True),
        picked=np.zeros((1, 2), dtype=np.int64),
        costs=dense[None],
        errors=np.zeros(1),
        each=each,
        others=layers[1:],
        own=own,
        shares=shares,
        numbers=numbers,
    )
    unit.add_all()
    floor = max(one.floor for one in layers)
    return unit.only(unit.costs[:, 0] >= floor * numbers) if floor else unit


def tied_unit(
    group: Tied, layers: Sequence[FreeLayer], curves: list[Curve], sensitivity: float
) -> Unit:
    """List the options of layers that hold one table."""
    first = layers[0]
    shape = first.widths[1], first.widths[0]
    return group_unit(layers, curves, sensitivity, shape=shape, own=group.spec, shares=group.shares)
