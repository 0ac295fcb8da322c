"""Which bare stacks of matrices stay: those whose class is not shown to go on as before with a
module in their place, or to multiply by what it takes from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from bp_convert.graph.observe import Observation
from bp_convert.graph.walk import Site
from bp_convert.planner.requests import LayerRequest
from bp_convert.values.settings import Settings


def stack_reasons(
    model: nn.Module,
    sites: Sequence[Site],
    requests: Mapping[str, LayerRequest],
    seen: Observation | None,
    settings: Settings,
) -> dict[str, str]:
    """Return for each stack that stays the reason.

    Args:
        seen: a run of the model with modules in the stacks' places; None where it was not run.
    """
    reasons = {}
    for site in sites:
        if not site.kind.bare:
            continue
        owner = type(model.get_submodule(site.name.rpartition(".")[0])).__name__
        anyway = settings.convert_anyway or requests[site.name].insists
        trouble = "" if seen is None else next(filter(None, map(seen.unopened.get, site.names)), "")
        if settings.alpha != 1:
            reasons[site.name] = "alpha does not widen parameters that a class holds"
        elif trouble:
            reasons[site.name] = f"{owner} does not run with a module in its place: {trouble}"
        elif seen is None and not anyway:
            reasons[site.name] = (
                f"the model was not run, to see that {owner} does as before with it"
            )
        elif seen is not None and seen.read & {*site.names} and not anyway:
            reasons[site.name] = (
                f"{owner} does more than multiply by its matrices: it would be built at each use, "
                "slower than as it is"
            )
    return reasons
