"""Why a layer cannot or shall not be converted."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from bp_convert.graph.observe import Observation
from bp_convert.graph.walk import Site, structural_reasons
from bp_convert.planner.wishes import Wish


def reasons_of(
    model: nn.Module,
    sites: Sequence[Site],
    wishes: dict[str, Wish],
    seen: Observation | None,
    *,
    heads_too: bool,
) -> dict[str, str]:
    """Return for each site that stays what it is the firmest reason.

    Args:
        seen: a run of the model; None where it was not run.
        heads_too: convert layers that make the model's output.
    """
    reasons = structural_reasons(model, sites)
    heads = _heads(sites, seen)
    for site in sites:
        wish = wishes[site.name]
        never = seen is not None and not any(name in seen.shapes for name in site.names)
        candidates = (
            wish.refusal,
            reasons.get(site.name),
            site.kind.refuse(site.module),
            "never called on the example input" if never else None,
            "it makes the model's output (--convert-head converts it)"
            if site.name in heads and not (heads_too or wish.insists)
            else None,
        )
        found = next((reason for reason in candidates if reason), None)
        if found:
            reasons[site.name] = found
    return reasons


def _heads(sites: Sequence[Site], seen: Observation | None) -> tuple[str, ...]:
    if seen is not None:
        return seen.heads
    return (sites[-1].name,) if sites else ()
