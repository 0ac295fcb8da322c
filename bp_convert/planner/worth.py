"""Whether replacing a layer pays: in parameters, and in time, by the speed guard; and on which way
it runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from bp_convert.graph.walk import Site
from bp_convert.kinds import Factors, Widths, predict
from bp_convert.kinds.speed import AS_FAST, Speed
from bp_convert.planner.requests import LayerRequest
from bp_convert.values.literals import Ways
from bp_convert.values.plan import EXPANDED, FUSED, LayerPlan, Way
from bp_convert.values.settings import Settings

READ = "slower than the dense layer: the model reads its weight, which is built at each call"
MARGIN = 1.1  # the speed guard wants this much gain, since its predictions are that good


class Verdict(NamedTuple):
    """Why the layer is kept, or what to remark; and how it runs."""

    reason: str | None
    notes: list[str]
    way: Way = "factored"


def chosen(
    ways: Ways,
    site: Site,
    widths: Widths,
    factors: Factors,
    shapes: Sequence[tuple[int, ...]],
    *,
    read: bool = False,
) -> Verdict:
    """Judge what a target has chosen: no factors keep the layer, slow ones are remarked on.

    Args:
        ways: how the layer may run.
    """
    if not factors:
        return Verdict("the target is met best with this layer as it is", [])
    if read:
        return Verdict(None, [READ])
    speed = predict(site.kind, site.module, widths, factors, shapes)
    return _on_its_way(ways, site, speed)


def worth(
    settings: Settings,
    site: Site,
    after: Widths,
    factors: Factors,
    request: LayerRequest,
    shapes: Sequence[tuple[int, ...]],
    *,
    read: bool = False,
) -> Verdict:
    """Judge what no target has chosen: it must not grow, nor run slower unless asked for.

    Args:
        read: the layer is not called, its weight is read.
    """
    kind, module = site.kind, site.module
    dense, small = kind.params(module, after), kind.params(module, after, factors)
    if small >= dense and not request.insists and not settings.convert_anyway:
        return Verdict(f"would grow by {100 * (small / dense - 1):.0f} %", [])
    by_user = settings.alpha > 1 or request.ask.pairs != "fast" or request.insists
    asked = by_user or settings.convert_anyway
    if read:
        return Verdict(None, [READ]) if asked else Verdict(f"would be {READ}", [])
    speed = predict(kind, module, after, factors, shapes)
    found = _on_its_way(request.ways, site, speed)
    if asked or speed is None or speed.ratio >= MARGIN:
        return found
    best = speed.dense / speed.on(found.way)
    if found.way == "expanded" and best >= AS_FAST:
        return found
    slower = _slower(best) if best < 1 else "no faster than the dense layer"
    return Verdict(f"would be {slower}", [])


def _on_its_way(ways: Ways, site: Site, speed: Speed | None) -> Verdict:
    """Return the verdict on a layer that is replaced."""
    if speed is None:
        known = ways == "expanded" and getattr(site.kind.twin, "EXPANDS", False)
        notes = [expanded_note()] if known else []
        return Verdict(None, notes, "expanded" if known else "factored")
    way = speed.way(ways)
    best = speed.dense / speed.on(way)
    notes = [expanded_note(speed)] if way == "expanded" else []
    notes += [FUSED] if way == "fused" else []
    if best < (AS_FAST if way == "expanded" else 1):
        notes.append(_slower(best))
    return Verdict(None, notes, way)


def expanded_note(speed: Speed | None = None) -> str:
    """Say that a layer is expanded, and why."""
    why = "" if speed is None else f" (predicted {1 / speed.ratio:.1f}x its time on factors)"
    return EXPANDED + why


def memory_of(sites: Sequence[Site], layers: Sequence[LayerPlan]) -> list[str]:
    """Say what expanded layers take of memory."""
    known, size, many = {site.name: site for site in sites}, 0, 0
    for one in layers:
        if one.way == "expanded":
            site = known[one.name]
            each = next(site.held.parameters()).element_size()
            many, size = many + 1, size + each * site.kind.params(site.outline, one.after)
    if not many:
        return []
    words = "1 layer runs" if many == 1 else f"{many} layers run"
    return [
        f"{words} expanded: {size / 1e6:.3g} MB of dense weights are built at the first call and "
        "kept in memory, not in the file (--ways factored does without)"
    ]


def _slower(ratio: float) -> str:
    return f"slower than the dense layer (predicted {1 / ratio:.1f}x its time)"
