"""The order of planning: what is asked, what the model says, each layer, the whole."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import prod

from torch import nn

from bp_convert.bits.stored import can_be_stored
from bp_convert.counting import count_bytes, count_params, with_counts
from bp_convert.data import Examples
from bp_convert.errors import PlanError, TraceError
from bp_convert.graph.example import SampleInputs
from bp_convert.graph.lookers import own_hooks
from bp_convert.graph.merging import adapters_of
from bp_convert.graph.observe import Observation, observe
from bp_convert.graph.others import others_of, shared_by
from bp_convert.graph.tree import rows_in
from bp_convert.graph.walk import Site, walk
from bp_convert.groups.members import tied_groups
from bp_convert.kinds import Factors, prime_reason
from bp_convert.kinds.foreign import packed
from bp_convert.mixing import started
from bp_convert.planner.heads import head_reasons
from bp_convert.planner.latency import LatencyTarget, table_for
from bp_convert.planner.requests import indirect, reasons_of, requests_of
from bp_convert.planner.samples import sample_inputs
from bp_convert.planner.unproven import stack_reasons
from bp_convert.planner.warm import Planned, maps_for, with_warmth
from bp_convert.planner.worth import chosen, memory_of, worth
from bp_convert.prices import priced
from bp_convert.ready import check_ready
from bp_convert.search.selection import Allocation
from bp_convert.search.units import Unit
from bp_convert.spending.spending import Pace, Spending
from bp_convert.surgery import fingerprint
from bp_convert.values.literals import Store
from bp_convert.values.plan import AttrChange, LayerPlan, Plan, Way
from bp_convert.values.progress import Progress
from bp_convert.values.settings import Settings
from bp_convert.widths.plan_writer import WidthPlan
from bp_convert.widths.widen import widen

FUSED = ("self_attn", "linear1", "linear2")  # what torch's fused encoder layer reads weights of
WIDTH_BATCH = 2  # more than one example, so that no width is mistaken for the batch


def prepare(
    model: nn.Module,
    settings: Settings | None = None,
    *,
    examples: Examples | None = None,
    given: SampleInputs | None = None,
    progress: Progress | None = None,
    notes: Sequence[str] = (),
) -> Planned:
    """Decide for every layer of ``model`` what becomes of it, and why; keep what was found out on
    the way for whoever carries the plan out.

    The model is only looked at: copies of it run, on an example input and on tensors without
    data, in eval and train mode, and where a target is to be met on calibration data, on that.

    Args:
        settings: the request; None asks for alpha 1 and one term.
        examples: calibration data, by which a target is spent; None goes by the weights alone.
        given: example inputs that are values; None takes the settings' description, what the
            calibration data looks like, or a guess.
        progress: called with words, steps done and their number.
        notes: what concerns the whole model and is known already.

    Raises:
        PlanError: a pattern that matches nothing, pairs that do not fit, or widening without an
            input to run on; a target out of reach.
        DataError: the model does not run on the examples.
        TraceError: the model does not run on the given input.
    """
    planning = _Planning(
        model, settings or Settings(), examples, progress or (lambda *_: None), given
    )
    planning.notes += notes
    return planning.run()


def candidate_units(
    model: nn.Module,
    settings: Settings,
    *,
    examples: Examples | None = None,
    progress: Progress | None = None,
) -> tuple[list[Unit], list[tuple[Site, str]]]:
    """Return what every layer of ``model`` could become, and the layers that cannot, with why."""
    return _Planning(model, settings, examples, progress or (lambda *_: None)).probe()


class _Planning:
    STEPS = 4

    def __init__(
        self,
        model: nn.Module,
        settings: Settings,
        examples: Examples | None,
        progress: Progress,
        given: SampleInputs | None = None,
    ) -> None:
        check_ready(model, values=False)
        self.model = model
        self.examples = examples
        self.given = given
        self.settings = settings
        self.found: Allocation | None = None
        self.progress = progress
        self.sites = walk(model)
        self.requests = requests_of(settings, self.sites)
        ways = {name: one.ways for name, one in self.requests.items()}
        self.spending = Spending(model, settings, examples, progress, ways)
        self.widths = WidthPlan({})
        self.notes: list[str] = packed(model)
        self.adapted = {getattr(one, "base_layer", one) for one in adapters_of(model).values()}

    def run(self) -> Planned:
        table = table_for(self.model, self.settings, self.progress)
        if table is not None:
            self.notes.append(f"times are predicted as {table.words}")
        with priced(None if table is None else table.prices):
            return self._run()

    def _run(self) -> Planned:
        self.progress("reading the model", 0, self.STEPS)
        self.progress("running a copy of it", 1, self.STEPS)
        sample = sample_inputs(self.model, self.settings, self.examples, self.given)
        seen = self._observe(sample)
        reasons = self._reasons(seen)
        # A target weighs the head's error like any other.
        if not (self.settings.convert_head or self.settings.target):
            free = [site for site in self.sites if site.name not in reasons]
            last = tuple(site.name for site in self.sites[-1:])
            heads = last if seen is None else seen.heads
            reasons |= head_reasons(free, self.requests, heads)
        self.progress("finding which widths go together", 2, self.STEPS)
        if self.settings.alpha != 1:
            self.widths = self._widened(sample, reasons)
            reasons |= self._followers_only(reasons)
        make = partial(self._made, reasons, sample, seen)
        if self.settings.limits_latency:
            known = self.model, self.settings, sample, seen, self.sites
            plan = LatencyTarget(*known, choose=make, progress=self.progress).plan()
        else:
            plan = make(None)
        maps = maps_for(self.model, plan, sample, self.progress)
        if maps is not None:
            plan = with_warmth(plan, self.sites, maps)
        self.progress("planned", self.STEPS, self.STEPS)
        return Planned(plan, maps)

    def _made(
        self,
        reasons: Mapping[str, str],
        sample: SampleInputs,
        seen: Observation | None,
        pace: Pace | None,
    ) -> Plan:
        """Choose, and return the plan.

        Args:
            pace: the model's time where a target limits it.
        """
        if self.settings.target:
            free = [site for site in self.sites if site.name not in reasons]
            asks = {name: one.ask for name, one in self.requests.items() if one.insists}
            stores = {n: one.store for n, one in self.requests.items() if one.store is not None}
            kept = [site for site in self.sites if self._only_bits(site, reasons)]
            spending = replace(self.spending, pace=pace)
            self.found = spending.search(free, asks, self._floors(), seen, stores, kept)
        layers = tuple(
            self._layer(site, reasons.get(site.name), seen or Observation()) for site in self.sites
        )
        self.progress("counting", 3, self.STEPS)
        return self._total(layers, sample, seen)

    def probe(self) -> tuple[list[Unit], list[tuple[Site, str]]]:
        """Return the candidates of every layer that can be converted, and why others cannot."""
        seen = self._observe(sample_inputs(self.model, self.settings, self.examples, self.given))
        reasons = self._reasons(seen)
        free = [site for site in self.sites if site.name not in reasons]
        units = self.spending.units(self.spending.free_layers(free, self._floors(), seen), seen)
        return units, [(one, reasons[one.name]) for one in self.sites if one.name in reasons]

    def _only_bits(self, site: Site, reasons: Mapping[str, str]) -> bool:
        """Return whether a layer stays dense for a reason that does not keep its bits."""
        request = self.requests[site.name]
        alone = request.refusal is not None and request.store is None
        return site.name in reasons and not alone and can_be_stored(site.held)

    def _store(self, site: Site, *, replaced: bool) -> Store | None:
        """Return how a layer is stored; None as it is."""
        store = self.requests[site.name].store
        found = self.found.stores if self.found is not None else {}
        if store is None and self.settings.chooses_bits:
            own = {id(one) for one in site.held.parameters()}
            tied = [one for one in self.sites if own & {id(p) for p in one.held.parameters()}]
            ways = next((found[one.name] for one in (site, *tied) if one.name in found), {None})
            store = next(iter(ways))
        if store == "fp32" or not (replaced or can_be_stored(site.held)):
            return None
        return store

    def _floors(self) -> dict[str, float]:
        return {name: request.floor for name, request in self.requests.items()}

    def _reasons(self, seen: Observation | None) -> dict[str, str]:
        model, sites, requests = self.model, self.sites, self.requests
        stacks = stack_reasons(model, sites, requests, seen, self.settings)
        keep = self.settings.keep_parametrized
        reasons = reasons_of(model, sites, requests, seen, stacks=stacks, keep_parametrized=keep)
        for group in tied_groups(model, sites) if self.settings.target else ():
            ones = group.sites
            found = reasons_of(
                model, ones, requests, seen, stacks=stacks, keep_parametrized=keep, tied=False
            )
            if not found and not any(requests[one.name].insists for one in ones):
                for one in ones:  # as one table, of which the tie is kept
                    reasons.pop(one.name, None)
        return reasons

    # What the model says

    def _observe(self, sample: SampleInputs) -> Observation | None:
        if not sample:
            self.notes.append(
                "no example input is known: the model was not run, multiply-adds are not counted "
                "and the output layer is taken to be the last one; give --input or --calibrate"
            )
            return None
        args, kwargs = sample.batch(self.model, 1, device="cpu")
        names = [site.name for site in self.sites]
        rows = max(1, rows_in((args, kwargs)))
        try:
            return observe(self.model, names, args, kwargs, examples=rows)
        except TraceError as problem:
            self.notes.append(f"multiply-adds are not counted: {problem.found}")
            return None

    def _widened(self, sample: SampleInputs, reasons: dict[str, str]) -> WidthPlan:
        if not sample:
            raise PlanError(
                where=f"{type(self.model).__name__}, alpha {self.settings.alpha:g}",
                found="no example input is known",
                allowed="an input to run the model on: widening follows what the forward does",
                fix="describe it with --input, such as --input 3x224x224",
            )
        args, kwargs = sample.drawn.batch(self.model, WIDTH_BATCH, device="cpu")
        targets = {
            site.name: site.kind.name
            for site in self.sites
            if site.name not in reasons
            and site.plain
            and prime_reason(site.kind.widths(site.module), self.requests[site.name].ask) is None
        }
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = widen(self.model, args, kwargs, alpha=self.settings.alpha, targets=targets)
        if found.failure:
            self.notes.append(f"widths stay as they are: {found.failure}")
        return found

    def _followers_only(self, reasons: Mapping[str, str]) -> dict[str, str]:
        """Return the layers that grow with their tensors alone, as where a subclass reads others
        of its own: which of them is which is not known."""
        found = {}
        for site in self.sites:
            target = self.widths.targets.get(site.name)
            if target is None or site.name in reasons:
                continue
            still = all(one[0] == one[1] for one in (target.inputs, target.outputs))
            if still and any(
                one.name.rpartition(".")[0] == site.name for one in self.widths.resizes
            ):
                found[site.name] = "its tensors follow the widths of others"
        return found

    # One layer

    def _layer(self, site: Site, reason: str | None, seen: Observation) -> LayerPlan:
        kind, module, request = site.kind, site.module, self.requests[site.name]
        before = kind.widths(module)
        target = self.widths.targets.get(site.name)
        after = before if target is None else (target.inputs[1], target.outputs[1])
        notes: list[str] = []
        way: Way = "factored"
        factors: Factors = {}
        shapes = seen.calls(site.names)
        read = bool(indirect(site, seen))
        found = self.found or Allocation()
        searched = self.found is not None and not request.insists
        if reason is None and searched:
            factors = found.factors.get(site.name, {})
            batch = self.settings.latency_at.batch if self.settings.limits_latency else 1
            many = [kind.batched(module, one, batch) for one in shapes]
            judged = chosen(request.ways, site, before, factors, many, read=read)
            reason, notes, way = judged
        elif reason is None:
            reason = prime_reason(after, request.ask)
            if reason is None and self.settings.alpha != 1:
                reason = kind.not_widened(module)
        if reason is None and not searched:
            factors = kind.factor(module, after, request.ask)
            judged = worth(self.settings, site, after, factors, request, shapes, read=read)
            reason, notes, way = judged
        if target is not None and target.reason and before[1] == after[1] and not reason:
            notes.append(f"keeps its width: {target.reason}")
        replaced = not reason
        if replaced and site.standing.note:
            notes.append(site.standing.note)
        if replaced and own_hooks(site.held):
            notes.append("its hooks go along, and are given the bilinear layer")
        if replaced and site.held in self.adapted:
            notes.append(
                "its adapter stays beside it, and cannot be merged any more: --merge-adapters does "
                "so first"
            )
        shares = found.shares.get(site.name, {}) if replaced else {}
        if shares:
            notes.append(f"shares {', '.join(shares)} with {', '.join({*shares.values()})}")
        macs = kind.macs(module, after, factors, shapes) // seen.examples if replaced else 0
        if way == "expanded":
            macs = seen.macs_of(site.names) * prod(after) // max(1, prod(before))
        return LayerPlan(
            name=site.name,
            aliases=site.aliases,
            kind=kind.name,
            action="replaced" if replaced else "kept" if before == after else "widened",
            reason=reason or "",
            notes=tuple(notes),
            inputs=(before[0], after[0]),
            outputs=(before[1], after[1]),
            factors=factors if replaced else {},
            shares=shares,
            init=started(request.init, self.settings.alpha, factors if replaced else {}),
            store=self._store(site, replaced=replaced),
            way=way,
            params=(
                sum(p.numel() for p in site.held.parameters()),
                kind.params(module, after, factors if replaced else None),
            ),
            macs=(seen.macs_of(site.names), macs),
            error=_rounded(found.errors.get(site.name)),
            sensitivity=_rounded(found.sensitivities.get(site.name)),
            sides="both" if replaced and self._both(site.name, found) else "inputs",
        )

    def _both(self, name: str, found: Allocation) -> bool:
        """Return whether a layer is fitted by what the model makes of its outputs, too."""
        if self.examples is None or not self.settings.fits_data:
            return False
        searched = self.found is not None and name in found.factors
        return name in found.sides if searched else self.settings.sides == "both"

    # The whole

    def _total(
        self, layers: tuple[LayerPlan, ...], sample: SampleInputs, seen: Observation | None
    ) -> Plan:
        resizes = self.widths.resizes
        shared = shared_by(self.model, self.sites, resizes)
        plan = Plan(
            model=f"{type(self.model).__module__}.{type(self.model).__qualname__}",
            fingerprint=fingerprint(self.model),
            settings=self.settings,
            inputs=sample.specs,
            assumed=sample.words,
            layers=tuple(one.model_copy(update={"shared": shared[one.name]}) for one in layers),
            others=others_of(self.model, self.sites, resizes),
            resizes=resizes,
            attrs=self.widths.attrs + self._fast_path_off(layers),
            params=count_params(self.model),
            bytes=count_bytes(self.model),
            error=_rounded(self.found.error) if self.found else None,
            calibration=self.spending.calibration,
            tried=tuple(self.found.tried) if self.found else (),
            shrink=self._shrink(),
            notes=(
                *self.notes,
                *(self.found.notes if self.found else ()),
                *memory_of(self.sites, layers),
            ),
        )
        return with_counts(self.model, plan, seen, sample=sample)

    def _shrink(self) -> float:
        if self.found is not None and self.found.tried:
            return self.found.shrink
        return 0.0 if self.settings.shrink == "auto" else self.settings.shrink

    def _fast_path_off(self, layers: Sequence[LayerPlan]) -> tuple[AttrChange, ...]:
        """Keep torch's fused encoder path from reading weights of layers that are replaced."""
        replaced = {layer.name for layer in layers if layer.action == "replaced"}
        return tuple(
            AttrChange(module=name, attr="activation_relu_or_gelu", before=flag, after=0)
            for name, module in self.model.named_modules()
            if isinstance(module, nn.TransformerEncoderLayer)
            and (flag := int(module.activation_relu_or_gelu)) != 0
            and any(f"{name}.{part}".lstrip(".") in replaced for part in FUSED)
        )


def _rounded(number: float | None) -> float | None:
    """Keep the digits of an estimate that mean something."""
    return None if number is None else float(f"{number:.3g}")
