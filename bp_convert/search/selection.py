"""Targets in, factors out: the choice among all layers' options."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf, sqrt

import numpy as np

from bp_convert.errors import PlanError
from bp_convert.kinds import Factors
from bp_convert.programmes.exact import KEPT
from bp_convert.search.aligning import align
from bp_convert.search.allocate import (
    ERROR,
    OutOfReachError,
    allocate,
    loss,
    quantity,
    squared_error,
)
from bp_convert.search.curves import Curve
from bp_convert.search.pace import NEARLY, Choice, paced
from bp_convert.search.units import COSTS, Unit, bytes_each
from bp_convert.values.factors import FactorSpec
from bp_convert.values.literals import Prefer, Store
from bp_convert.values.plan import Tried
from bp_convert.values.target import Target

AS_IT_IS = (None,)
FILLS = 40  # single terms that what is left over is spent on
LEFT = 0.01  # share of a target from which on what is left over is spoken of
WIDER = ", or let more layers take part: fewer --exclude, lower floors"
SLOWER = "to keep the target the model is predicted to run slower than before"


@dataclass(frozen=True)
class Budget:
    """What the whole model has of the quantities that targets limit.

    Attributes:
        before: of the source.
        fixed: what stays whatever is chosen.
        held: words on the weights that no kind speaks for, the largest share first.
        narrowed: whether settings keep layers out of the choice.
    """

    before: Mapping[str, float]
    fixed: Mapping[str, float]
    held: str = ""
    narrowed: bool = True

    def room(self, target: Target) -> float:
        """Return what a target leaves to the units, in the unit of their costs."""
        if target.quantity == "error":
            return float(loss(target.value**2))
        return target.limit(self.before[target.quantity]) - self.fixed[target.quantity]

    def column(self, target: Target) -> str:
        """Return the column of costs that a target limits."""
        return "bytes" if target.quantity == "size" else target.quantity

    def total(self, target: Target, units: float) -> float:
        """Return the whole model's quantity where the units take this much."""
        return units + self.fixed[target.quantity]


@dataclass
class Allocation:
    """The choice.

    Attributes:
        factors: of the layers that are replaced, by name and role.
        shares: factors that are another layer's, and whose, by name.
        stores: of the layers whose weights are stored in other bits, by name.
        errors: estimated relative error of each layer that is replaced or rounded.
        sensitivities: of every layer that took part.
        error: estimated relative error of the output.
        params: that all of what was chosen takes.
        macs_limited: multiply-adds are among what was limited.
        notes: what the user should know.
        sides: layers that are fitted by what the model makes of their outputs, too.
        shrink: how much of their mean variance is added to what layers see.
        tried: what was tried on examples held out of calibration.
    """

    factors: dict[str, Factors] = field(default_factory=dict)
    shares: dict[str, dict[str, str]] = field(default_factory=dict)
    stores: dict[str, set[Store | None]] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)
    sensitivities: dict[str, float] = field(default_factory=dict)
    error: float = 0.0
    params: float = 0.0
    macs_limited: bool = False
    notes: list[str] = field(default_factory=list)
    sides: set[str] = field(default_factory=set)
    shrink: float = 0.0
    tried: list[Tried] = field(default_factory=list)

    @property
    def sharing(self) -> set[str]:
        """Names of the layers that share factors."""
        return {*self.shares, *(whose for one in self.shares.values() for whose in one.values())}


def choose(
    units: Sequence[Unit],
    targets: Sequence[Target],
    budget: Budget,
    *,
    guarded: bool = True,
    prefer: Prefer = "balanced",
) -> Allocation:
    """Return the factors of least error within the targets, or, where the error is a target, of
    fewest parameters.

    Args:
        guarded: keep the whole model as fast as it is, at batches of 1 and of 32, where the
            targets leave room for that.
        prefer: what error may be given for time.

    Raises:
        PlanError: a target out of reach; the error names the range.
    """
    limits: dict[str, float] = {}
    for target in targets:
        column = budget.column(target)
        limits[column] = min(budget.room(target), limits.get(column, float("inf")))
    found = Allocation()
    try:
        choice = Choice(units, allocate(units, limits))
    except OutOfReachError as problem:
        raise _refusal(units, targets, budget, problem) from None
    if guarded:
        choice, limits, slower = paced(choice, limits, prefer)
        found.notes += [SLOWER] if slower else []
    choice.at = [_polished(unit, at, limits) for unit, at in zip(units, choice.at, strict=True)]
    there = align(choice, limits, NEARLY[prefer])
    _fill(choice, limits, there)
    found.notes += _unspent(choice, targets, budget, prefer)
    return _result(found, choice, limits)


def _unspent(
    choice: Choice, targets: Sequence[Target], budget: Budget, prefer: Prefer
) -> list[str]:
    """Say so where more than a hundredth of every target is left over."""
    words = []
    why = (
        "for speed, which is preferred" if prefer == "speed" else "nothing that fits in gains by it"
    )
    for target in targets:
        if target.quantity == "error":
            return []
        limit = target.limit(budget.before[target.quantity])
        left = limit - budget.total(target, choice.sum(budget.column(target)))
        if left <= LEFT * limit:
            return []
        words.append(f"{target} leaves {target.said(left)} over: {why}")
    return words


def _fill(choice: Choice, limits: Mapping[str, float], there: Collection[int] = ()) -> None:
    """Give what the grid of terms left over to whichever unit gains most by it, again and again.

    Args:
        there: places of units whose numbers of terms are to stay.
    """
    if not limits or ERROR in limits:
        return
    for _ in range(FILLS):
        room = {name: limit - choice.sum(name) for name, limit in limits.items()}
        gains = []
        for place, (unit, at) in enumerate(zip(choice.units, choice.at, strict=True)):
            if place in there:
                continue
            new = _polished(unit, at, limits, room)
            errors = quantity(unit, ERROR)
            gains.append((float(errors[at] - errors[new]), -place, new))
        gain, place, new = max(gains, default=(0.0, 0, 0))
        if gain <= 0:
            break
        choice.at[-place] = new


def _polished(
    unit: Unit, at: int, limits: Mapping[str, float], room: Mapping[str, float] | None = None
) -> int:
    """Return an option that costs no more than the room there is and errs least, numbers of terms
    between those of the grid included.

    This also holds each layer to what truncated SVD reaches with the same parameters.
    """
    if unit.spec(at) is None:
        return at
    names = [name for name in limits if name != ERROR]
    base = COSTS.index("bytes" if "bytes" in limits else "params")
    columns = sorted({COSTS.index(name) for name in names} | {base})
    allowed = unit.costs[at, columns] * (1 + KEPT)
    for name, more in (room or {}).items():
        allowed[columns.index(COSTS.index(name))] += max(0.0, more)
    if room and not {"params", "bytes"} & set(limits):
        allowed[0] = unit.size * unit.matrices
    most_bytes = allowed[columns.index(base)]
    best, error = at, unit.errors[at]
    for number, curve in enumerate(unit.curves):
        most = (unit.size - 1) // curve.spec.params  # beyond, it saves nothing
        if "bytes" in limits:
            rank = _affordable(unit, curve, min(most, len(curve.errors) - 1), most_bytes)
        else:
            rank = int(min(most, most_bytes // (curve.spec.params * unit.matrices)))
        rank = min(rank, len(curve.errors) - 1)
        if rank < 1 or curve.errors[rank] >= error:
            continue
        place = unit.add(number, np.array([rank]))
        enough = unit.costs[place, 0] >= unit.layer.floor * unit.matrices * unit.size
        if enough and (unit.costs[place, columns] <= allowed).all():
            best, error = place, unit.errors[place]
    return best


def _affordable(unit: Unit, curve: Curve, most: int, limit: float) -> int:
    """Return the largest number of terms within a limit of bytes."""
    terms = np.arange(1, most + 1)
    return int((unit.bytes_of(curve, terms) <= limit).sum())


def _result(found: Allocation, choice: Choice, limits: Mapping[str, float]) -> Allocation:
    squared: dict[str, float] = {}
    found.params, found.macs_limited = choice.sum("params"), "macs" in limits
    for unit, at in zip(choice.units, choice.at, strict=True):
        spec, error = unit.spec(at), float(unit.errors[at])
        found.error += float(loss(error)) * unit.sensitivity
        for layer, own, shares in unit.members(spec):
            name = layer.site.name
            known = found.sensitivities.get(name, 0.0)
            found.sensitivities[name] = max(unit.sensitivity, known)
            if unit.whole != AS_IT_IS:
                found.stores.setdefault(name, set()).add(unit.store(at))
            if own is not None:
                found.factors.setdefault(name, {})[unit.role] = own
                if shares:
                    found.shares[name] = shares
            if own is not None or unit.store(at) is not None:
                squared[name] = max(squared.get(name, 0.0), error)
    found.error = sqrt(squared_error(found.error))
    layers = {unit.name: unit.layer for unit in choice.units if not unit.many}
    room = {name: limits.get(name, inf) - choice.sum(name) for name in ("params", "bytes")}
    for name, factors in list(found.factors.items()):
        if name in layers and all(map(_is_whole, factors.values())):
            site, widths = layers[name].site, layers[name].widths
            dense, small = (site.kind.params(site.module, widths, one) for one in (None, factors))
            more = {"params": dense - small, "bytes": (dense - small) * bytes_each(layers[name])}
            # No role gained: the layer stays, with biases that its twin merges.
            if all(one <= room[column] for column, one in more.items()):
                room = {column: room[column] - max(0, one) for column, one in more.items()}
                del found.factors[name]
                if name not in found.stores:
                    del squared[name]
    found.errors = {name: sqrt(error) for name, error in squared.items()}
    return found


def _is_whole(spec: FactorSpec) -> bool:
    return spec.out[0] == spec.inp[0] == spec.rank == 1 and not spec.axes


def _refusal(
    units: Sequence[Unit], targets: Sequence[Target], budget: Budget, problem: OutOfReachError
) -> PlanError:
    target = min(
        (one for one in targets if budget.column(one) == problem.quantity), key=budget.room
    )
    if target.quantity == "error":
        least = sqrt(squared_error(problem.least))
        return PlanError(
            where=f"target {target}",
            found=f"with the other targets the error is at least {least:.3g}",
            allowed="an error that the other targets leave room for",
            fix="loosen one of the targets",
        )
    column = COSTS.index(budget.column(target))
    alone = sum(float(unit.costs[:, column].min()) for unit in units)
    least = max(problem.least, alone)
    lowest, before = budget.total(target, least), budget.before[target.quantity]
    beside = len(targets) > 1 and least > alone * (1 + 1e-9)
    refusal = PlanError(
        where=f"target {target}",
        found=f"{target.said(target.limit(before))} of {target.said(before)} is out of reach"
        + (" beside the other targets" if beside else ""),
        allowed=f"from {target.said(lowest)} (a share of {lowest / before:.4g})"
        + (f" to {target.said(before)}" if lowest <= before else ""),
        fix=("loosen one of the targets" if beside else "ask for a value in this range")
        + (WIDER if budget.narrowed else "")
        + (f"; for want of a kind these stay as they are: {budget.held}" if budget.held else "")
        + target.hint,
    )
    refusal.lowest = lowest
    return refusal
