"""What the settings ask of each layer, before the model has a say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bp_convert.graph.walk import Site, select
from bp_convert.kinds import Ask
from bp_convert.values.settings import LayerRule, Settings


@dataclass(frozen=True)
class Wish:
    """What the settings ask of one site."""

    ask: Ask
    init: str
    insists: bool
    refusal: str | None
    floor: float = 0.0


def wishes_of(settings: Settings, sites: Sequence[Site]) -> dict[str, Wish]:
    """Return the wish for each site by name; of the rules the first that matches holds.

    Raises:
        PlanError: a pattern matches nothing.
    """
    included = _matched(settings.include, sites)
    excluded = _matched(settings.exclude, sites)
    rules = [(rule, select(rule.match, sites)) for rule in settings.layers]
    wishes = {}
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
        wishes[site.name] = Wish(
            ask, rule.init or settings.init, rule.insists, refusal, rule.floor or 0.0
        )
    return wishes


def floors(wishes: dict[str, Wish]) -> dict[str, float]:
    """Return the share of its parameters that each layer keeps at least."""
    return {name: wish.floor for name, wish in wishes.items()}


def _matched(patterns: Sequence[str], sites: Sequence[Site]) -> frozenset[str]:
    return frozenset().union(*(select(pattern, sites) for pattern in patterns))
