"""Several ways of spending a target, tried on examples held out of calibration; the best is taken.

What is tried in turn: what the layers' errors weigh in the choice, which sides each group of layers
is fitted by, and how far what layers see is drawn towards the metric of the weights alone. Each
step keeps what it started from unless something else is better by more than chance, so that none
makes the model worse on those examples.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import sqrt

import torch
from torch import Tensor

from bp_convert.errors import PlanError
from bp_convert.groups.stacked import Stacked
from bp_convert.search.allocate import loss, squared_error
from bp_convert.search.selection import Allocation
from bp_convert.search.units import Unit
from bp_convert.spending.rehearsal import Rehearsal
from bp_convert.values.plan import Tried
from bp_convert.values.progress import Progress
from bp_convert.values.settings import Settings

STRENGTHS = (0.03, 0.3)  # of shrinking, tried in turn while they help
GROUPS = 6  # of layers alike whose sides are tried one by one, the largest
LARGE = 1e11  # cubes of widths, in all, beyond which they are not: a try takes minutes
BOUNDS = 1e-3, 1e3  # of what a layer's error weighs

CLOSE = 1.1  # times the least error, up to which a choice of bits is tried on all examples,
FINALS = 4  # so many at most

Choose = Callable[[Sequence[Unit]], Allocation]


@dataclass(frozen=True)
class _Result:
    words: str
    found: Allocation
    errors: Tensor
    units: Sequence[Unit] = ()

    @property
    def mean(self) -> float:
        return float(self.errors.mean())


@dataclass
class Trying:
    """Tries ways of spending a target.

    Args:
        rehearsal: tries a choice.
        choose: spends the target on units.
        settings: what may be tried.
        alike: units of which all are stored alike, by words on it.

    Attributes:
        tried: what was tried.
        units: what the best choice was made among, as their errors weigh in it.
        errors: of the best choice on each example that is held out.
    """

    rehearsal: Rehearsal
    choose: Choose
    settings: Settings
    progress: Progress
    alike: Mapping[str, Sequence[Unit]] = field(default_factory=dict)
    tried: list[Tried] = field(default_factory=list)
    units: Sequence[Unit] = ()
    errors: Tensor | None = None

    def best(self, units: Sequence[Unit], first: Allocation) -> Allocation:
        """Return the best of several choices, with what was tried.

        Args:
            first: the choice by the units' own sensitivities.
        """
        sides: set[str] = set()
        if self.settings.sides != "inputs":
            sides = {name for name, _ in self.rehearsal.candidates.evidence.slopes}
        shrink = 0.0 if self.settings.shrink == "auto" else self.settings.shrink
        self.progress("trying the choice on examples held out", 0, 1)
        errors = self._errors(first, sides, shrink)
        if errors is None or not (first.factors or first.stores):
            return first
        best, words = first, "as measured"
        if self.settings.allocation == "uniform":
            words = "all layers alike"
        taken = self._note(words, errors)
        known = [(first.factors, first.stores)]
        results = [_Result(words, first, errors)]
        for told, other in self._others(units):
            try:
                found = self.choose(other)
            except PlanError:  # out of reach like that, or rounding: the first one stands
                continue
            if (found.factors, found.stores) in known:
                continue
            known.append((found.factors, found.stores))
            now = self._errors(found, sides, shrink)
            if now is None:
                continue
            place = self._note(told, now)
            results.append(_Result(told, found, now, other))
            if is_nearer(now, errors):
                best, errors, taken = found, now, place
                self.units = other
        if self.alike:
            final, place = self._confirmed(results, best, sides, shrink)
            if final is not None:
                best, errors, taken, self.units = final.found, final.errors, place, final.units
        if self.settings.sides == "auto":
            sides, errors, taken = self._sided(units, best, sides, shrink, errors, taken)
        if self.settings.shrink == "auto":
            for strength in STRENGTHS:
                now = self._errors(best, sides, strength)
                if now is None:
                    continue
                place = self._note(f"what layers see drawn {strength:g} towards the weights", now)
                if not is_nearer(now, errors):
                    break
                shrink, errors, taken = strength, now, place
        self.tried = [
            one.model_copy(update={"taken": at == taken}) for at, one in enumerate(self.tried)
        ]
        self.errors = errors
        return replace(
            best,
            sensitivities=first.sensitivities,
            error=estimated(units, best),
            sides={name for name in best.factors if name in sides},
            shrink=shrink,
            tried=self.tried,
            notes=best.notes,
        )

    def _confirmed(
        self, results: Sequence[_Result], best: Allocation, sides: set[str], shrink: float
    ) -> tuple[_Result | None, int]:
        """Return which of the choices that are nearly as good is the best where all examples are
        fitted to, and its place among what was tried: how many bits are best hangs on how well
        layers can be fitted."""
        rehearsal = self.rehearsal.thorough
        (taken,) = (one for one in results if one.found is best)
        close = [
            one
            for at, one in enumerate(results)
            if (at == 0 or one.words in self.alike) and one is not taken
            if one.mean <= CLOSE**2 * taken.mean
        ]
        finals = [taken, *sorted(close, key=lambda one: one.mean)][:FINALS]
        if rehearsal is None or len(finals) < 2:
            return None, 0
        reached: list[tuple[_Result, Tensor, int]] = []
        for one in finals:
            now = self._errors(one.found, sides, shrink, rehearsal)
            if now is not None:
                reached.append((one, now, self._note(f"{one.words}, fitted to all examples", now)))
        if not reached:
            return None, 0
        final, errors, place = reached[0]
        for one, now, at in reached[1:]:
            if is_nearer(now, errors):
                final, errors, place = one, now, at
        return final, place

    def _others(self, units: Sequence[Unit]) -> Iterator[tuple[str, Sequence[Unit]]]:
        """Yield what else a choice may be made among, and words on it: in the bits that were best
        so far layers' errors may weigh other things, too."""
        yield from self.alike.items()
        if self.settings.allocation != "auto" or any(
            one.quantity == "error" for one in self.settings.target
        ):
            return
        bases = {"": units}
        bases |= {f", {told}": one for told, one in self.alike.items() if one is self.units}
        for told, weights in self._ways(units).items():
            for more, base in bases.items():
                yield told + more, self._weighed(base, weights)

    @staticmethod
    def _weighed(units: Sequence[Unit], weights: Mapping[tuple[str, str], float]) -> list[Unit]:
        return [replace(unit, sensitivity=weights[unit.name, unit.role]) for unit in units]

    def _errors(
        self,
        found: Allocation,
        sides: Collection[str],
        shrink: float,
        rehearsal: Rehearsal | None = None,
    ) -> Tensor | None:
        stores = {name: next(iter(ones)) for name, ones in found.stores.items()}
        rehearsal = rehearsal or self.rehearsal
        return rehearsal.errors(found.factors, sides, shrink, stores=stores)

    def is_better(self, found: Allocation, stacks: Sequence[Stacked]) -> bool:
        """Return whether a choice in which layers share factors is nearer to the source than the
        best so far; it is that then.

        Args:
            stacks: those who may share.
        """
        leads = {whose for one in found.shares.values() for whose in one.values()}
        sharing = {
            leader: {
                leader,
                *(name for name, one in found.shares.items() if leader in one.values()),
            }
            for leader in leads
        }
        taken = [one for one in stacks if sharing.get(one.names[0]) == set(one.names)]
        now = self.rehearsal.errors(found.factors, found.sides, found.shrink, taken)
        if now is None or self.errors is None:
            return False
        self._note("layers that share a factor", now)
        better = is_nearer(now, self.errors)
        if better:
            self.errors = now
            last = len(self.tried) - 1
            self.tried = [
                one.model_copy(update={"taken": at == last}) for at, one in enumerate(self.tried)
            ]
        return better

    def _note(self, words: str, errors: Tensor) -> int:
        error = sqrt(float(errors.mean()))
        self.tried.append(Tried(words=words, error=float(f"{error:.3g}")))
        return len(self.tried) - 1

    def _ways(self, units: Sequence[Unit]) -> dict[str, Mapping[tuple[str, str], float]]:
        """Return what layers' errors may weigh, by words on it."""
        keys = [(unit.name, unit.role) for unit in units]
        ways: dict[str, Mapping[tuple[str, str], float]] = {
            "all layers alike": dict.fromkeys(keys, 1.0)
        }
        by_slopes = self._by_slopes(units)
        if by_slopes:
            ways["by the slopes of the output"] = {key: sqrt(one) for key, one in by_slopes.items()}
        return ways

    def _by_slopes(self, units: Sequence[Unit]) -> dict[tuple[str, str], float]:
        """Return what an error as large as a unit's whole signal is, of the output's variance; the
        unit's own sensitivity where no slopes are known; nothing where none are."""
        size = self.rehearsal.size
        found: dict[tuple[str, str], float] = {}
        known = False
        for unit in units:
            weight = self.rehearsal.candidates.by_slopes(unit.layer, unit.role)
            known |= weight is not None
            share = unit.sensitivity if weight is None or not size > 0 else weight / size
            found[unit.name, unit.role] = min(BOUNDS[1], max(BOUNDS[0], share))
        return found if known else {}

    def _sided(
        self,
        units: Sequence[Unit],
        best: Allocation,
        sides: set[str],
        shrink: float,
        errors: Tensor,
        taken: int,
    ) -> tuple[set[str], Tensor, int]:
        """Return which layers are fitted by both sides: those of a group only where that is nearer
        to the source."""
        known = {name for name, _ in self.rehearsal.candidates.evidence.slopes}
        groups: dict[str, list[Unit]] = {}
        for unit in units:
            if unit.name in best.factors and unit.name in known:
                groups.setdefault(re.sub(r"\d+", "#", unit.name), []).append(unit)
        if not groups:
            return sides, errors, taken
        now = self._errors(best, set(), shrink)
        if now is not None:
            place = self._note("every layer by its inputs alone", now)
            if is_nearer(now, errors):
                return set(), now, place
        if len(groups) == 1 or self.rehearsal.work > LARGE:
            return sides, errors, taken
        order = sorted(groups, key=lambda one: -sum(unit.size for unit in groups[one]))
        for name in order[:GROUPS]:
            fewer = sides - {unit.name for unit in groups[name]}
            now = self._errors(best, fewer, shrink)
            if now is None:
                continue
            place = self._note(f"{name} by its inputs alone", now)
            if is_nearer(now, errors):
                sides, errors, taken = fewer, now, place
        return sides, errors, taken


def is_nearer(now: Tensor, before: Tensor) -> bool:
    """Return whether errors of examples are lower than others of the same examples, by more than
    the standard error of their mean difference: less is the luck of the draw.

    Shape:
        now, before: (n).
    """
    gain = before.double() - now.double()
    if not bool(torch.isfinite(before).all()):
        return bool(now.mean() < before.mean())
    noise = float(gain.std()) / sqrt(len(gain)) if len(gain) > 1 else 0.0
    return float(gain.mean()) > noise


def estimated(units: Sequence[Unit], found: Allocation) -> float:
    """Return the error of a choice by the units' own sensitivities."""
    total = 0.0
    for unit in units:
        spec = found.factors.get(unit.name, {}).get(unit.role)
        store = next(iter(found.stores.get(unit.name, set(unit.whole[:1]))))
        if spec is None:
            at = unit.whole.index(store) if store in unit.whole else 0
            total += float(loss(float(unit.errors[unit.picked[:, 1] == 0][at]))) * unit.sensitivity
            continue
        if unit.name in found.sharing and not unit.many:  # errors are those of the whole group
            total += float(loss(found.errors[unit.name] ** 2)) * unit.sensitivity
            continue
        one = spec.model_copy(update={"rank": 1})
        for curve in unit.curves:
            if curve.spec == one and curve.store == store:
                at = min(spec.rank, len(curve.errors) - 1)
                total += float(loss(float(curve.errors[at]))) * unit.sensitivity
    return sqrt(squared_error(total))
