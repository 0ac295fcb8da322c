"""What the settings ask of each layer, and why the model has it stay as it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from bp_convert.errors import PlanError
from bp_convert.graph.observe import Observation
from bp_convert.graph.walk import Site, select, structural_reasons
from bp_convert.kinds import Ask
from bp_convert.values.literals import Init, Store, Ways
from bp_convert.values.settings import LayerRule, Settings


@dataclass(frozen=True)
class LayerRequest:
    """What the settings ask of one site; ``floor`` is the share of its parameters that it keeps at
    least, ``store`` how its weights are stored, where that is not to be chosen, ``ways`` how it may
    run."""

    ask: Ask
    init: Init
    insists: bool
    refusal: str | None
    floor: float = 0.0
    store: Store | None = None
    ways: Ways = "factored"


def requests_of(settings: Settings, sites: Sequence[Site]) -> dict[str, LayerRequest]:
    """Return the request for each site by name; of the rules the first that matches holds.

    Raises:
        PlanError: a pattern matches nothing, or a rule has layers expanded of which none can be.
    """
    included = _matched(settings.include, sites)
    excluded = _matched(settings.exclude, sites)
    rules = [(rule, select(rule.match, sites)) for rule in settings.layers]
    for rule, hits in rules:
        _check_way(rule, [site for site in sites if site.name in hits])
    requests = {}
    for site in sites:
        rule = next((r for r, hits in rules if site.name in hits), None) or LayerRule(match="*")
        refusal = None
        if rule.keep:
            refusal = f"kept by the rule for {rule.match!r}"
        elif site.name in excluded:
            refusal = "excluded"
        elif settings.include and site.name not in included and not rule.insists:
            refusal = "not included"
        ask = Ask(
            pairs=settings.pairs if rule.pairs is None else rule.pairs,
            rank=settings.rank if rule.rank is None else rule.rank,
        )
        # What is to be left alone keeps its bits as well.
        store = rule.store or (None if refusal is not None else settings.store)
        requests[site.name] = LayerRequest(
            *(ask, rule.init or settings.init, rule.insists, refusal, rule.floor or 0.0, store),
            settings.open_ways(rule.way),
        )
    return requests


def reasons_of(
    model: nn.Module,
    sites: Sequence[Site],
    requests: dict[str, LayerRequest],
    seen: Observation | None,
    *,
    stacks: Mapping[str, str],
    keep_parametrized: bool = False,
    tied: bool = True,
) -> dict[str, str]:
    """Return for each site that stays what it is the firmest reason, heads apart.

    Args:
        seen: a run of the model; None where it was not run.
        stacks: why bare stacks of matrices stay.
        keep_parametrized: layers whose weight is computed stay.
        tied: so do those that hold another layer's weight.
    """
    reasons = structural_reasons(model, sites, keep_parametrized=keep_parametrized, tied=tied)
    for site in sites:
        request = requests[site.name]
        used = () if seen is None else {*seen.shapes, *seen.read, *indirect(site, seen)}
        never = seen is not None and not any(name in used for name in site.names)
        candidates = (
            request.refusal,
            reasons.get(site.name),
            site.kind.refuse(site.module),
            stacks.get(site.name),
            "never called on the example input" if never else None,
        )
        found = next(filter(None, candidates), None)
        if found:
            reasons[site.name] = found
    return reasons


def indirect(site: Site, seen: Observation) -> tuple[str, ...]:
    """Return the names under which a layer is not called, and its weight read instead: its twin
    then builds the weight for whoever reads it."""
    readable = isinstance(getattr(site.kind.twin, "weight", None), property) and site.plain
    return tuple(name for name in site.names if name in seen.indirect) if readable else ()


def _check_way(rule: LayerRule, sites: Sequence[Site]) -> None:
    if rule.way != "expanded" or any(getattr(one.kind.twin, "EXPANDS", False) for one in sites):
        return
    raise PlanError(
        where=f"the rule for {rule.match!r}",
        found=f"way: expanded, and {', '.join(sorted({one.kind.name for one in sites}))} runs on "
        "factors alone",
        allowed="kinds that are modules of their own, not stacks of matrices in another's",
        fix="leave the way out",
    )


def _matched(patterns: Sequence[str], sites: Sequence[Site]) -> frozenset[str]:
    return frozenset().union(*(select(pattern, sites) for pattern in patterns))
