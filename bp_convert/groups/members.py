"""Who shares factors: layers that hold one weight, an embedding and a head above all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from bp_convert.graph.overlap import Holding, meetings
from bp_convert.graph.walk import Site
from bp_convert.torch_private import parameters_of
from bp_convert.values.factors import FactorSpec

TABLE, HEAD = "Embedding", "Linear"  # kinds that may hold one table
BOTH = ("w1", "w2")


@dataclass(frozen=True)
class Tied:
    """Layers that hold one table (V, E) as their weight.

    Attributes:
        sites: the layers; the first is an embedding where there is one, and leads the others.
    """

    sites: tuple[Site, ...]

    @property
    def leader(self) -> Site:
        return self.sites[0]

    @property
    def followers(self) -> tuple[Site, ...]:
        return self.sites[1:]

    @property
    def tables(self) -> tuple[Site, ...]:
        """Those that look rows of it up."""
        return tuple(one for one in self.sites if one.kind.lookup)

    @property
    def heads(self) -> tuple[Site, ...]:
        """Those that multiply by it."""
        return tuple(one for one in self.sites if not one.kind.lookup)

    def spec(self, site: Site, lead: FactorSpec) -> FactorSpec:
        """Return a member's factors, given the leader's: what an embedding calls its inputs are a
        head's outputs."""
        if site.kind.lookup == self.leader.kind.lookup:
            return lead
        return lead.model_copy(update={"out": lead.inp, "inp": lead.out})

    def shares(self, site: Site) -> dict[str, str]:
        """Return which factors of a member are another layer's, and whose."""
        return {} if site is self.leader else dict.fromkeys(BOTH, self.leader.name)


def tied_groups(model: nn.Module, sites: Sequence[Site]) -> list[Tied]:
    """Return the groups among some layers that hold one parameter as their weight, and that
    nothing else of the model holds."""
    held: dict[int, list[Site]] = {}
    if any(isinstance(getattr(one, "_tied_weights_keys", None), list) for one in model.modules()):
        return []  # of a transformers before 5, which ties by the attribute weight alone
    for site in sites:
        weight = parameters_of(site.held).get("weight")
        if site.kind.name in (TABLE, HEAD) and weight is not None:
            held.setdefault(id(weight), []).append(site)
    found = [ones for ones in held.values() if len(ones) > 1]
    met = meetings(model) if found else {}
    groups = []
    for ones in found:
        inside = {id(one.held) for one in ones}
        known = [one for one in ones if one.plain]
        weight = parameters_of(ones[0].held)["weight"]
        others = [one for _, one in met.get(id(weight), ()) if id(one.module) not in inside]
        same = all(parameters_of(one.held)["weight"] is weight for one in ones)
        pads = {one.held.padding_idx for one in ones if one.kind.lookup}
        alike = len(known) == len(ones) and same and not others and len(pads) < 2
        if alike and all(_bias_may_follow(one, sites, met) for one in ones):
            groups.append(Tied(tuple(sorted(ones, key=lambda one: not one.kind.lookup))))
    return groups


def _bias_may_follow(
    site: Site, sites: Sequence[Site], met: Mapping[int, Sequence[tuple[str, Holding]]]
) -> bool:
    """Return whether who holds a layer's bias beside it holds the very tensor, and is no layer: in
    a copy it gets the twin's."""
    bias = parameters_of(site.held).get("bias")
    if bias is None:
        return True
    layers = {id(one.held) for one in sites}
    others = [one for _, one in met.get(id(bias), ()) if one.module is not site.held]
    return all(one.parameter is bias and id(one.module) not in layers for one in others)
