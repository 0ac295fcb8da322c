"""Layers that share factors, built, checked and fitted to their weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from bp_convert.errors import PlanError
from bp_convert.graph.walk import Site
from bp_convert.groups.members import BOTH, tied_groups
from bp_convert.groups.tied_linear import BPTiedLinear
from bp_convert.kinds import Spread
from bp_convert.kron.nearest import nearest_kronecker_sum, reconstruct
from bp_convert.torch_private import parameters_of
from bp_convert.values.plan import LayerPlan, Plan


def built(site: Site, layer: LayerPlan, leader: Site | None, device: torch.device | str) -> Any:
    """Make the twin of a layer, with fresh random weights; ``tie`` then makes it share.

    Args:
        leader: whose factors it shares; None where it shares none.

    Raises:
        FactorError: factors that do not fit the widths.
    """
    kind, module = site.kind, site.outline
    if leader is None or not leader.kind.lookup or kind.lookup:
        return kind.build(module, layer.after, dict(layer.factors), device)
    inputs, outputs = layer.after
    return BPTiedLinear(
        inputs,
        outputs,
        getattr(module, "bias", None) is not None,
        factors=layer.factors["weight"],
        device=device,
        dtype=next(module.parameters()).dtype,
    )


def tie(twin: Any, leader: Any, layer: LayerPlan) -> None:
    """Make the factors of a twin that its plan names those of another layer's twin."""
    if isinstance(twin, BPTiedLinear):
        twin.tie_(leader)
    else:
        for name in layer.shares:
            setattr(twin, name, getattr(leader, name))


def biases(plan: Plan, sites: Mapping[str, Site], twins: Mapping[str, Any]) -> dict[int, Tensor]:
    """Return what a copy holds in place of biases that stand beside their layer, too, by ``id``."""
    found: dict[int, Tensor] = {}
    for layer in plan.converted:
        if layer.shares or plan.sharers(layer.name):
            old = parameters_of(sites[layer.name].held).get("bias")
            new = parameters_of(twins[layer.name]).get("bias")
            if old is not None and new is not None:
                found[id(old)] = new
    return found


@torch.no_grad()
def fill_stack(sites: Sequence[Site], twins: Sequence[nn.Module]) -> list[float]:
    """Set the twins of layers with one ``w2`` to the nearest Kronecker sum of their weights, one
    upon the other; return the relative error of each."""
    weights = [site.kind.computed(site.module)["weight"][0] for site in sites]
    made: list[Any] = list(twins)
    specs = [twin.factors for twin in made]
    out = (sum(spec.out[0] for spec in specs), specs[0].out[1])
    near = nearest_kronecker_sum(torch.cat(weights), out, specs[0].inp, specs[0].rank)
    errors = []
    parts = torch.split(near.w1, [spec.out[0] for spec in specs], dim=1)
    for site, twin, weight, w1 in zip(sites, made, weights, parts, strict=True):
        site.kind.place(twin, "weight", 0, w1, near.w2)
        site.kind.rest(site.module, twin, Spread())
        gap = torch.linalg.vector_norm(weight - reconstruct(w1, near.w2))
        errors.append(float(gap / torch.linalg.vector_norm(weight).clamp(min=1e-30)))
    return errors


def check_shares(model: nn.Module, plan: Plan, sites: Iterable[Site]) -> None:
    """Check that whoever shares factors has somebody to share them with, in sizes that agree, and
    that layers which hold one weight still do.

    Raises:
        PlanError: a plan that splits a group; the message names the layers and the way out.
    """
    for layer in plan.converted:
        for name, whose in layer.shares.items():
            _check_one(plan, layer, name, whose)
    replaced = {one.name: one for one in plan.converted}
    for group in tied_groups(model, list(sites)) if replaced else ():
        members = {one.name: replaced.get(one.name) for one in group.sites}
        if all(one is None for one in members.values()):
            continue
        for site in group.sites:
            mine = members[site.name]
            if mine is None or mine.shares != group.shares(site):
                what = "kept" if mine is None else "replaced on factors of its own"
                raise _split(
                    f"{site.name} ({site.kind.name})",
                    f"{what}, while its weight is tied to that of "
                    f"{next(one.name for one in group.sites if one is not site)}",
                    "tied layers that are all kept, or all replaced on one table",
                    f"set the action of all of them to kept: {', '.join(members)}",
                )


def _check_one(plan: Plan, layer: LayerPlan, name: str, whose: str) -> None:
    where = f"{layer.name} ({layer.kind}), shares"
    leader = plan.layer(whose)
    if leader is None or leader.action != "replaced" or leader.shares:
        found = (
            "is no layer of this plan"
            if leader is None
            else f"is {leader.action}"
            if leader.action != "replaced"
            else "shares them itself"
        )
        raise _split(
            where,
            f"its {name} is that of {whose}, which {found}",
            "a layer that is replaced, on factors of its own",
            "keep the layers that share them, too "
            f"({', '.join(one.name for one in plan.sharers(whose))}), or plan again with --exclude",
        )
    mine, theirs = layer.factors.get("weight"), leader.factors.get("weight")
    table = set(layer.shares) == set(BOTH) and layer.kind != leader.kind
    if mine is not None and theirs is not None:
        if table:
            theirs = theirs.model_copy(update={"out": theirs.inp, "inp": theirs.out})
        same = {
            "w1": (mine.out[0], mine.inp[0]) == (theirs.out[0], theirs.inp[0]),
            "w2": (mine.out[1], mine.inp[1]) == (theirs.out[1], theirs.inp[1]),
        }
        covers = prod(mine.out) >= layer.after[1] if table else True
        if same.get(name) and mine.rank == theirs.rank and covers:
            return
    raise _split(
        where,
        f"its {name} is that of {whose}, and they are of other sizes: {mine}, {theirs}",
        "one number of terms, and pairs that agree in the factor that is shared",
        "change both alike, or take the layers out of the group by planning again",
    )


def _split(where: str, found: str, allowed: str, fix: str) -> PlanError:
    return PlanError(where=where, found=found, allowed=allowed, fix=fix)
