"""Targets spent on a model's layers: the way from what the planner knows to factors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from torch import nn

from bp_convert.calibration.held import parted
from bp_convert.calibration.tap import Batches
from bp_convert.data import Examples
from bp_convert.errors import PlanError
from bp_convert.graph.observe import Observation
from bp_convert.graph.others import others_of
from bp_convert.graph.walk import Site, walk
from bp_convert.groups.members import tied_groups
from bp_convert.kinds import Ask
from bp_convert.search.candidates import Candidates
from bp_convert.search.method import settled
from bp_convert.search.selection import Allocation, Budget, choose
from bp_convert.search.sharing import exchanged
from bp_convert.search.units import FreeLayer, Timed, Unit
from bp_convert.spending.budget import TRIED, budget_for
from bp_convert.spending.rehearsal import Rehearsal
from bp_convert.spending.storing import alike, all_alike, stores_of, with_bits
from bp_convert.spending.trying import Trying, estimated
from bp_convert.values.literals import Store, Ways
from bp_convert.values.plan import largest
from bp_convert.values.progress import Progress
from bp_convert.values.settings import Settings

EXCHANGES = 3  # times that layers are exchanged for groups of them
MANY = 32  # the larger batch at which the whole model is to stay as fast


@dataclass(frozen=True)
class Pace:
    """A model's time, as a target of latency counts it, in microseconds.

    Attributes:
        whole: of a pass of the source, measured.
        layers: of each layer in it, by name.
        batch: examples in the pass.
        factors: by which predictions are corrected, by layer and by kind.
        more: what converting adds to what is not converted.
    """

    whole: float
    layers: Mapping[str, float]
    batch: int = 1
    factors: Mapping[str, float] = field(default_factory=dict)
    more: float = 0.0

    def of(self, site: Site, calls: Sequence[tuple[int, ...]]) -> Timed:
        """Return a layer's time.

        Args:
            calls: the shapes of its inputs for one example.
        """
        shapes = [site.kind.batched(site.module, shape, self.batch) for shape in calls]
        factor = self.factors.get(site.name, self.factors.get(site.kind.name, 1.0))
        return Timed(self.layers.get(site.name, 0.0), shapes, factor)

    def rest(self, layers: Sequence[FreeLayer]) -> float:
        """Return the time of all but some layers."""
        own = sum(one.timed.dense for one in layers if one.timed is not None)
        return self.whole - own + self.more


@dataclass(frozen=True)
class Spending:
    """Spends the targets of ``settings`` on a model.

    Args:
        examples: calibration data; None goes by the weights alone.
        ways: how layers may run, by name.
        pace: the model's time where a target limits it.
    """

    model: nn.Module
    settings: Settings
    examples: Examples | None
    progress: Progress
    ways: Mapping[str, Ways]
    pace: Pace | None = None

    def search(
        self,
        sites: Sequence[Site],
        asks: Mapping[str, Ask],
        floors: Mapping[str, float],
        seen: Observation | None,
        stores: Mapping[str, Store] | None = None,
        kept: Sequence[Site] = (),
    ) -> Allocation:
        """Return the factors that keep the targets.

        Args:
            sites: the layers that no reason holds.
            asks: what rules settle, by layer; the others take part in the choice.
            floors: share of its parameters below which a layer may not go.
            stores: how layers are stored, by name, where that is settled.
            kept: layers that stay dense for a reason, and may be stored in fewer bits.

        Raises:
            PlanError: a target out of reach, or one that cannot be counted.
        """
        self._check(seen)
        decided = {
            site.name: (
                site,
                site.kind.factor(site.module, site.kind.widths(site.module), asks[site.name]),
            )
            for site in sites
            if site.name in asks
        }
        layers = self.free_layers([one for one in sites if one.name not in decided], floors, seen)
        ways = stores_of(self.settings, [*sites, *kept], stores or {})
        macs = seen.total_macs if seen else 0
        candidates = self.candidates(layers, ways, macs=macs)
        units = candidates.units()
        if self.settings.allocation == "uniform":
            units = [replace(unit, sensitivity=1.0) for unit in units]
        self.progress("choosing", len(layers), len(layers))
        groups = tied_groups(self.model, [one.site for one in layers])
        tied = [site.name for group in groups for site in group.followers]
        budget = budget_for(self.model, layers, decided, seen.total_macs if seen else None, tied)
        asked = self.settings
        rules = any(one.keep or one.floor or one.insists for one in asked.layers)
        held = largest(others_of(self.model, walk(self.model)), int(budget.before["params"]))
        narrowed = bool(asked.include or asked.exclude or rules)
        budget = replace(budget, held=held, narrowed=narrowed)
        if self.pace is not None:
            before = {**budget.before, "latency": self.pace.whole}
            fixed = {**budget.fixed, "latency": self.pace.rest(layers)}
            budget = replace(budget, before=before, fixed=fixed)
        if candidates.by_data and self.tries:
            said = budget.fixed["size"] + TRIED
            budget = replace(budget, fixed={**budget.fixed, "size": said})
        plain = budget, units
        if ways:
            budget, dense = with_bits(budget, kept, ways)
            units = [*units, *dense]
        try:
            found = self._chosen(units, layers, budget)
        except PlanError as problem:
            if not asked.chooses_bits or stores:
                raise
            # In a small file, what says how tensors are packed may be more than packing saves.
            budget = plain[0]
            units = [alike(unit, {unit.name: {None}}, max) for unit in plain[1]]
            try:
                found = self._chosen(units, layers, budget)
            except PlanError as other:
                raise min(other, problem, key=lambda one: one.lowest or 0) from None
        if not candidates.by_data:
            return found
        trying = None
        if not self.tries or groups or self._stay:
            known = {name for name, _ in candidates.evidence.slopes} if candidates.both else set()
            sides = known & set(found.factors)
            found = replace(found, sides=sides, shrink=candidates.shrink)
        else:
            rehearsal = Rehearsal(candidates, parted(self._batches)[1], units)
            choose = partial(self._chosen, layers=layers, budget=budget)
            plainly = all_alike(units) if asked.chooses_bits else {}
            trying = Trying(rehearsal, choose, asked, self.progress, plainly)
            found = trying.best(units, found)
        if asked.chooses_bits or not asked.groups:  # how layers that share are stored is not chosen
            return found
        return self._shared(candidates, units, layers, budget, found, trying)

    def _shared(
        self,
        candidates: Candidates,
        units: Sequence[Unit],
        layers: Sequence[FreeLayer],
        budget: Budget,
        best: Allocation,
        trying: Trying | None,
    ) -> Allocation:
        """Choose again with groups of layers that share a factor, as long as that is better: what
        was found without them stays the choice to beat."""
        by_error = any(one.quantity == "error" for one in self.settings.target)
        weighed = units if trying is None else trying.units or units
        # What blocks share could not be tuned in each of them afterwards.
        across = self.settings.reconstruct == "off"
        groups = candidates.groups(weighed, across=across) if best.factors else []
        for _ in range(EXCHANGES if groups else 0):
            more = exchanged(weighed, groups, best)
            if more is None:
                break
            self.progress("choosing who shares factors", len(layers), len(layers))
            try:
                found = self._chosen(more, layers, budget)
            except PlanError:
                break
            found = replace(
                found,
                sensitivities=best.sensitivities,
                error=estimated(units, found),
                sides={one for one in best.sides if one in found.factors} - found.sharing,
                shrink=best.shrink,
                tried=best.tried,
            )
            if by_error:
                better = found.params < best.params
            elif trying is None or trying.errors is None:
                better = found.error < best.error
            else:
                better = trying.is_better(found, [one for one, _ in groups])
                best = replace(best, tried=trying.tried)
                found = replace(found, tried=trying.tried)
            if not better:
                break
            weighed, best = more, found
        return best

    @property
    def tries(self) -> bool:
        """Whether there is something to try, and examples to try it on."""
        asked = self.settings
        return "auto" in (asked.sides, asked.allocation, asked.shrink) and bool(
            parted(self._batches)[1]
        )

    @property
    def _batches(self) -> Batches:
        return self.examples.batches if self.examples is not None else ()

    def _chosen(
        self, units: Sequence[Unit], layers: Sequence[FreeLayer], budget: Budget
    ) -> Allocation:
        """Choose, and choose again with less where multiply-adds come out higher than each role's
        own count has it: which way an LSTM runs hangs on all of its roles."""
        guarded = not self.settings.convert_anyway
        limits = [
            one.limit(budget.before["macs"])
            for one in self.settings.target
            if one.quantity == "macs"
        ]
        held, whole = budget, False
        while True:
            try:
                found = choose(
                    units, self.settings.target, held, guarded=guarded, prefer=self.settings.prefer
                )
            except PlanError:
                if held is budget or whole:
                    raise
                # With layers of several roles as they are, all counts are right.
                held, whole = budget, True
                units = [unit if unit.alone else unit.kept() for unit in units]
                continue
            split = {name: one for name, one in found.stores.items() if len(one) > 1}
            if split:  # roles of one layer are stored alike
                units = self._alike(units, split, held, guarded=guarded)
                continue
            over = max((self._macs(found, layers, budget) - one for one in limits), default=0.0)
            if over <= 0:
                return found
            more = held.fixed["macs"] + max(over, 1e-3 * budget.before["macs"])
            held = replace(held, fixed={**held.fixed, "macs": more})

    def _alike(
        self,
        units: Sequence[Unit],
        split: Mapping[str, set[Store | None]],
        budget: Budget,
        *,
        guarded: bool,
    ) -> list[Unit]:
        """Return units whose layers' roles are stored alike: in the most bits that were chosen for
        one of them, or in the fewest where that takes too much."""
        most = [alike(unit, split, max) for unit in units]
        try:
            choose(most, self.settings.target, budget, guarded=guarded)
        except PlanError:
            return [alike(unit, split, min) for unit in units]
        return most

    def _macs(self, found: Allocation, layers: Sequence[FreeLayer], budget: Budget) -> float:
        """Count the model's multiply-adds with the factors that were found."""
        total = budget.fixed["macs"]
        for one in layers:
            factors = found.factors.get(one.site.name)
            total += one.dense_macs if factors is None else one.macs(factors)
        return total

    def free_layers(
        self, sites: Sequence[Site], floors: Mapping[str, float], seen: Observation | None
    ) -> list[FreeLayer]:
        """Return layers as what a budget is spent on."""
        found = []
        for site in sites:
            calls = seen.calls(site.names) if seen else []
            many = [site.kind.batched(site.module, shape, MANY) for shape in calls]
            found.append(
                FreeLayer(
                    site=site,
                    widths=site.kind.widths(site.module),
                    shapes=(calls, many),
                    dense_macs=seen.macs_of(site.names) if seen else 0,
                    floor=floors[site.name],
                    timed=None if self.pace is None else self.pace.of(site, calls),
                    ways=self.ways[site.name],
                )
            )
        return found

    def units(self, layers: Sequence[FreeLayer], seen: Observation | None) -> list[Unit]:
        """Return what each of these layers could become."""
        return self.candidates(layers, macs=seen.total_macs if seen else 0).units()

    def candidates(
        self,
        layers: Sequence[FreeLayer],
        ways: Mapping[str, Sequence[Store | None]] | None = None,
        *,
        macs: float = 0,
    ) -> Candidates:
        """Return what finds that out.

        Args:
            ways: how layers may be stored, where not as they are.
            macs: multiply-adds of one example through the model; 0 where not known.
        """
        asked = self.settings
        method = settled(asked.method, data=self.examples is not None)
        batches, held = parted(self._batches)
        digest = self.examples.digest if self.examples is not None else ""
        tied = tied_groups(self.model, [one.site for one in layers])  # are fitted as one
        both = asked.sides == "both" or (asked.sides == "auto" and bool(held) and not tied)
        shrink = 0.0 if asked.shrink == "auto" else asked.shrink
        return Candidates(
            *(self.model, layers, method, batches, digest, self.progress),
            both=both,
            shrink=shrink,
            macs=macs,
            stores=ways or {},
            stay=self._stay,
        )

    @property
    def _stay(self) -> bool:
        """Whether all layers stay dense: nothing is asked but fewer bits."""
        asked = self.settings
        return asked.store not in (None, "fp32") and all(
            one.quantity in ("params", "macs") and one.is_share and one.value == 1
            for one in asked.target
        )

    @property
    def calibration(self) -> str:
        """Words on the data that the choice is made on; empty where the weights decide."""
        if not self.settings.target or self.examples is None:
            return ""
        if not settled(self.settings.method, data=True).endswith("-data"):
            return ""
        return self.examples.words

    def _check(self, seen: Observation | None) -> None:
        target, alpha = self.settings.target, self.settings.alpha
        if alpha != 1:
            raise PlanError(
                where=f"target {target[0]} with alpha {alpha:g}",
                found="both a target and a widening",
                allowed="one of the two: a target is met by choosing pairs and terms",
                fix="leave --alpha or --target out",
            )
        if seen is None and any(one.quantity == "macs" for one in target):
            raise PlanError(
                where="target macs",
                found="no example input is known, so that multiply-adds cannot be counted",
                allowed="an input to run the model on",
                fix="describe it with --input, such as --input 3x224x224",
            )
