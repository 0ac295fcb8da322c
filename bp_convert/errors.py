"""The errors a user can meet. Each says where, what was found, what is allowed, what to do."""

from __future__ import annotations

from functools import partial


class BpConvertError(Exception):
    """Base of every error that this package raises on purpose.

    Args:
        where: the place, such as a dotted layer name with its type, or a file and a path in it.
        found: what stood there.
        allowed: what may stand there.
        fix: what the user can do about it.
    """

    def __init__(self, *, where: str, found: str, allowed: str, fix: str) -> None:
        super().__init__(where, found, allowed, fix)
        self.where = where
        self.found = found
        self.allowed = allowed
        self.fix = fix

    def __str__(self) -> str:
        return (
            f"{self.where}\n  found:   {self.found}\n"
            f"  allowed: {self.allowed}\n  to do:   {self.fix}"
        )

    def __reduce__(self) -> tuple[object, ...]:
        words = {"where": self.where, "found": self.found, "allowed": self.allowed, "fix": self.fix}
        return partial(type(self), **words), ()


class FactorError(BpConvertError):
    """Factor pairs or a rank that do not fit the layer, or a weight that cannot be factored."""


class CheckpointError(BpConvertError):
    """A model file that cannot be read, is not trusted, or cannot be written."""


class TraceError(BpConvertError):
    """The model did not run on the described input."""


class PlanError(BpConvertError):
    """Settings or a plan that do not fit the model.

    Attributes:
        lowest: what a target out of reach could be, in its own unit; None for others.
    """

    lowest: float | None = None


class VerificationError(BpConvertError):
    """The converted model did not behave as its plan says."""


class RecipeError(BpConvertError):
    """A settings or recipe file that is not valid."""


class DataError(BpConvertError):
    """Data that cannot be read or does not fit the model."""


class TrainingError(BpConvertError):
    """Training that cannot start as asked, or that cannot go on."""


class ExportError(BpConvertError):
    """A model that a runtime's file cannot hold, or a runtime that is not installed."""
