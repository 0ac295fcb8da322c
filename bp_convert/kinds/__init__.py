"""Everything the tool knows of each module type. To add one, write a Kind and list it here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeGuard

from torch import nn

from bp_convert.kinds.attention_kind import AttentionKind
from bp_convert.kinds.cell_kind import GRUCellKind, LSTMCellKind, RNNCellKind
from bp_convert.kinds.choices import Ask, Choices, Factors, Widths, prime_reason, whole
from bp_convert.kinds.conv_kind import Conv1dKind, Conv2dKind, Conv3dKind
from bp_convert.kinds.conv_transpose_kind import (
    ConvTranspose1dKind,
    ConvTranspose2dKind,
    ConvTranspose3dKind,
)
from bp_convert.kinds.embedding_bag_kind import EmbeddingBagKind
from bp_convert.kinds.embedding_kind import EmbeddingKind
from bp_convert.kinds.kind import Kind, has_bias
from bp_convert.kinds.linear_kind import LinearKind
from bp_convert.kinds.recurrent_kind import GRUKind, LSTMKind, RNNKind
from bp_convert.kinds.speed import predict
from bp_convert.kinds.spread import Spread
from bp_convert.kinds.stack_kind import MatrixStackKind
from bp_convert.kinds.turned_kind import TurnedKind
from bp_convert.kinds.two_inputs_kind import BilinearKind

KINDS: list[Kind] = [
    LinearKind(),
    Conv1dKind(),
    Conv2dKind(),
    Conv3dKind(),
    EmbeddingKind(),
    LSTMKind(),
    TurnedKind(),
    ConvTranspose1dKind(),
    ConvTranspose2dKind(),
    ConvTranspose3dKind(),
    GRUKind(),
    RNNKind(),
    LSTMCellKind(),
    GRUCellKind(),
    RNNCellKind(),
    EmbeddingBagKind(),
    MatrixStackKind(),
    AttentionKind(),
    BilinearKind(),
]

__all__ = [
    "KINDS",
    "Ask",
    "Choices",
    "Factors",
    "Kind",
    "Spread",
    "Widths",
    "given_to",
    "has_bias",
    "is_twin",
    "kind_of",
    "kind_of_either",
    "predict",
    "prime_reason",
    "registered",
    "relative_of",
    "table_rows",
    "uncounted",
    "unseen_macs",
    "whole",
]


def kind_of(module: nn.Module) -> Kind | None:
    """Return the kind that speaks for ``module``, or on whose type it is built though its forward
    is its own, or None."""
    found = next((kind for kind in KINDS if kind.matches(module)), None)
    if found is not None or type(module).__module__.startswith("bp_convert."):
        return found
    tried = (kind for kind in KINDS if kind.probed)
    return next((kind for kind in tried if isinstance(module, kind.dense)), None)


def relative_of(module: nn.Module) -> Kind | None:
    """Return the kind among whose types, and those alike, a module is, whatever its forward."""
    return next((one for one in KINDS if isinstance(module, (one.dense, *one.alike))), None)


def kind_of_either(module: nn.Module) -> Kind | None:
    """Return the kind of a layer or of a twin, or None."""
    return kind_of(module) or next((one for one in KINDS if type(module) is one.twin), None)


def is_twin(module: nn.Module) -> TypeGuard[Any]:
    """Return whether a module is the bilinear twin of some kind's layer."""
    return isinstance(module, tuple(kind.twin for kind in KINDS))


def table_rows(module: nn.Module) -> int | None:
    """Return how many rows a module looks indices up in; None where it does not. Attributes of a
    dense table may be stale, its tensor is not."""
    for kind in KINDS:
        if kind.lookup and isinstance(module, (kind.dense, *kind.alike)):
            table: Any = module.weight
            return int(table.shape[0])
        if kind.lookup and isinstance(module, kind.twin):
            return int(getattr(module, kind.fields[0]))
    return None


def uncounted(module: nn.Module) -> bool:
    """Return whether torch's counter sees nothing of a module's operations on a CPU."""
    return any(
        kind.uncounted and isinstance(module, (kind.dense, *kind.alike, kind.twin))
        for kind in KINDS
    )


def given_to(module: nn.Module) -> Callable[..., Any]:
    """Return what picks from a call's arguments, of a layer or its twin, what its kind looks at."""
    types = ((one, (one.dense, *one.alike, one.twin)) for one in KINDS)
    found = next((one for one, own in types if isinstance(module, own)), Kind())
    return found.given


def unseen_macs(module: nn.Module, shape: tuple[int, ...]) -> int:
    """Return the multiply-adds of a module's call that torch's counter never sees."""
    kind = next((one for one in KINDS if type(module) is one.dense), None)
    return 0 if kind is None else kind.unseen_macs(module, shape)


@contextmanager
def registered(kind: Kind) -> Iterator[None]:
    """Let one more kind be known for a while, such as one of a program's own."""
    KINDS.append(kind)
    try:
        yield
    finally:
        KINDS.remove(kind)
