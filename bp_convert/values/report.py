"""What was done, in the form that ``--json`` prints; and how good the result is."""

from __future__ import annotations

from pydantic import Field

from bp_convert.values.base import Number, Shown, Value
from bp_convert.values.plan import LayerPlan, Plan
from bp_convert.values.reconstruction import Reconstructed
from bp_convert.values.training import Trained


class Score(Value):
    """One metric of two models on the same examples.

    Attributes:
        metric: its name, such as accuracy, top5, perplexity, cosine or error.
        before: of the source model; 1 for cosine and 0 for error, which compare with it.
        after: of the converted model. A perplexity may be infinite.
        higher_is_better: whether a larger number is a better model.
        examples: examples that both were scored on.
    """

    metric: str
    before: Number
    after: Number
    higher_is_better: bool
    examples: int

    @property
    def lost(self) -> float:
        """How much worse the converted model is; negative where it is better."""
        lost = self.before - self.after
        return lost if self.higher_is_better else -lost


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


class PlainBits(Value):
    """The source with its weights rounded to int8 and nothing else.

    Attributes:
        bytes: of its parameters and buffers.
        output_error: as in ``Verification``, on the same inputs.
    """

    bytes: int
    output_error: Number


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


class Report(Shown):
    """The result of a conversion or of a dry run. ``--json`` prints its fields.

    Attributes:
        verdict: one paragraph that a user can act on.
        plan: what was done, layer by layer; notes of a layer say what the conversion met.
        fit_errors: by layer, the relative Frobenius error of the factors against the trained
            weight or, where they were fitted to data, of the layer's output. A layer that was
            not fitted has none.
        source: words on where the model came from.
        calibration: the data that factors were fitted to; empty for the weights alone.
        notes: what concerns the whole run; the plan has notes of its own.
        reconstruction: what the tuning of blocks to the source's outputs did; None where it was not
            asked for or nothing was fitted to data.
        scores: quality before and after, on data that no factor was fitted to.
        training: what training after the conversion did.
        verification: what running the result showed; None where it was not run.
        plain_int8: what int8 alone gives, where that takes no more bytes; None where it takes more,
            or was not looked at.
        latency: one entry for each batch size that was measured.
        seconds: that all of it took.
        versions: of what made it.
        machine: words for where it was made.
    """

    verdict: str = ""
    plan: Plan
    fit_errors: dict[str, Number] = Field(default_factory=dict)
    source: str = ""
    calibration: str = ""
    notes: tuple[str, ...] = ()
    reconstruction: Reconstructed | None = None
    scores: tuple[Score, ...] = ()
    training: Trained | None = None
    verification: Verification | None = None
    plain_int8: PlainBits | None = None
    latency: tuple[Latency, ...] = ()
    seconds: float | None = None
    versions: dict[str, str] = Field(default_factory=dict)
    machine: str = ""

    @property
    def layers(self) -> tuple[LayerPlan, ...]:
        """Every layer that could be converted, and what became of it."""
        return self.plan.layers

    def __repr__(self) -> str:
        return f"<Report of {self.plan.in_short}>\n{self.verdict}".rstrip()
