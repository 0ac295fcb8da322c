"""A target of latency held on the model itself: timed, chosen for, built, timed again, corrected.

Each layer's time in the source is measured, and what it becomes on factors predicted from that by
the machine's prices. What is chosen is then built with random weights and timed in turn with the
source; where it is slower than asked, or far from what was predicted, the predictions are corrected
by what each layer took and the choice is made again. Times are kept beside the machine's prices, so
that equal settings give equal plans there.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

import torch
from torch import nn

from bp_convert.errors import PlanError
from bp_convert.graph.clone import clone
from bp_convert.graph.example import SampleInputs, device_of
from bp_convert.graph.observe import Observation
from bp_convert.graph.running import Args, Kwargs
from bp_convert.graph.walk import Site
from bp_convert.search.cache import words_of
from bp_convert.spending.spending import Pace
from bp_convert.surgery import apply_plan, fingerprint
from bp_convert.tuning import layer_clock, tuner
from bp_convert.tuning.layer_clock import WHOLE, Subject
from bp_convert.tuning.machine_table import (
    Host,
    MachineTable,
    key_of_times,
    read_table,
    read_times,
    write_table,
    write_times,
)
from bp_convert.values.plan import Plan
from bp_convert.values.progress import Progress
from bp_convert.values.settings import Settings
from bp_convert.values.target import Target

ROUNDS = 3  # choices that are built and timed
OVER = 1.02  # times the limit, up to which a measured time counts as keeping it
# Of the limit, by how much at least and at most the next choice is aimed lower where one missed it;
LOWER, MOST = 0.02, 0.1  # between them, by as much as it was missed
OFF = 0.15  # of the measured time, which a prediction may be off by
BOUNDS = 0.05, 20.0  # of a correction


def host_of(model: nn.Module, settings: Settings) -> Host:
    """Return where a model's layers run, as far as their prices go."""
    at = settings.latency_at
    first = next((one for one in model.parameters() if one.is_floating_point()), None)
    dtype = "float32" if first is None else str(first.dtype).removeprefix("torch.")
    device = at.device if settings.limits_latency else device_of(model).type
    return Host(device, at.threads or torch.get_num_threads(), dtype)


def table_for(model: nn.Module, settings: Settings, progress: Progress) -> MachineTable | None:
    """Return the prices that were measured here; for a target of latency they are, if need be.

    Raises:
        PlanError: the device of the target is not there.
    """
    host = host_of(model, settings)
    table = read_table(host)
    if table is not None or not settings.limits_latency:
        return table
    tuner.check_host(host)
    table = tuner.measured(host, progress)
    write_table(table)
    return table


@dataclass(frozen=True)
class Round:
    """A choice that was built and timed.

    Attributes:
        plan: it.
        limit: microseconds that it was to keep.
        predicted, measured: microseconds of a pass.
    """

    plan: Plan
    limit: float
    predicted: float
    measured: float

    @property
    def holds(self) -> bool:
        """Whether what was measured keeps the limit."""
        return self.measured <= OVER * self.limit

    @property
    def off(self) -> float:
        """How far the prediction was from what was measured, relatively."""
        return abs(self.predicted / self.measured - 1)


@dataclass
class LatencyTarget:
    """Holds a model's choice to a target of latency.

    Args:
        sites: the model's layers.
        choose: plans with a pace.
    """

    model: nn.Module
    settings: Settings
    sample: SampleInputs
    seen: Observation | None
    sites: Sequence[Site]
    choose: Callable[[Pace], Plan]
    progress: Progress
    rounds: list[Round] = field(default_factory=list)

    def plan(self) -> Plan:
        """Return a plan that keeps the target where it was measured, with a note on it.

        Raises:
            PlanError: the target is out of reach, or the model cannot be timed.
        """
        self._check()
        self.progress("timing the model", 0, ROUNDS + 1)
        times = self._source()
        names = {site.name for site in self.sites}
        layers = {name: one for name, one in times.items() if name in names}
        pace = Pace(times[WHOLE], layers, self.settings.latency_at.batch)
        for number in range(ROUNDS):
            try:
                plan = self.choose(pace)
            except PlanError:
                if any(one.holds for one in self.rounds):
                    break
                raise
            self.progress("timing the choice", number + 1, ROUNDS + 1)
            told = self._told(plan, pace)
            taken = self._taken(plan, times)
            limit = self.target.limit(pace.whole)
            self.rounds.append(Round(plan, limit, told[WHOLE], taken[WHOLE]))
            if self.rounds[-1].holds and (
                self.rounds[-1].off <= OFF or not pace.layers or told[WHOLE] < taken[WHOLE]
            ):
                break
            pace = self._corrected(pace, plan, told, taken)
        best = self._best()
        return best.plan.model_copy(update={"notes": (*best.plan.notes, self._words(best, pace))})

    @property
    def target(self) -> Target:
        """The target of latency."""
        return next(one for one in self.settings.target if one.quantity == "latency")

    def _best(self) -> Round:
        """Return the round of least error that holds, else the fastest."""
        holding = [one for one in self.rounds if one.holds]
        if holding:
            return min(holding, key=lambda one: (one.plan.error or 0.0, one.plan.params.after))
        return min(self.rounds, key=lambda one: one.measured)

    def _words(self, best: Round, pace: Pace) -> str:
        said = self.target.said
        host, batch = host_of(self.model, self.settings), pace.batch
        words = (
            f"{self.target}: {said(best.limit)} of {said(pace.whole)} asked, "
            f"{said(best.predicted)} predicted, {said(best.measured)} measured on random weights "
            f"in its form, batch {batch}, {host.words}; the first prediction was off by "
            f"{100 * self.rounds[0].off:.0f} %"
        )
        if best.holds:
            return words
        return f"{words}; the target is NOT kept: {said(best.measured)} is what was reached"

    # Measured

    def _source(self) -> dict[str, float]:
        key = self._key()
        host = host_of(self.model, self.settings)
        known = read_times(host, key)
        if known is None:
            known = self._time([self._subject(None)])[0]
            write_times(host, key, known)
        return known

    def _taken(self, plan: Plan, times: Mapping[str, float]) -> dict[str, float]:
        """Return what a plan's model takes, at the source's speed when that was timed."""
        host = host_of(self.model, self.settings)
        form = [
            (
                one.name,
                sorted((role, str(spec)) for role, spec in one.factors.items()),
                sorted(one.shares.items()),
                one.way,
            )
            for one in plan.layers
            if one.action == "replaced"
        ]
        key = self._key(json.dumps(form))
        known = read_times(host, key)
        if known is None:
            before, after = self._time([self._subject(None), self._subject(plan)])
            scale = times[WHOLE] / before[WHOLE]
            known = {name: scale * one for name, one in after.items()}
            write_times(host, key, known)
        return known

    def _time(self, subjects: list[Subject]) -> list[dict[str, float]]:
        batch = self.settings.latency_at.batch

        def inputs(model: nn.Module) -> tuple[Args, Kwargs]:
            return self.sample.drawn.batch(model, batch)

        return layer_clock.time_models(subjects, inputs, host_of(self.model, self.settings))

    def _subject(self, plan: Plan | None) -> Subject:
        names = tuple(site.name for site in self.sites)
        if plan is None:
            return Subject(lambda: clone(self.model, apart=True), names)
        layers = tuple(
            one.model_copy(update={"init": "random", "store": None})
            if one.action == "replaced"
            else one.model_copy(update={"store": None})
            for one in plan.layers
        )
        cold = plan.model_copy(update={"layers": layers})
        return Subject(lambda: apply_plan(self.model, cold, checked=True).model, names)

    def _key(self, *words: str) -> str:
        shapes = [str(one) for one in self.sample.specs]
        return key_of_times(
            words_of(self.model),
            fingerprint(self.model),
            json.dumps([shapes, self.settings.latency_at.batch]),
            *words,
        )

    # Predicted

    def _told(self, plan: Plan, pace: Pace) -> dict[str, float]:
        """Return what is predicted of each layer that a plan replaces, and of the whole."""
        found: dict[str, float] = {}
        sites = {site.name: site for site in self.sites}
        whole = pace.whole + pace.more
        for layer in plan.layers:
            if layer.action != "replaced" or self.seen is None:
                continue
            site = sites[layer.name]
            timed = pace.of(site, self.seen.calls(site.names))
            widths = site.kind.widths(site.module)
            found[layer.name] = timed.predicted(site, widths, layer.factors, layer.way)
            whole += found[layer.name] - timed.dense
        return {WHOLE: whole, **found}

    def _corrected(
        self, pace: Pace, plan: Plan, told: Mapping[str, float], taken: Mapping[str, float]
    ) -> Pace:
        """Return a pace by which a plan is predicted as it was measured."""
        factors = dict(pace.factors)
        by_kind: dict[str, list[float]] = {}
        more = taken[WHOLE] - pace.whole
        for layer in plan.layers:
            if layer.name not in told:
                continue
            before = pace.factors.get(layer.name, pace.factors.get(layer.kind, 1.0))
            now, said = taken.get(layer.name, 0.0), told[layer.name]
            if now > 0 and said > 0:
                factors[layer.name] = min(BOUNDS[1], max(BOUNDS[0], before * now / said))
                by_kind.setdefault(layer.kind, []).append(factors[layer.name])
                said *= factors[layer.name] / before
            more -= said - pace.layers.get(layer.name, 0.0)
        factors.update({kind: median(ones) for kind, ones in by_kind.items()})
        last = self.rounds[-1]
        if not last.holds:
            more += min(MOST * last.limit, max(LOWER * last.limit, last.measured - last.limit))
        return replace(pace, factors=factors, more=more)

    def _check(self) -> None:
        if any(one.is_meta for one in self.model.parameters()):
            raise PlanError(
                where=f"target {self.target}",
                found="a model that is planned without its weights, layer by layer",
                allowed="a model in memory, which can be timed",
                fix="add --in-memory, or limit macs instead",
            )
        if self.seen is None or not self.sample:
            raise PlanError(
                where=f"target {self.target}",
                found="no example input is known, so that the model cannot be timed",
                allowed="an input to run the model on",
                fix="describe it with --input, such as --input 3x224x224",
            )
