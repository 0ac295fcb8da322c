"""A report as ``--json`` prints it, and the schema of that form."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from bp_convert.values.base import Value
from bp_convert.values.factors import Pair
from bp_convert.values.plan import Action
from bp_convert.values.report import LayerReport, Report


class Count(Value):
    """Before and after conversion."""

    before: int
    after: int


class Totals(Value):
    """Over the whole model. Multiply-adds are of one example; 1 MAC = 2 FLOPs."""

    params: Count
    macs: Count | None = Field(description="null where no example input is known")
    bytes: Count


class PairsOut(Value):
    """``out`` = (k1, k2), ``in`` = (d1, d2); convolutions name each kernel axis's factor."""

    out: Pair
    inp: Pair = Field(alias="in")
    axes: tuple[int, ...] | None = None


class Layer(Value):
    """One layer of the source."""

    name: str
    kind: str
    action: Action
    reason: str
    pairs: PairsOut | dict[str, PairsOut] | None = Field(
        description="of the layer's matrix, or by role (ih_l0, hh_l0, ...); null unless replaced"
    )
    rank: int | None
    params_before: int
    params_after: int
    macs_before: int
    macs_after: int
    fit_error: float | None = Field(description="relative Frobenius error; null if not fitted")


class Summary(Value):
    """What ``bp-convert --json`` prints."""

    totals: Totals
    layers: tuple[Layer, ...]
    verdict: str


def summary(report: Report) -> dict[str, Any]:
    """Return the report in the form of ``Summary``, as plain values."""
    made = Summary.model_validate(
        {
            "totals": {
                "params": _count(report.totals.params),
                "macs": None if report.totals.macs is None else _count(report.totals.macs),
                "bytes": _count(report.totals.bytes),
            },
            "layers": [_layer(layer) for layer in report.layers],
            "verdict": report.verdict,
        }
    )
    plain = made.model_dump(mode="json", by_alias=True)
    for layer in plain["layers"]:
        for pairs in _all_pairs(layer["pairs"]):
            if pairs["axes"] is None:
                del pairs["axes"]
    return plain


def whole(report: Report) -> dict[str, Any]:
    """Return what ``summary`` returns, and all else that the run showed, as plain values."""
    rest = report.model_dump(mode="json", exclude={"totals", "layers", "verdict"})
    remarks = {layer.name: list(layer.notes) for layer in report.layers if layer.notes}
    return {**summary(report), **rest, "layer_notes": remarks}


def schema() -> dict[str, Any]:
    """Return the JSON schema of what ``--json`` prints."""
    return Summary.model_json_schema(by_alias=True)


def _count(total: Any) -> dict[str, int]:
    return {"before": total.before, "after": total.after}


def _layer(layer: LayerReport) -> dict[str, Any]:
    pairs = {
        role: {"out": spec.out, "in": spec.inp, "axes": spec.axes or None}
        for role, spec in layer.pairs.items()
    }
    return {
        "name": layer.name,
        "kind": layer.kind,
        "action": layer.action,
        "reason": layer.reason,
        "pairs": pairs.get("weight", pairs) or None,
        "rank": layer.rank,
        "params_before": layer.params_before,
        "params_after": layer.params_after,
        "macs_before": layer.macs_before,
        "macs_after": layer.macs_after,
        "fit_error": layer.fit_error,
    }


def _all_pairs(pairs: Any) -> list[dict[str, Any]]:
    if pairs is None:
        return []
    return [pairs] if "out" in pairs else list(pairs.values())
