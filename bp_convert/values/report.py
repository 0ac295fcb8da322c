"""What was done, in the form that ``--json`` prints."""

from __future__ import annotations

from pydantic import Field

from bp_convert.values.base import Value
from bp_convert.values.factors import FactorSpec
from bp_convert.values.plan import Action, OtherWeights, Plan, Totals, in_short
from bp_convert.values.score import Score
from bp_convert.values.training import Trained


class LayerReport(Value):
    """One row: a layer of the source model and what became of it.

    Attributes:
        name: dotted name.
        kind: name of the Kind.
        action: replaced, widened or kept.
        reason: why it is kept or left dense.
        notes: further remarks.
        pairs: factor pairs of each weight matrix.
        rank: Kronecker terms; None unless replaced.
        params_before: parameters before.
        params_after: parameters after.
        params_shared: how many of those before another row counts as well: tied weights.
        macs_before: multiply-adds of one example before (1 MAC = 2 FLOPs).
        macs_after: multiply-adds of one example after.
        fit_error: relative Frobenius error of the factors against the trained weight, or, where
            they were fitted to data, of the layer's output; None where nothing was fitted.
    """

    name: str
    kind: str
    action: Action
    reason: str
    notes: tuple[str, ...] = ()
    pairs: dict[str, FactorSpec]
    rank: int | None
    params_before: int
    params_after: int
    params_shared: int = 0
    macs_before: int
    macs_after: int
    fit_error: float | None


class ReportTotals(Value):
    """Whole-model counts; ``macs`` are of one example, 1 MAC = 2 FLOPs."""

    params: Totals
    macs: Totals | None
    bytes: Totals


class Verification(Value):
    """What running the converted model showed.

    Attributes:
        ran_eval: forward ran in eval mode, with the source's output structure and shapes.
        ran_train: forward and backward ran in train mode.
        gradients: new parameters received a gradient wherever the plain layers' do.
        source_untouched: the source model is bit-identical.
        output_error: relative error of the floating-point output that changed most, about its
            mean over the examples; None where none could be compared.
        output: that output.
        flips: share of integer outputs that changed; None where there are none.
        examples: real ones that the outputs were compared on; 0 for drawn numbers.
        on: what the outputs were compared on.
        ways: in which the conversion was compared with the same weights in plain layers.
        notes: what could not be checked, and why.
    """

    ran_eval: bool
    ran_train: bool
    gradients: bool
    source_untouched: bool
    output_error: float | None
    output: str = ""
    flips: float | None = None
    examples: int = 0
    ways: tuple[str, ...] = ()
    on: str = "random input"
    notes: tuple[str, ...] = ()


class Latency(Value):
    """Measured times in milliseconds: dense and converted, interleaved in one run."""

    batch: int
    dense_ms: float
    converted_ms: float
    dense_spread_ms: float
    converted_spread_ms: float
    repeats: int
    device: str
    threads: int
    dense_peak_bytes: int | None = None
    converted_peak_bytes: int | None = None

    @property
    def speedup(self) -> float:
        """Dense time over converted time: above 1 the converted model is faster."""
        return self.dense_ms / self.converted_ms


class Report(Value):
    """The result of a conversion or of a dry run.

    Attributes:
        others: every module that holds parameters and is no layer of a known kind.
        targets: the limits that were to be kept.
        estimated_error: what the plan expects of the output's relative error.
        calibration: the data that factors were fitted to; empty for the weights alone.
        scores: quality before and after, on data that no factor was fitted to.
        training: what training after the conversion did.
    """

    totals: ReportTotals
    layers: tuple[LayerReport, ...]
    others: tuple[OtherWeights, ...] = ()
    verdict: str
    model: str
    source: str = ""
    inputs: tuple[str, ...] = ()
    assumed: str = ""
    notes: tuple[str, ...] = ()
    targets: tuple[str, ...] = ()
    estimated_error: float | None = None
    calibration: str = ""
    scores: tuple[Score, ...] = ()
    training: Trained | None = None
    verification: Verification | None = None
    latency: tuple[Latency, ...] = ()
    seconds: float | None = None
    versions: dict[str, str] = Field(default_factory=dict)

    def __repr__(self) -> str:
        said = in_short(self.model, self.layers, self.totals.params)
        return f"<Report of {said}>\n{self.verdict}".rstrip()

    __str__ = __repr__


def rows(plan: Plan, errors: dict[str, float | None]) -> tuple[LayerReport, ...]:
    """Turn a plan's layers into report rows, with the fit errors by layer name."""
    return tuple(
        LayerReport(
            name=one.name,
            kind=one.kind,
            action=one.action,
            reason=one.reason,
            notes=one.notes,
            pairs=one.factors,
            rank=max((spec.rank for spec in one.factors.values()), default=None),
            params_before=one.params[0],
            params_after=one.params[1],
            params_shared=one.shared[0],
            macs_before=one.macs[0],
            macs_after=one.macs[1],
            fit_error=errors.get(one.name),
        )
        for one in plan.layers
    )
