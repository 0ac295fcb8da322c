"""A choice tried out: a copy of the model with roughly fitted layers, on examples held out.

The copy's layers stay dense: each weight is put where its factors would be, layer after layer, as
the conversion fits them, but to fewer examples and in fewer sweeps. Layers that are fitted each for
itself would tell little: in the conversion later ones make up for earlier ones.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor, nn

from bp_convert.bits.grid import COARSE, FORMS, Grid, nbytes
from bp_convert.bits.rounded import rounded_factors
from bp_convert.calibration.ahead import Ahead, beside
from bp_convert.calibration.gatherer import Order, order_of
from bp_convert.calibration.held import Yardstick
from bp_convert.calibration.moments import Moment
from bp_convert.calibration.norms import Norms
from bp_convert.calibration.replay import Replay
from bp_convert.calibration.tap import Batches
from bp_convert.calibration.work import FASTER, REHEARSAL, within
from bp_convert.graph.clone import clone
from bp_convert.graph.example import device_of
from bp_convert.graph.tree import rows_in
from bp_convert.groups.stacked import Stacked, coefficients, shared_rows
from bp_convert.kinds import Factors
from bp_convert.kron.als import affordable, factors_in_metric, natural
from bp_convert.kron.column_order import Columns
from bp_convert.kron.metric import Diagonal, Full, Metric, Plain
from bp_convert.search import cache
from bp_convert.search.bit_axis import NO_PAIR, rounded_dense
from bp_convert.search.candidates import Candidates
from bp_convert.search.curves import Curve
from bp_convert.search.units import Unit
from bp_convert.values.factors import FactorSpec
from bp_convert.values.literals import Store

EXAMPLES = 192  # that are fitted to
FEW = 24  # of them at least, where a pass takes long
STAGES = 8  # passes over them
SWEEPS = 3
THOROUGH = 6e12  # multiply-adds of passes over all examples, above which none fits to all
WORK = 1e9  # multiply-adds of a half sweep's normal equations, above which there is none
SIDE = 3000  # unknowns of one system, likewise


@dataclass
class Rehearsal:
    """Tries choices out.

    Args:
        candidates: of the model; what they saw of calibration is fitted to.
        held: examples that nothing is fitted to.
        units: what is chosen for.
        few: fit to some of the examples.
    """

    candidates: Candidates
    held: Batches
    units: Sequence[Unit]
    few: bool = True

    def errors(
        self,
        chosen: Mapping[str, Factors],
        both: Collection[str],
        shrink: float = 0.0,
        stacks: Sequence[Stacked] = (),
        stores: Mapping[str, Store | None] | None = None,
    ) -> Tensor | None:
        """Return the squared error of each held-out example; None where none can be compared.

        Args:
            chosen: factors by layer and role; other layers stay as they are.
            both: layers whose outputs count by what the model makes of them.
            shrink: as for ``Candidates``.
            stacks: layers that share a factor.
            stores: how layers are stored, kept or factored; others as the model has them.
        """
        bits = {name: one for name, one in (stores or {}).items() if one in FORMS}
        groups = [list(one.names) for one in stacks]
        examples = sum(map(rows_in, self._few))
        work = [STAGES, SWEEPS, examples, "norms settled"]
        words: list[object] = [sorted(both), f"{shrink:g}", groups, work]
        words += [bits] if bits else []
        key = self.candidates.key_of_choice(chosen, words)
        kept = cache.read(key)
        if kept is not None:
            return torch.from_numpy(kept[0][0].errors) if kept[0] else None
        found = self._run(chosen, both, shrink, stacks, bits)
        errors = None if found is None else found.float()
        one = [] if errors is None else [Curve(NO_PAIR, errors.cpu().numpy())]
        cache.write(key, one, 1.0)
        return errors

    @torch.no_grad()
    def _run(
        self,
        chosen: Mapping[str, Factors],
        both: Collection[str],
        shrink: float,
        stacks: Sequence[Stacked],
        bits: Mapping[str, str],
    ) -> Tensor | None:
        rows: dict[str, Tensor] = {}  # of the factors that are shared, by the first layer's name
        sharing = {name: stack for stack in stacks for name in stack.names}
        model = self._copy
        yardstick = self._yardstick
        units: dict[str, list[Unit]] = {}
        for unit in self.units:
            spec = chosen.get(unit.name, {}).get(unit.role)
            changed = spec is not None and spec.rank < spec.full_rank
            if unit.role and (changed or unit.name in bits):
                units.setdefault(unit.name, []).append(unit)
        sites = {name: ones[0].layer.site for name, ones in units.items()}
        start = {name: one.clone() for name, one in model.state_dict().items()}
        self._replay.clear()
        try:
            for unit in self.units:
                if not unit.role and unit.name in bits:  # stays dense for a reason of its own
                    self._round(model, unit, bits[unit.name])
            for number, stage in enumerate(self._order.stages(STAGES)):
                names = [name for name in stage if name in units]
                if not names:
                    continue
                stage_sites = [sites[name] for name in names]
                caught = self._ahead.of(number)
                known = self._order, self._few, caught, self._norms, self._replay
                moments = beside(model, stage_sites, *known)
                for name in names:
                    for unit in units[name]:
                        found = moments.get((name, unit.role))
                        spec = chosen.get(name, {}).get(unit.role)
                        if spec and name in sharing and found and found[0].count:
                            self._share(model, unit, sharing[name], spec, moments, rows, shrink)
                            continue
                        self._change(
                            *(model, unit, spec, found, bits.get(name)),
                            both=name in both,
                            shrink=shrink,
                        )
            for name, ones in units.items():  # what no data reaches goes by its weights
                if name not in self._order.calls:
                    for unit in ones:
                        spec = chosen.get(name, {}).get(unit.role)
                        self._change(model, unit, spec, None, bits.get(name))
            self._norms.settle(model, self._few)
            return yardstick.errors(model)
        finally:
            model.load_state_dict(start)

    def _change(
        self,
        model: nn.Module,
        unit: Unit,
        spec: FactorSpec | None,
        moments: Sequence[Moment] | None,
        store: str | None = None,
        *,
        both: bool = False,
        shrink: float = 0.0,
    ) -> None:
        """Put a role's matrices where their factors would be, or what is stored of them."""
        site = unit.layer.site
        matrices = site.kind.computed(site.module)[unit.role]
        slope = self.candidates.evidence.slopes.get((unit.name, unit.role)) if both else None
        counts = None if slope is None else slope.forms(len(matrices), shrink)
        changes, shifts = [], []
        for index, weight in enumerate(matrices):
            moment = None if not moments else moments[index * len(moments) // len(matrices)]
            if moment is None or not moment.count:
                metric: Metric = Plain()
                target, outputs = weight, None
            else:
                metric = moment.metric(shrink)
                target = moment.target(weight, metric, torch.float32)
                outputs = moment.outputs if counts is None else counts[index]
            if spec is None:
                assert store is not None
                fitted = rounded_dense(target, metric, store, lookup=site.kind.lookup).to(weight)
            else:
                own = None if moment is None else moment.outputs
                fitted = self._fitted(unit, spec, target, metric, (outputs, own), store)
            changes.append(fitted - weight)
            if moment is not None and moment.centred and not site.kind.lookup:
                before, after = moment.other_mean.float(), moment.mean.float()
                shifts.append(weight @ before - fitted @ after)
        module = model.get_submodule(site.name)
        site.kind.add(module, unit.role, changes)
        if len(shifts) == len(changes):
            site.kind.add_bias(module, unit.role, shifts)

    def _fitted(
        self,
        unit: Unit,
        spec: FactorSpec,
        target: Tensor,
        metric: Metric,
        outputs: tuple[Metric | None, Metric | None],
        store: str | None,
    ) -> Tensor:
        """Return what a weight (K, D) is on factors, as they are stored: fitted, and then rounded
        to give what they gave, as the conversion does it.

        Args:
            outputs: how its outputs count in the fit, and how where factors are rounded.
        """
        columns = Columns.of(spec, self._kernel(unit))
        one, two = factors_in_metric(
            *(target, spec, columns, metric),
            outputs=outputs[0],
            sweeps=SWEEPS if affordable(spec, metric, WORK, SIDE) else 0,
            solved=torch.float32,
            name=unit.name,
        )
        form = FORMS.get(store or "")
        if isinstance(form, Grid) and form.bits < COARSE:
            whole = natural(one, two, columns)[:, : target.shape[1]]
            rows = outputs[1].weights.sqrt() if isinstance(outputs[1], Diagonal) else None
            found = rounded_factors(
                *(whole, one, two, columns, metric, form, (form.scales, form.scales)),
                spec=spec,
                rows=rows,
            )
            one, two = found.w1, found.w2
        elif form is not None:
            one, two = form.rounded(one), form.rounded(two)
        return natural(one, two, columns)[:, : target.shape[1]]

    @staticmethod
    def _round(model: nn.Module, unit: Unit, store: str) -> None:
        """Round what a layer holds that stays dense."""
        for one in model.get_submodule(unit.name).parameters():
            if nbytes(store, one) < one.numel() * one.element_size():
                one.copy_(FORMS[store].rounded(one))

    def _share(
        self,
        model: nn.Module,
        unit: Unit,
        stack: Stacked,
        spec: FactorSpec,
        moments: Mapping[tuple[str, str], list[Moment]],
        rows: dict[str, Tensor],
        shrink: float,
    ) -> None:
        """Put a layer's matrix where its factors would be, of which one is a group's."""
        site, leader = unit.layer.site, stack.names[0]
        moment = moments[site.name, unit.role][0]
        weight, metric = site.kind.computed(site.module)[unit.role][0], moment.metric(shrink)
        assert isinstance(metric, Full)
        if leader not in rows:
            weights, metrics = [], []
            known: dict[int, Metric] = {id(moment): metric}
            for one in stack.sites:
                near = moments.get((one.name, unit.role)) or self.candidates.evidence.only(one.name)
                form = known.setdefault(id(near[0]), near[0].metric(shrink))
                weights.append(one.kind.computed(one.module)[unit.role][0])
                metrics.append(form)
            full = [one for one in metrics if isinstance(one, Full)]
            counts = [1.0] * len(weights)
            rows[leader] = shared_rows(weights, full, counts)[:, : spec.rank].t()
        target = moment.target(weight, metric, torch.float32)
        own = coefficients(target, metric, rows[leader])
        fitted = (own @ rows[leader]).to(weight)
        module = model.get_submodule(site.name)
        site.kind.add(module, unit.role, [fitted - weight])
        if moment.centred:
            before, after = moment.other_mean.float(), moment.mean.float()
            site.kind.add_bias(module, unit.role, [weight @ before - fitted @ after])

    @staticmethod
    def _kernel(unit: Unit) -> tuple[int, ...]:
        site = unit.layer.site
        return site.kind.choices(site.module, unit.layer.widths)[unit.role].kernel

    @cached_property
    def _few(self) -> Batches:
        """What is fitted to."""
        whole, count = self.candidates.batches, 0
        if not self.few:
            return whole
        batches = whole
        for number, batch in enumerate(whole):
            count += rows_in(batch)
            if count >= EXAMPLES:
                batches = whole[: number + 1]
                break
        model = self.candidates.model
        return within(batches, STAGES * self.candidates.macs, REHEARSAL, device_of(model), FEW)

    @cached_property
    def thorough(self) -> Rehearsal | None:
        """One that fits to all examples; None where this one does, or where that takes long."""
        count, each = sum(map(rows_in, self.candidates.batches)), STAGES * self.candidates.macs
        faster = 1.0 if device_of(self.candidates.model).type == "cpu" else FASTER
        if sum(map(rows_in, self._few)) == count or each * count > THOROUGH * faster:
            return None
        return replace(self, few=False)

    @cached_property
    def _ahead(self) -> Ahead:
        """What layers get in the source, which is the same for each choice."""
        return Ahead(self._source, self._order.stages(STAGES), self._order.calls, self._few)

    @cached_property
    def _norms(self) -> Norms:
        return Norms(self._source, self._copy, self._few)

    @cached_property
    def _replay(self) -> Replay:
        return Replay(self._copy)

    @cached_property
    def _order(self) -> Order:
        sites = [one.site for one in self.candidates.layers if not one.site.kind.bare]
        return order_of(self._source, sites, self._few)

    @cached_property
    def _source(self) -> nn.Module:
        return clone(self.candidates.model, self._plain, apart=True)

    @cached_property
    def _copy(self) -> nn.Module:
        return clone(self.candidates.model, self._plain, apart=True)

    @property
    def _plain(self) -> dict[nn.Module, nn.Module]:
        sites = [one.site for one in self.candidates.layers]
        return {one.held: one.module for one in sites if not one.plain}

    @cached_property
    def _yardstick(self) -> Yardstick:
        return Yardstick(self._source, self.held)

    @property
    def work(self) -> float:
        """The cubes of the layers' input widths, which roots of what they see take the time of."""
        return sum(float(unit.shape[1]) ** 3 for unit in self.units)

    @property
    def size(self) -> float:
        """The outputs' variance, added up over an example."""
        return self._yardstick.size

    @property
    def examples(self) -> int:
        """How many examples are held out."""
        return self._yardstick.examples
