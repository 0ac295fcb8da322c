"""The widths of a model after widening, as values."""

from __future__ import annotations

from dataclasses import dataclass

from bp_convert.values.plan import AttrChange, Resize

Size = int | tuple[int, ...]


@dataclass(frozen=True)
class TargetWidth:
    """The widths of one layer, and why its output is not widened (None where it is)."""

    module: str
    inputs_before: int
    inputs_after: int
    outputs_before: int
    outputs_after: int
    reason: str | None


@dataclass(frozen=True)
class WidthPlan:
    """All widths of a model after widening.

    Attributes:
        targets: every layer that some kind speaks for, by its first name.
        resizes: every tensor that changes shape.
        attrs: every attribute that changes.
        verified: the model ran at these sizes, with outputs of the same shapes, in eval mode and in
            train mode (in eval mode only where the source does not run in train mode either).
        failure: why nothing could be widened, in words; None where the analysis succeeded.
        never_called: layers that the example does not call.
        output_layers: layers whose output features are an axis of the model's output.
        groups: layers that must share one factor.
    """

    targets: dict[str, TargetWidth]
    resizes: tuple[Resize, ...] = ()
    attrs: tuple[AttrChange, ...] = ()
    verified: bool = False
    failure: str | None = None
    never_called: tuple[str, ...] = ()
    output_layers: tuple[str, ...] = ()
    groups: tuple[frozenset[str], ...] = ()
