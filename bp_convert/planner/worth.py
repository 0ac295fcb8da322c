"""Whether replacing a layer pays: in parameters, and in time, by the speed guard."""

from __future__ import annotations

from collections.abc import Sequence

from bp_convert.graph.walk import Site
from bp_convert.kinds import Factors, Widths, predict
from bp_convert.planner.requests import LayerRequest
from bp_convert.values.settings import Settings

READ = "slower than the dense layer: the model reads its weight, which is built at each call"
MARGIN = 1.1  # the speed guard wants this much gain, since its predictions are that good
Verdict = tuple[str | None, list[str]]  # why the layer is kept, or what to remark


def chosen(
    site: Site,
    widths: Widths,
    factors: Factors,
    shapes: Sequence[tuple[int, ...]],
    *,
    read: bool = False,
) -> Verdict:
    """Judge what a target has chosen: no factors keep the layer, slow ones are remarked on."""
    if not factors:
        return "the target is met best with this layer as it is", []
    if read:
        return None, [READ]
    speed = predict(site.kind, site.module, widths, factors, shapes)
    if speed is None or speed.ratio >= 1:
        return None, []
    return None, [_slower(speed.ratio)]


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
        return f"would grow by {100 * (small / dense - 1):.0f} %", []
    by_user = settings.alpha > 1 or request.ask.pairs != "fast" or request.insists
    if read:
        asked = by_user or settings.convert_anyway
        return (None, [READ]) if asked else (f"would be {READ}", [])
    speed = predict(kind, module, after, factors, shapes)
    if speed is None or speed.ratio >= MARGIN:
        return None, []
    slower = _slower(speed.ratio) if speed.ratio < 1 else "no faster than the dense layer"
    if by_user or settings.convert_anyway:
        return None, [slower]
    return f"would be {slower}", []


def _slower(ratio: float) -> str:
    return f"slower than the dense layer (predicted {1 / ratio:.1f}x its time)"
