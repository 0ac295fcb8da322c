"""A converted model's weights rounded to the bits that its plan stores them in, layer after layer.

Each layer reproduces what it put out before any rounding from the inputs that it gets in the model
that is rounded so far, as ``fitting.sequence`` has a conversion follow its source: factors in turn,
each refitted to the other; dense weights with each column's error made up for by the others. Bytes
of 8 bits and more lose too little for that, and are rounded to the nearest, as is what no data
reaches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from bp_convert.bits.compensated import rounded_in
from bp_convert.bits.grid import COARSE, Form, Grid
from bp_convert.bits.rounded import Scales, rounded_factors
from bp_convert.bits.stored import stored_forms
from bp_convert.calibration.ahead import Ahead, beside
from bp_convert.calibration.gatherer import Moments, order_of
from bp_convert.calibration.moments import Moment
from bp_convert.calibration.norms import Norms, settle_norms
from bp_convert.calibration.replay import Replay
from bp_convert.calibration.tap import Batches
from bp_convert.errors import PlanError
from bp_convert.fitting.sequence import _outputs as outputs_of
from bp_convert.fitting.sequence import _specs as specs_of
from bp_convert.fitting.sequence import stages_for
from bp_convert.graph.clone import clone
from bp_convert.graph.example import device_of
from bp_convert.graph.walk import Site, walk
from bp_convert.kinds import is_twin
from bp_convert.kron.als import natural
from bp_convert.kron.column_order import Columns
from bp_convert.kron.metric import Full
from bp_convert.values.plan import Plan
from bp_convert.values.progress import Progress, unheard


@torch.no_grad()
def round_stored(
    source: nn.Module,
    converted: nn.Module,
    plan: Plan,
    batches: Batches = (),
    progress: Progress = unheard,
) -> dict[str, float]:
    """Round every weight of ``converted`` that its plan stores in few bits, in place.

    Args:
        source: the model that was converted; it is left as it is.
        batches: (args, kwargs) of forward; none round each weight by itself.

    Returns:
        By layer the relative error that rounding adds: of its output where data tells, else of its
        weights.

    Raises:
        PlanError: a weight that the bits do not hold.
    """
    forms = stored_forms(converted, plan)
    if not forms:
        return {}
    sites = {site.name: site for site in walk(source)} if batches else {}
    work = _Rounding(converted, forms)
    coarse = [
        sites[layer.name]
        for layer in plan.stored
        if layer.name in sites and any(one.bits < COARSE for one in work.of(layer.name).values())
    ]
    errors: dict[str, float] = {}
    if coarse:
        before, after = clone(converted, apart=True), clone(converted, apart=True)
        order = order_of(before, [site for site in coarse if not site.kind.bare], batches)
        passes, few = stages_for(plan, batches, device_of(converted))
        stages = order.stages(passes)
        ahead = Ahead(before, stages, order.calls, few)
        norms, replay = Norms(before, after, few), Replay(after)
        # What loses little comes first, so that the others make up for it.
        for layer in plan.stored:
            if sites.get(layer.name) not in coarse:
                errors[layer.name] = work.nearest(layer.name)
                work.follow(after, layer.name)
        for number, names in enumerate(stages):
            progress(f"rounding {names[0]}", number, len(stages))
            stage = [sites[name] for name in names]
            moments = beside(after, stage, order, few, ahead.of(number), norms, replay)
            for site in stage:
                found = work.fitted(site, moments)
                if found is not None:
                    errors[site.name] = found
                    work.follow(after, site.name)
    for layer in plan.stored:
        if layer.name not in errors:
            errors[layer.name] = work.nearest(layer.name)
    if coarse:
        settle_norms(source, converted, batches)
    return errors


@dataclass
class _Rounding:
    """Rounds one layer of a model at a time."""

    model: nn.Module
    forms: Mapping[str, Form]

    def __post_init__(self) -> None:
        self.done: set[int] = set()

    def of(self, layer: str) -> dict[str, Form]:
        """Return how tensors of a layer are stored, by name."""
        start = f"{layer}." if layer else ""
        return {
            name: form
            for name, form in self.forms.items()
            if name == layer or name.startswith(start)
        }

    def follow(self, other: nn.Module, layer: str) -> None:
        """Give a copy of the model what a layer has become."""
        start = f"{layer}." if layer else ""
        mine, theirs = (dict(one.named_parameters()) for one in (self.model, other))
        for name in mine:
            if name == layer or name.startswith(start):
                theirs[name].copy_(mine[name])

    def _open(self, layer: str) -> dict[str, Tensor]:
        """Return the tensors of a layer that are not rounded yet, as where they are tied."""
        return {
            name: tensor
            for name in self.of(layer)
            if id(tensor := self.model.get_parameter(name)) not in self.done
        }

    def _is_shared(self, tensor: Tensor, site: Site) -> bool:
        """Return whether others than a layer hold a tensor, too."""
        starts = tuple(f"{name}." if name else "" for name in site.names)
        return any(
            one is tensor and not name.startswith(starts) and name not in site.names
            for name, one in self.model.named_parameters(remove_duplicate=False)
        )

    def nearest(self, layer: str) -> float:
        """Round each tensor of a layer by itself; return the relative error of its weights."""
        gap = total = 0.0
        for name, tensor in self._open(layer).items():
            near = _finite(self.forms[name].rounded(tensor), name)
            gap += float((near.double() - tensor.double()).square().sum())
            total += float(tensor.double().square().sum())
            tensor.copy_(near)
            self.done.add(id(tensor))
        return (gap / total) ** 0.5 if total else 0.0

    def fitted(self, site: Site, moments: Moments) -> float | None:
        """Round a layer in the metric of its inputs; None where that is not known."""
        held = self._open(site.name)
        grids = {self.forms[name] for name in held}
        grid = grids.pop() if len(grids) == 1 else None
        if not isinstance(grid, Grid) or len(held) < len(self.of(site.name)):
            return None
        if any(self._is_shared(one, site) for one in held.values()):
            return None  # what makes up for the one would be another's error
        module = self.model.get_submodule(site.name)
        made = _Twin(site, module) if is_twin(module) else None
        if made is None and not (site.plain and _alone(module, held)):
            return None
        roles = site.kind.computed(site.module, None if made is None else made.specs)
        if not all(
            moment.count for role in roles for moment in moments.get((site.name, role), [Moment(1)])
        ):
            return None
        found = (
            _dense(site, module, grid, moments) if made is None else made.round(grid, moments, held)
        )
        if found is None:
            return None
        for tensor in held.values():
            _finite(tensor, site.name)
            self.done.add(id(tensor))
        return found


def _alone(module: nn.Module, held: Mapping[str, Tensor]) -> bool:
    """Return whether all matrices of a layer are among tensors."""
    known = set(map(id, held.values()))
    return all(id(one) in known for one in module.parameters() if one.dim() > 1)


def _finite(tensor: Tensor, name: str) -> Tensor:
    if not bool(torch.isfinite(tensor).all()):
        raise PlanError(
            where=name,
            found="numbers that these bits do not hold",
            allowed="finite numbers, and for fp16 none above 65,504",
            fix="store this layer in bf16 or as it is, by a rule with `store: fp32`",
        )
    return tensor


def _dense(site: Site, module: nn.Module, grid: Grid, moments: Moments) -> float:
    """Round a layer that stays dense; return the relative error of its output."""
    kind = site.kind
    gap = total = 0.0
    roles = kind.computed(module)
    kept = {role: [one.clone() for one in ones] for role, ones in roles.items()}
    wanted = {
        role: [
            _wanted(one, moments[site.name, role], index, len(ones))
            for index, one in enumerate(ones)
        ]
        for role, ones in kept.items()
    }
    for role, ones in wanted.items():
        kind.add(module, role, [new - old for new, old in zip(ones, kept[role], strict=True)])
    weights = [one for one in module.parameters() if one.dim() > 1]
    steps = [grid.scales(one) for one in weights]
    shadow = clone(module)
    shadows = [one for one in shadow.parameters() if one.dim() > 1]
    for shade, step in zip(shadows, steps, strict=True):
        shade.data = step.to(shade.device)
    scales = kind.computed(shadow)
    for role, ones in wanted.items():
        found = moments[site.name, role]
        now = []
        for index, one in enumerate(ones):
            moment = found[index * len(found) // len(ones)]
            metric = moment.metric()
            form = metric.matrix if isinstance(metric, Full) else None
            near = rounded_in(one, scales[role][index], grid, form)
            lost, size = moment.error(kept[role][index], near)
            gap, total = gap + lost, total + size
            now.append(near)
        changes = []
        for index, near in enumerate(now):
            moment = found[index * len(found) // len(ones)]
            if moment.centred and not kind.lookup:
                before, after = moment.other_mean.float(), moment.mean.float()
                changes.append(kept[role][index] @ before - near @ after)
        kind.add(module, role, [new - old for new, old in zip(now, ones, strict=True)])
        if len(changes) == len(now):
            kind.add_bias(module, role, changes)
    for weight, step in zip(weights, steps, strict=True):
        weight.copy_(grid.rounded(weight, step.to(weight.device)))
    return (gap / total) ** 0.5 if total else 0.0


def _wanted(weight: Tensor, found: Sequence[Moment], index: int, many: int) -> Tensor:
    moment = found[index * len(found) // many]
    return moment.target(weight, moment.metric())


class _Twin:
    """A bilinear layer, and where the factors of its matrices lie among its parameters."""

    def __init__(self, site: Site, twin: nn.Module) -> None:
        self.site = site
        self.twin = twin
        self.specs = specs_of(twin)
        self.places: dict[tuple[str, int], list[tuple[str, Tensor]]] = {}

    def _place(self, role: str, index: int) -> list[tuple[str, Tensor]] | None:
        """Return for both factors of a matrix the parameter that holds it and the places there;
        found by placing numbers that tell."""
        spec = self.specs[role]
        (k1, k2), (d1, d2), rank = spec.out, spec.inp, spec.rank
        shapes = ((rank, k1, d1), (rank, d2, k2))
        found = []
        for side, shape in enumerate(shapes):
            copy = clone(self.twin).double()
            for parameter in copy.parameters():
                parameter.fill_(-1.0)
            count = shape[0] * shape[1] * shape[2]
            told = torch.arange(2, count + 2, dtype=torch.float64).view(shape)
            both = [torch.ones(one, dtype=torch.float64) for one in shapes]
            both[side] = told
            self.site.kind.place(copy, role, index, both[0], both[1])
            hits = [
                (name, one.detach().cpu().reshape(-1))
                for name, one in copy.named_parameters()
                if bool((one >= 2).any())
            ]
            if len(hits) != 1:
                return None
            name, numbers = hits[0]
            at = (numbers >= 2).nonzero().squeeze(1)
            if len(at) != count:
                return None
            places = torch.empty(count, dtype=torch.int64)
            places[(numbers[at] - 2).long()] = at
            found.append((name, places.view(shape)))
        return found

    def round(self, grid: Grid, moments: Moments, held: Mapping[str, Tensor]) -> float | None:
        """Round every matrix; return the relative error of the layer's output.

        Args:
            held: the tensors that are rounded; smaller factors stay as they are.
        """
        stored = set(map(id, held.values()))
        kind, site = self.site.kind, self.site
        choices = kind.choices(site.module, kind.widths(site.module))
        outlines = kind.computed(site.module, self.specs)
        every = {
            (role, index): self._place(role, index)
            for role, ones in outlines.items()
            for index in range(len(ones))
        }
        names = {name for ones in every.values() for name, _ in ones or ()}
        reached = {id(self.twin.get_parameter(name)) for name in names}
        if any(one is None for one in every.values()) or not stored <= reached:
            return None
        gap = total = 0.0
        for (role, index), places in every.items():
            assert places is not None
            found = moments[site.name, role]
            ones = outlines[role]
            moment = found[index * len(found) // len(ones)]
            metric = moment.metric()
            spec = self.specs[role]
            columns = Columns.of(spec, choices[role].kernel)
            w1, w2 = (self._read(*one) for one in places)
            weight = natural(w1, w2, columns)[:, : ones[index].shape[1]]
            target = moment.target(weight, metric)
            counts = outputs_of(moment, index, len(weight))
            near = rounded_factors(
                target,
                w1,
                w2,
                columns,
                metric,
                grid,
                (self._scales(grid, stored, *places[0]), self._scales(grid, stored, *places[1])),
                spec=spec,
                rows=None if counts is None else counts.weights.sqrt(),
            )
            kind.place(self.twin, role, index, near.w1, near.w2)
            fitted = natural(near.w1, near.w2, columns)[:, : weight.shape[1]]
            if moment.centred and not kind.lookup:
                before, after = moment.other_mean.float(), moment.mean.float()
                kind.shift(self.twin, role, index, weight @ before - fitted @ after)
            lost, size = moment.error(weight, fitted)
            gap, total = gap + lost, total + size
        return (gap / total) ** 0.5 if total else 0.0

    def _read(self, name: str, places: Tensor) -> Tensor:
        flat = self.twin.get_parameter(name).detach().float().cpu().reshape(-1)
        return flat[places]

    def _scales(self, grid: Grid, stored: set[int], name: str, places: Tensor) -> Scales | None:
        parameter = self.twin.get_parameter(name)
        if id(parameter) not in stored:
            return None

        def scales(factor: Tensor) -> Tensor:
            whole = parameter.detach().float().cpu().reshape(-1).clone()
            whole[places] = factor
            return grid.scales(whole.view(parameter.shape)).reshape(-1)[places]

        return scales
