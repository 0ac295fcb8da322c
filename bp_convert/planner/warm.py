"""Which widened layers can start from their trained weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from bp_convert.graph.example import SampleInputs
from bp_convert.graph.walk import Site
from bp_convert.mixing import DRAWN
from bp_convert.surgery import too_large
from bp_convert.values.plan import Plan
from bp_convert.values.progress import Progress
from bp_convert.widths.channel_map import ChannelMaps, measure_maps

MAP_BATCH = 4  # examples that tell channels apart
NOISE = "starts from noise: "


@dataclass(frozen=True)
class Planned:
    """A plan, and what was found out on the way that carrying it out asks for again.

    Attributes:
        plan: the plan.
        maps: how channels spread; None where no widened layer starts warm.
    """

    plan: Plan
    maps: ChannelMaps | None


def maps_for(
    model: nn.Module, plan: Plan, sample: SampleInputs, progress: Progress | None = None
) -> ChannelMaps | None:
    """Measure channel maps where a widened model keeps what is trained, and has weights."""
    warm = any(layer.init != "random" for layer in plan.layers)
    if not (plan.resizes and warm) or any(p.is_meta for p in model.parameters()):
        return None
    if progress is not None:
        progress("finding which channel is which", 0, 1)
    args, kwargs = sample.drawn.batch(model, MAP_BATCH)
    return measure_maps(model, plan, args, kwargs)


def with_warmth(plan: Plan, sites: Sequence[Site], maps: ChannelMaps) -> Plan:
    """Return the plan with notes on the layers that cannot start warm, and why."""
    reasons = dict(maps.unknown)
    for site in sites:
        layer = plan.layer(site.name)
        if layer is not None and layer.action == "replaced":
            reason = DRAWN if layer.init == "mixed" else too_large(site, layer)
            if reason is not None:
                reasons.setdefault(site.name, reason)
    layers = tuple(
        layer.model_copy(update={"notes": (*layer.notes, NOISE + reasons[layer.name])})
        if layer.init != "random" and layer.name in reasons
        else layer
        for layer in plan.layers
    )
    words = (
        "widening keeps the function, up to the factors' own error"
        if maps.preserved and not reasons
        else "widening does not keep the function; the layers' notes say where"
    )
    fresh = tuple(f"{name} starts afresh: {why}" for name, why in maps.fresh.items())
    return plan.model_copy(update={"layers": layers, "notes": (*plan.notes, words, *fresh)})
