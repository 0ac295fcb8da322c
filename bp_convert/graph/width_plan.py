"""The widths of a model after widening, as values."""

from __future__ import annotations

from dataclasses import dataclass

Size = int | tuple[int, ...]


@dataclass(frozen=True)
class Resize:
    """A parameter or buffer that changes shape.

    Attributes:
        name: dotted state name, the first of its aliases.
        before: shape in the source.
        after: shape after widening.
        groups: for each axis that changes, its size in words such as ``49*features.0.out``; None
            for an axis that stays.
    """

    name: str
    before: tuple[int, ...]
    after: tuple[int, ...]
    groups: tuple[str | None, ...]


@dataclass(frozen=True)
class AttrChange:
    """A plain attribute of a module that changes with the widths."""

    module: str
    attr: str
    before: Size
    after: Size


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
