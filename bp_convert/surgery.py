"""A plan carried out: the source copied, its layers exchanged, its followers re-dimensioned.

Nothing is decided here. What cannot be done as the plan says is an error that names the layer.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch import Tensor, nn

from bp_convert.errors import BpConvertError, FactorError, PlanError
from bp_convert.graph.clone import all_tensors, all_weights, to_meta
from bp_convert.graph.reshape import held, owner_of, reshaped
from bp_convert.graph.running import same_draws
from bp_convert.graph.walk import Site, walk
from bp_convert.groups.carrying import biases, built, check_shares, fill_stack, tie
from bp_convert.groups.members import BOTH
from bp_convert.kinds import Spread
from bp_convert.mixing import DRAWN, draw_at_size
from bp_convert.values.plan import LayerPlan, Plan, Resize
from bp_convert.values.progress import Progress
from bp_convert.values.reconstruction import Reconstructed
from bp_convert.widths.channel_map import ChannelMaps
from bp_convert.widths.followers import Follow, in_place

LARGEST = 2**29  # numbers in a widened weight that is built to be fitted: 2 GB in float32
GROWTH = 64  # times a tensor's numbers, to which a plan that a person edited may let it grow
MANY = 10**12  # terms, beyond which a number is not written out


@dataclass
class Converted:
    """A converted model and what became of its weights.

    Attributes:
        model: the copy; the source is untouched.
        errors: relative Frobenius error of each fitted layer.
        new: names of the parameters that conversion made or re-dimensioned.
        random: layers that start from noise, with the reason.
        missed: layers that were to be fitted to data and are not, with the reason.
        reconstruction: what tuning its blocks did; None where that was not asked for.
    """

    model: nn.Module
    errors: dict[str, float] = field(default_factory=dict)
    new: tuple[str, ...] = ()
    random: dict[str, str] = field(default_factory=dict)
    missed: dict[str, str] = field(default_factory=dict)
    reconstruction: Reconstructed | None = None


def fingerprint(model: nn.Module, *, by_script: bool = False) -> str:
    """Hash the names, shapes and dtypes of a model's state, and the types of its modules.

    Args:
        by_script: tell classes apart by the script that they stand in, too, as plans once did. Its
            name is another where the script runs and where it is imported.
    """
    digest = hashlib.sha256()
    for name, module in model.named_modules(remove_duplicate=False):
        home = type(module).__module__
        package = f"{home}." if by_script or "." in home else ""
        digest.update(f"{name}:{package}{type(module).__qualname__}\n".encode())
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        digest.update(f"{name}:{tuple(tensor.shape)}:{tensor.dtype}\n".encode())
    return digest.hexdigest()[:16]


def check(model: nn.Module, plan: Plan, *, exact: bool = True) -> None:
    """Check that ``plan`` can be carried out on ``model``.

    Args:
        exact: it is the very model that was planned for, not one that only has these layers.

    Raises:
        PlanError: the model is not the one planned for, or the plan was edited into something
            impossible; the message names the layer and the numbers.
    """
    sites = {site.name: site for site in walk(model)}
    for layer in plan.layers:
        site = sites.get(layer.name)
        if site is None and layer.action != "replaced" and _is_part(model, sites, layer.name):
            continue  # once a layer of its own
        where = f"{layer.name} ({layer.kind})"
        if site is None or site.kind.name != layer.kind:
            have = "no such layer" if site is None else f"a {site.kind.name}"
            raise _mismatch(where, have, f"a {layer.kind}")
        widths = site.kind.widths(site.outline)
        if layer.before != widths:
            have, due = (f"{one[0]} -> {one[1]}" for one in (widths, layer.before))
            raise _mismatch(where, have, f"{due}, as planned")
        if layer.action == "replaced":
            _check_replaced(site, layer, _leader(sites, layer))
    check_shares(model, plan, sites.values())
    found = fingerprint(model)
    known = (found, fingerprint(model, by_script=True))
    if exact and plan.fingerprint not in known:
        raise _mismatch(plan.model, f"state {found}", f"state {plan.fingerprint}, as planned")
    _check_followers(model, plan)


def _is_part(model: nn.Module, sites: Mapping[str, Site], name: str) -> bool:
    """Return whether a name is that of a part of a layer."""
    path, _, own = name.rpartition(".")
    return path in sites and own in sites[path].kind.parts


def _check_followers(model: nn.Module, plan: Plan) -> None:
    """Check what a plan changes besides layers, which a person may have edited as well."""
    tensors = all_weights(model)
    for resize in plan.resizes:
        old = tensors.get(resize.name)
        have = None if old is None else tuple(old.shape)
        if have != resize.before:
            raise _mismatch(resize.name, f"shape {have}", f"shape {resize.before}, as planned")
        sizes = resize.after
        if len(sizes) != len(resize.before) or min(sizes, default=1) < 1:
            raise _mismatch(resize.name, f"the new shape {sizes}", "positive sizes, as many")
        most = max(LARGEST, GROWTH * math.prod(resize.before))
        if math.prod(sizes) > most:
            raise _mismatch(resize.name, f"the new shape {sizes}", f"at most {most:,} numbers")
    modules = dict(model.named_modules(remove_duplicate=False))
    for change in plan.attrs:
        where = f"{change.module}.{change.attr}"
        found = vars(modules[change.module]).get(change.attr) if change.module in modules else None
        if not isinstance(found, int | tuple | list):
            raise _mismatch(where, "no such number", "an attribute of one of the model's modules")


@contextmanager
def carried_out(model: nn.Module) -> Iterator[None]:
    """Let what goes wrong under a plan that a person may have edited be an error of the plan.

    Raises:
        PlanError: anything that is no error of ours went wrong.
    """
    try:
        yield
    except BpConvertError:
        raise
    except Exception as problem:
        text = str(problem).strip().splitlines() or ["no more words"]
        raise PlanError(
            where=type(model).__name__,
            found=f"the plan cannot be carried out: {type(problem).__name__}: {text[0][:200]}",
            allowed="a plan that was made for this model",
            fix="undo what was edited, or plan again; if nothing was, please report this model",
        ) from problem


def _leader(sites: Mapping[str, Site], layer: LayerPlan) -> Site | None:
    """Return the layer whose factors a layer shares."""
    return next((sites[one] for one in layer.shares.values() if one in sites), None)


def _check_replaced(site: Site, layer: LayerPlan, leader: Site | None) -> None:
    where = f"{layer.name} ({layer.kind})"
    known = {"expanded": "EXPANDS", "fused": "FUSES"}
    others = [way for way, name in known.items() if getattr(site.kind.twin, name, False)]
    if layer.way not in ("factored", *others):
        raise PlanError(
            where=where,
            found=f"way {layer.way}",
            allowed=f"factored{''.join(f' or {way}' for way in others) or ': it has no other way'}",
            fix="set its way to factored in the plan",
        )
    reason = site.kind.refuse(site.outline)
    if reason is not None:
        raise PlanError(
            where=where,
            found=f"action replaced, but: {reason}",
            allowed="action kept",
            fix="set its action to kept in the plan",
        )
    axes = len(getattr(site.outline, "kernel_size", ()))
    for role, spec in layer.factors.items():
        if spec.rank <= spec.full_rank and len(spec.axes) == axes:
            continue
        raise PlanError(
            where=f"{where}, factors of {role}",
            found=f"{min(spec.rank, MANY)} terms, the factors of {len(spec.axes)} axes",
            allowed=f"at most {spec.full_rank} terms, and the factors of {axes} axes of a kernel",
            fix="undo what was edited, or plan again",
        )
    try:
        built(site, layer, leader, "meta")
    except KeyError as problem:
        raise PlanError(
            where=where,
            found=f"no factors for {problem}",
            allowed="factors for every weight matrix of the layer",
            fix="add them, or plan again",
        ) from None


def _mismatch(where: str, found: str, allowed: str) -> PlanError:
    return PlanError(
        where=where,
        found=found,
        allowed=allowed,
        fix="apply the plan to the model that it was made for, or plan again",
    )


def apply_plan(
    model: nn.Module,
    plan: Plan,
    maps: ChannelMaps | None = None,
    *,
    structure_only: bool = False,
    checked: bool = False,
    progress: Progress | None = None,
) -> Converted:
    """Carry out ``plan`` on a copy of ``model``.

    Args:
        maps: how old channels spread over new ones; needed where a widened layer starts warm.
        checked: the plan was just made for this model, or has gone through ``check``.
        structure_only: make the converted model on the meta device, without any weight.
        progress: called with the layer's name, the layers done and their number.

    Raises:
        PlanError: the plan does not fit the model.
    """
    if not checked:
        check(model, plan)
    return _Surgery(model, plan, maps, structure_only).run(progress)


class _Surgery:
    """One plan that is carried out, with what is made and found out on the way."""

    def __init__(
        self, model: nn.Module, plan: Plan, maps: ChannelMaps | None, structure_only: bool
    ) -> None:
        self.model = model
        self.plan = plan
        self.maps = maps
        self.structure_only = structure_only
        self.sites = {site.name: site for site in walk(model)}
        self.fresh: dict[str, None] = {}  # modules that stay, and must start afresh
        self.result = Converted(model)

    def run(self, progress: Progress | None) -> Converted:
        model, result, todo = self.model, self.result, self.plan.converted
        modules: dict[nn.Module, nn.Module] = {}
        made: dict[str, nn.Module] = {}
        tensors = {id(t): to_meta(t) for t in all_tensors(model)} if self.structure_only else {}
        with same_draws(self.plan.settings.seed):
            # Whose factors others share comes first.
            for done, layer in enumerate(sorted(todo, key=lambda one: bool(one.shares))):
                if progress is not None:
                    progress(layer.name, done, len(todo))
                site = self.sites[layer.name]
                modules[site.held] = made[layer.name] = self._twin(site, layer, made)
            self._fill_stacks(made)
            if progress is not None and todo:
                progress("followers", len(todo), len(todo))
            tensors.update(self._followers())
            tensors.update(biases(self.plan, self.sites, made))
            result.model = reshaped(model, self.plan, modules, tensors)
            for name in self.fresh:
                reset = getattr(result.model.get_submodule(name), "reset_parameters", None)
                if callable(reset):
                    reset()
        resized = {resize.name for resize in self.plan.resizes}
        twins = tuple(f"{layer.name}." for layer in todo)
        names = [name for name, _ in result.model.named_parameters()]
        result.new = tuple(one for one in names if one in resized or one.startswith(twins))
        return result

    def _twin(self, site: Site, layer: LayerPlan, twins: Mapping[str, nn.Module]) -> nn.Module:
        """Build and fill the bilinear twin of one layer.

        Args:
            twins: those that are made, by name.
        """
        kind, outline, result = site.kind, site.outline, self.result
        device = "meta" if self.structure_only else next(site.held.parameters()).device
        leader = _leader(self.sites, layer)
        twin: nn.Module = built(site, layer, leader, device)
        kind.carry(outline, twin)
        if layer.way != "factored":
            twin.way = layer.way  # type: ignore[assignment]
        if leader is not None:
            tie(twin, twins[leader.name], layer)
        if self.structure_only:
            return twin
        spread = self._spread(layer)
        if layer.init == "random":
            result.random[layer.name] = "as asked"
        elif layer.init == "warm" and (reason := too_large(site, layer)) is not None:
            result.random[layer.name] = reason
        elif spread is None:
            assert self.maps is not None
            why = self.maps.unknown.get(layer.name, "its channel map is not known")
            result.random[layer.name] = why
        elif layer.init == "mixed":
            draw_at_size(site, twin, spread)
            result.random[layer.name] = DRAWN
        elif leader is not None and set(layer.shares) == set(BOTH):
            kind.rest(site.module, twin, spread)
            if leader.name in result.errors:
                result.errors[layer.name] = result.errors[leader.name]
        elif not self._in_stack(layer):
            result.errors[layer.name] = fill(layer, site, twin, spread)
        return twin

    def _in_stack(self, layer: LayerPlan) -> bool:
        """Return whether it shares one of its factors, so that one fit serves several layers."""
        ones = (layer, *self.plan.sharers(layer.name))
        return any(len(one.shares) == 1 for one in ones)

    def _fill_stacks(self, twins: Mapping[str, nn.Module]) -> None:
        """Fit layers that share one factor together."""
        for layer in self.plan.converted if not self.structure_only else ():
            if layer.shares or not self._in_stack(layer) or layer.name in self.result.random:
                continue
            members = [layer, *self.plan.sharers(layer.name)]
            sites = [self.sites[one.name] for one in members]
            errors = fill_stack(sites, [twins[one.name] for one in members])
            self.result.errors.update(zip([one.name for one in members], errors, strict=True))

    def _spread(self, layer: LayerPlan) -> Spread | None:
        """Return how the layer's channels spread, or None where that is not known."""
        if self.maps is None:
            return Spread() if layer.before == layer.after else None
        if layer.name in self.maps.unknown:
            return None
        return self.maps.spreads.get(layer.name, Spread())

    def _followers(self) -> dict[int, Tensor]:
        """Make the new tensors of modules that stay."""
        names = {id(module): name for name, module in self.model.named_modules()}
        replaced = {
            id(one)
            for layer in self.plan.converted
            for one in self.sites[layer.name].held.modules()
        }
        made: dict[int, Tensor] = {}
        for resize in self.plan.resizes:
            module, key = owner_of(self.model, resize.name)
            if id(module) in replaced:
                continue
            old = held(module, key)
            assert old is not None
            new = self._follower(names[id(module)], old, resize).detach().to(old.dtype).clone()
            made[id(old)] = (
                nn.Parameter(new, requires_grad=old.requires_grad)
                if isinstance(old, nn.Parameter)
                else new
            )
        return made

    def _follower(self, name: str, old: Tensor, resize: Resize) -> Tensor:
        """Return what a tensor of the module ``name`` becomes."""
        maps, result = self.maps, self.result
        if self.structure_only:
            return old.new_empty(resize.after, device="meta")
        if maps is not None and resize.name in maps.follows and name not in maps.fresh:
            return maps.follows[resize.name].apply(old)
        leads = name in self.sites and not self.sites[name].kind.follows
        layer = self.plan.layer(name) if leads else None
        if layer is not None and layer.action == "widened":
            spread = self._spread(layer)
            if spread is not None:
                site, key = self.sites[name], resize.name.rpartition(".")[2]
                wide = site.kind.spread(site.module, spread)
                if key in wide:
                    return wide[key].contiguous()
                if old.dim() and old.shape[0] == layer.outputs[0]:  # of a subclass: by output
                    return spread.rows(old)
                return Follow(in_place(resize.before, resize.after)).apply(old)
            self.fresh[name] = None
            result.random[name] = maps.unknown.get(name, "") if maps else "as asked"
            return old.new_zeros(resize.after)
        if maps is None or name in maps.fresh:
            self.fresh[name] = None
            if maps is not None:
                result.random[name] = maps.fresh[name]
        return Follow(in_place(resize.before, resize.after)).apply(old)


def too_large(site: Site, layer: LayerPlan) -> str | None:
    """Return why a widened layer's weight is not built to be fitted, or None."""
    size = site.kind.params(site.outline, layer.after)
    if layer.before == layer.after or size <= LARGEST:
        return None
    if site.kind.only_repeats(site.outline, layer.factors):
        return None
    return f"its widened weight of {size / 1e9:.1f} billion numbers is too large to be built"


def fill(layer: LayerPlan, site: Site, twin: nn.Module, spread: Spread) -> float:
    """Fit the twin and return the relative error; what goes wrong names the layer."""
    if site.standing.trouble:
        raise PlanError(
            where=f"{layer.name} ({layer.kind})",
            found=f"action replaced, but: {site.standing.trouble}",
            allowed="action kept",
            fix="plan again for this model, or set its action to kept in the plan",
        )
    try:
        return site.kind.fill(site.module, twin, spread)
    except FactorError as problem:
        raise FactorError(
            where=f"{layer.name}.{problem.where} ({layer.kind})",
            found=problem.found,
            allowed=problem.allowed,
            fix=problem.fix,
        ) from None
