"""The widths of a model after widening, as values."""

from __future__ import annotations

from dataclasses import dataclass

from bp_convert.values.plan import AttrChange, Resize

Size = int | tuple[int, ...]


@dataclass(frozen=True)
class TargetWidth:
    """The widths of one layer before and after, and why its output stays (None: it grows)."""

    inputs: tuple[int, int]
    outputs: tuple[int, int]
    reason: str | None


@dataclass(frozen=True)
class WidthPlan:
    """All widths of a model after widening.

    Attributes:
        targets: every layer that some kind speaks for, by its first name.
        resizes: every tensor that changes shape.
        attrs: every attribute that changes.
        failure: why nothing could be widened, in words. None where the model ran at these sizes,
            with outputs of the same shapes, in eval mode and in train mode (in eval mode only
            where the source does not run in train mode either).
    """

    targets: dict[str, TargetWidth]
    resizes: tuple[Resize, ...] = ()
    attrs: tuple[AttrChange, ...] = ()
    failure: str | None = None
