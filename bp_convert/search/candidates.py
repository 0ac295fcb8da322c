"""The candidates of every layer, computed once and kept on disk."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial

import numpy as np
import torch
from torch import Tensor, nn

from bp_convert.calibration.evidence import Evidence, RoleSeen
from bp_convert.calibration.tap import Batches
from bp_convert.graph.example import device_of
from bp_convert.graph.walk import Site
from bp_convert.groups.members import Tied, tied_groups
from bp_convert.groups.stacked import Stacked
from bp_convert.groups.table_metric import (
    TableMetric,
    low_rank_spec,
    table_errors,
    table_metric,
    table_of,
)
from bp_convert.kinds import Factors
from bp_convert.kron.als import low_rank
from bp_convert.kron.metric import Metric, Plain, both
from bp_convert.kron.nearest import check_finite
from bp_convert.search import cache
from bp_convert.search.at_once import at_once
from bp_convert.search.bit_axis import AS_IS, Noise, in_bits, noise_of
from bp_convert.search.curves import Curve, best_of, curves_of
from bp_convert.search.group_units import tied_unit
from bp_convert.search.sharing import stack_curve, stack_of_names, stack_unit, stacks_among
from bp_convert.search.units import FreeLayer, Unit, make_unit
from bp_convert.values.factors import FactorSpec
from bp_convert.values.literals import Method, Store
from bp_convert.values.progress import Progress

HANDICAP = 1.3  # times the squared error of Kronecker sums fitted to data
FOLLOWED = 3  # best pairs at each share of a layer, which the others of its shape are tried with
LARGE = 1 << 25  # numbers of a weight from which on it is searched alone, on all threads


def handicapped(curve: Curve) -> Curve:
    """Return a curve as it is to be expected on data that it was not measured on: alternation
    follows the calibration data closer than low rank's closed form does."""
    if low_rank(curve.spec):
        return curve
    return Curve(curve.spec, np.minimum(curve.errors * np.float32(HANDICAP), np.float32(1.0)))


def _fits(curve: Curve, site: Site) -> bool:
    """Return whether a pair may be fitted to data: an embedding's only where it is low-rank.

    Most rows of a table are never looked up in calibration. A subspace of the looked-up rows suits
    the others too; Kronecker terms suit those that are frequent and give the others up.
    """
    return low_rank(curve.spec) or not site.kind.lookup


@dataclass(frozen=True)
class Leader:
    """The role of the layer that is searched first of all alike, and its best pairs."""

    layer: str
    role: str
    best: Sequence[FactorSpec]


@dataclass
class Candidates:
    """Finds the options of each role of each free layer.

    On a processor as many layers are searched at once as torch has threads, and their
    decompositions held; what stays of a layer are a few curves.

    Args:
        method: svd, kron, or either with ``-data``.
        batches: calibration data, in the metric of which a ``-data`` method measures errors.
        digest: hash of that data.
        both: measure errors by what the model makes of a layer's outputs, too.
        shrink: how much of their mean variance is added to what layers see.
        macs: multiply-adds of one example through the model; 0 where not known.
        stores: by layer the ways to store it; those that are left out are stored as they are.
        stay: all layers stay dense, so that no factors are looked for.
    """

    model: nn.Module
    layers: Sequence[FreeLayer]
    method: Method
    batches: Batches = ()
    digest: str = ""
    progress: Progress = lambda *_: None
    both: bool = False
    shrink: float = 0.0
    macs: float = 0.0
    stores: Mapping[str, Sequence[Store | None]] = field(default_factory=dict)
    stay: bool = False
    _metrics: dict[int, Metric] = field(default_factory=dict)
    _alike: dict[tuple[object, ...], Leader] = field(default_factory=dict)
    _ahead: dict[tuple[str, str], list[Curve]] = field(default_factory=dict)

    @property
    def by_data(self) -> bool:
        """Whether calibration data tells."""
        return self.method.endswith("-data")

    def units(self) -> list[Unit]:
        """Return every role of every free layer with its options, in the model's order.

        Raises:
            DataError: the model does not run on the calibration data.
            FactorError: weights that are not finite.
        """
        units = []
        tied = {one.name: group for group in self.tied for one in group.sites}
        self._search_ahead([one for one in self.layers if one.site.name not in tied])
        for number, layer in enumerate(self.layers):
            site = layer.site
            self.progress(f"candidates of {site.name}", number, len(self.layers))
            if site.name in tied:
                if site is tied[site.name].leader:
                    unit = self._tied_unit(tied[site.name])
                    ones = site.kind.computed(site.module)["weight"]
                    units.append(self._in_bits(layer, "weight", ones, unit))
                continue
            matrices = site.kind.computed(site.module)
            for role, ones in matrices.items():
                for one in ones:
                    check_finite(one, f"{site.name} ({site.kind.name})")
                curves, sensitivity = self._curves(layer, role, ones)
                if self.by_data:
                    curves = [one for one in map(handicapped, curves) if _fits(one, site)]
                shape = (ones[0].shape[0], ones[0].shape[1])
                alone = len(matrices) == 1
                unit = make_unit(layer, role, shape, len(ones), curves, sensitivity, alone=alone)
                units.append(self._in_bits(layer, role, ones, unit))
        return units

    def _search_ahead(self, layers: Sequence[FreeLayer]) -> None:
        """Search what is not in the cache several layers at once, the largest first; those that
        follow one of their shape come behind it."""
        if self.stay or torch.get_num_threads() < 2 or device_of(self.model).type != "cpu":
            return
        alike: dict[tuple[object, ...], list[tuple[FreeLayer, str]]] = {}
        sizes: dict[tuple[object, ...], int] = {}
        for layer in layers:
            for role, ones in layer.site.kind.computed(layer.site.module).items():
                shape, size = self._shape(layer, role, len(ones)), ones[0].numel() * len(ones)
                if size < LARGE:
                    alike.setdefault(shape, []).append((layer, role))
                    sizes[shape] = size
        groups: list[list[Callable[[], None]]] = []
        for shape in sorted(alike, key=lambda shape: -sizes[shape]):
            first, *others = alike[shape]
            if self._held(*first):
                groups += [[partial(self._search, *one)] for one in others if not self._held(*one)]
            else:
                groups.append([partial(self._search, *one) for one in alike[shape]])
        if not groups:
            return
        if self.by_data:  # what they see is there before they are searched
            _ = self.evidence.gathered, self.both and self.evidence.slopes
        total = sum(map(len, groups))
        at_once(groups, lambda done: self.progress("candidates of layers", done, total))

    def _held(self, layer: FreeLayer, role: str) -> bool:
        """Return whether a role's curves are in the cache; others may follow them then."""
        matrices = layer.site.kind.computed(layer.site.module)[role]
        among = self._among(layer, role, len(matrices))
        held = cache.read(self._key(layer, role, matrices, among))
        if held is not None:
            self._lead(layer, role, matrices, held[0])
        return held is not None

    def _search(self, layer: FreeLayer, role: str) -> None:
        """Search a role's curves, for when its turn comes."""
        matrices = layer.site.kind.computed(layer.site.module)[role]
        for one in matrices:
            check_finite(one, f"{layer.site.name} ({layer.site.kind.name})")
        among = self._among(layer, role, len(matrices))
        seen = self._seen(layer, role, len(matrices))
        curves = self._searched_in(layer, role, matrices, among, seen)
        self._ahead[layer.site.name, role] = curves
        self._lead(layer, role, matrices, curves)

    def _in_bits(self, layer: FreeLayer, role: str, matrices: list[Tensor], unit: Unit) -> Unit:
        """Return a unit with its options in each way to store the layer."""
        stores = self.stores.get(layer.site.name, AS_IS)
        if tuple(stores) == AS_IS:
            return unit
        site = layer.site
        specs = [str(one.spec) for one in unit.curves]
        words = ["bits", self.method, site.kind.name, role, *specs]
        data = [self._whole, site.name, self.digest, f"{self.shrink:g}"] if self.by_data else []
        key = cache.key_of([] if self.by_data else matrices, *words, *data)
        held = cache.read(key)
        if held is not None:
            return in_bits(unit, Noise.of(held[0]), stores)
        seen = None
        if not unit.many:
            seen = self._seen(layer, role, len(matrices), both=False)
        metrics = [Plain()] * len(matrices) if seen is None else seen.metrics
        choices = site.kind.choices(site.module, layer.widths)[role]
        noise = noise_of(matrices, choices, unit.curves, metrics, lookup=site.kind.lookup)
        cache.write(key, noise.curves(), 1.0)
        return in_bits(unit, noise, stores)

    def _tied_unit(self, group: Tied) -> Unit:
        """Return the options of layers that hold one table, in the metrics of all of them."""
        layers = {one.site.name: one for one in self.layers}
        ones = [layers[site.name] for site in group.sites]
        first = group.leader
        matrices = first.kind.computed(first.module)["weight"]
        check_finite(matrices[0], f"{first.name} ({first.kind.name})")
        metric = self._table_metric(group, ones) if self.by_data else None
        if metric is None:
            curves, sensitivity = self._curves(ones[0], "weight", matrices)
            return tied_unit(group, ones, curves, sensitivity)
        names = [site.name for site in group.sites]
        key = cache.key_of((), self.method, "tied", self._whole, *names, self.digest)
        held = cache.read(key)
        if held is None:
            table = table_of(group)
            spec = low_rank_spec(*(table.shape if first.kind.lookup else table.t().shape))
            curves = [Curve(spec, table_errors(table, metric))]
            mean = matrices[0].new_zeros(matrices[0].shape[1])  # none: a shift is no table's
            sensitivity = self.evidence.trials.of(first, "weight", [metric], [mean])
            held = curves, sensitivity
            cache.write(key, *held)
        return tied_unit(group, ones, *held)

    def groups(self, units: Sequence[Unit], *, across: bool) -> list[tuple[Stacked, Unit]]:
        """Return groups of layers that may share a factor, with their options together: where
        there is data, and terms are fitted to it.

        Args:
            across: blocks may share with each other.
        """
        if not self.by_data:
            return []
        key = cache.key_of(
            (),
            self.method,
            "groups",
            "across" if across else "inside",
            "both" if self.both else "inputs",
            f"{self.shrink:g}",
            self._whole,
            self.digest,
            *(f"{one.name} {one.sensitivity:.6g}" for one in units),
        )
        known = {one.name: one for one in units}
        names = cache.read_names(key)
        if names is None:
            stacks = stacks_among(units, self.evidence.gathered, across=across)
            cache.write_names(key, [one.names for one in stacks])
        else:
            stacks = [stack_of_names(units, one) for one in names]
        made = []
        metrics: dict[str, Metric] = {}
        alone: dict[str, np.ndarray] = {}
        for number, stack in enumerate(stacks):
            self.progress("candidates that share factors", number, len(stacks))
            mine = cache.key_of((), key, *stack.names)
            held = cache.read(mine)
            if held is None:
                for name in stack.names:
                    if name not in metrics:
                        metrics[name] = self._metric_of(name)
                curve = stack_curve(stack, known, metrics, alone)
                held = [curve] if curve else [], 1.0
                cache.write(mine, *held)
            if held[0]:
                made.append((stack, stack_unit(stack, known, held[0][0])))
        return made

    def _metric_of(self, name: str) -> Metric:
        """Return a layer's metric; one object for layers that read one tensor."""
        moment = self.evidence.only(name)[0]
        if id(moment) not in self._metrics:
            self._metrics[id(moment)] = moment.metric(self.shrink)
        return self._metrics[id(moment)]

    def _table_metric(self, group: Tied, layers: Sequence[FreeLayer]) -> TableMetric | None:
        """Return what an error of the table costs in a group's layers; None where nothing tells."""
        found = {one.site.name: self.evidence.moments(one.site, "weight", 1) for one in layers}
        moments = {name: ones[0] for name, ones in found.items() if ones}
        return table_metric(group, moments)

    def _curves(
        self, layer: FreeLayer, role: str, matrices: list[Tensor]
    ) -> tuple[list[Curve], float]:
        among = self._among(layer, role, len(matrices))
        key = self._key(layer, role, matrices, among)
        held = cache.read(key) or self._measured(layer, role, matrices, among, key)
        self._lead(layer, role, matrices, held[0])
        return held

    def _shape(self, layer: FreeLayer, role: str, matrices: int) -> tuple[object, ...]:
        """Return what is the same of roles that are searched alike."""
        site = layer.site
        choices = site.kind.choices(site.module, layer.widths)[role]
        return site.kind.name, role, matrices, repr(choices)

    def _among(self, layer: FreeLayer, role: str, matrices: int) -> Sequence[FactorSpec]:
        """Return the pairs that a role is tried with, after those of the first one alike."""
        leader = self._alike.get(self._shape(layer, role, matrices))
        if leader is None or (leader.layer, leader.role) == (layer.site.name, role):
            return ()
        return leader.best

    def _lead(
        self, layer: FreeLayer, role: str, matrices: Sequence[Tensor], curves: Sequence[Curve]
    ) -> None:
        """Let roles alike follow this one where it is the first."""
        shape = self._shape(layer, role, len(matrices))
        if shape not in self._alike and not self.stay:
            best = best_of(curves, matrices[0].numel(), FOLLOWED)
            self._alike[shape] = Leader(layer.site.name, role, [one.spec for one in best])

    def _measured(
        self,
        layer: FreeLayer,
        role: str,
        matrices: list[Tensor],
        among: Sequence[FactorSpec],
        key: str,
    ) -> tuple[list[Curve], float]:
        """Return a role's curves and its sensitivity, and keep them."""
        site = layer.site
        seen = self._seen(layer, role, len(matrices))
        curves = self._ahead.pop((site.name, role), None)
        if curves is None:
            curves = self._searched_in(layer, role, matrices, among, seen)
        sensitivity = 1.0
        if seen is not None:
            sensitivity = self.evidence.trials.of(
                site, role, seen.metrics, seen.means, seen.outputs
            )
        cache.write(key, curves, sensitivity)
        return curves, sensitivity

    def _searched_in(
        self,
        layer: FreeLayer,
        role: str,
        matrices: list[Tensor],
        among: Sequence[FactorSpec],
        seen: RoleSeen | None,
    ) -> list[Curve]:
        """Return a role's curves in the metrics of what it sees; none where all stay dense."""
        if self.stay:
            return []
        site = layer.site
        svd = self.method.startswith("svd") or (seen is not None and site.kind.lookup)
        by_data = (None, None) if seen is None else (seen.metrics, seen.outputs)
        choices = site.kind.choices(site.module, layer.widths)[role]
        return curves_of(matrices, choices, *by_data, low_rank_only=svd, among=among)

    def by_slopes(self, layer: FreeLayer, role: str) -> float | None:
        """Return how much of the output's squared sum, over an example, an error as large as a
        role's whole signal is, to second order; None where no slopes tell."""
        if not role:  # stays dense whatever is chosen
            return None
        matrices = layer.site.kind.computed(layer.site.module)[role]
        key = f"{self._key(layer, role, matrices)}-slopes"
        held = cache.read(key)
        if held is None:
            slope = self.evidence.slopes.get((layer.site.name, role))
            seen = self._seen(layer, role, len(matrices), both=True)
            weight = -1.0
            if slope is not None and seen is not None:
                every = zip(matrices, seen.metrics, seen.outputs, strict=True)
                weight = slope.each * sum(both(*one) for one in every)
            cache.write(key, [], weight)
            held = [], weight
        return held[1] if held[1] >= 0 else None

    def _key(
        self,
        layer: FreeLayer,
        role: str,
        matrices: Sequence[Tensor],
        among: Sequence[FactorSpec] = (),
    ) -> str:
        """Return what names all that a role's curves hang on."""
        site = layer.site
        kernel = "x".join(map(str, site.kind.choices(site.module, layer.widths)[role].kernel))
        words = [self.method.removesuffix("-data"), site.kind.name, role, kernel]
        words += ["stays"] if self.stay else [repr(one) for one in among]
        if not self.by_data:
            return cache.key_of(matrices, *words)
        words += ["both" if self.both else "inputs", f"{self.shrink:g}"]
        return cache.key_of((), *words, self._whole, site.name, self.digest)

    def key_of_choice(self, chosen: Mapping[str, Factors], words: object) -> str:
        """Return what names a choice of factors for this model and data."""
        specs = {
            name: {role: repr(spec) for role, spec in one.items()} for name, one in chosen.items()
        }
        free = [one.site.name for one in self.layers]  # which are fitted in stages
        text = json.dumps([specs, free, words], sort_keys=True)
        return cache.key_of((), self.method, "choice", self._whole, self.digest, text)

    def _seen(
        self, layer: FreeLayer, role: str, matrices: int, *, both: bool | None = None
    ) -> RoleSeen | None:
        """Return what each matrix of a role sees; None where the weights alone decide."""
        both = self.both if both is None else both
        return self.evidence.seen(layer.site, role, matrices, both=both, shrink=self.shrink)

    @cached_property
    def evidence(self) -> Evidence:
        """What calibration data tells."""
        batches = self.batches if self.by_data else ()
        sites = [one.site for one in self.layers]
        return Evidence(self.model, sites, batches, self.macs, self.progress)

    @cached_property
    def tied(self) -> list[Tied]:
        """Layers that hold one table, among those that are free."""
        return tied_groups(self.model, [one.site for one in self.layers])

    @cached_property
    def _whole(self) -> str:
        """A hash of the whole model, on which a layer's metric hangs."""
        held = [*self.model.parameters(), *self.model.buffers()]
        return cache.key_of(held, "model", cache.words_of(self.model))
