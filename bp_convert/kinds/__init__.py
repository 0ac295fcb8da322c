"""Everything the tool knows of each module type. To add one, write a Kind and list it here."""

from __future__ import annotations

from torch import nn

from bp_convert.kinds.base import Ask, Choices, Factors, Kind, Spread, Widths
from bp_convert.kinds.conv import Conv1dKind, Conv2dKind, Conv3dKind
from bp_convert.kinds.embedding import EmbeddingKind
from bp_convert.kinds.linear import LinearKind, prime_reason
from bp_convert.kinds.lstm import LSTMKind

KINDS: tuple[Kind, ...] = (
    LinearKind(),
    Conv1dKind(),
    Conv2dKind(),
    Conv3dKind(),
    EmbeddingKind(),
    LSTMKind(),
)

__all__ = [
    "KINDS",
    "Ask",
    "Choices",
    "Factors",
    "Kind",
    "Spread",
    "Widths",
    "kind_of",
    "prime_reason",
]


def kind_of(module: nn.Module) -> Kind | None:
    """Return the kind that speaks for ``module``, or None."""
    return next((kind for kind in KINDS if kind.matches(module)), None)


def kind_named(name: str) -> Kind | None:
    """Return the kind of this name, or None."""
    return next((kind for kind in KINDS if kind.name == name), None)
