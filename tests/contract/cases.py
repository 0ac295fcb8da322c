"""One small layer of each kind, with inputs, for the suite that every kind passes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from bp_convert.kinds import KINDS, Kind
from bp_convert.layers.recurrent_cells import BilinearCell


@dataclass(frozen=True)
class Case:
    """A dense layer, how to make it, and an input."""

    kind: str
    make: Callable[[], nn.Module]
    draw: Callable[[torch.dtype], Tensor]
    unsupported: Callable[[], nn.Module] | None = None
    word: str = ""
    note: str = ""

    def __str__(self) -> str:
        return f"{self.kind} {self.note}".strip()


def _floats(*shape: int) -> Callable[[torch.dtype], Tensor]:
    return lambda dtype: torch.randn(*shape, dtype=dtype)


def _attention() -> nn.Module:
    return nn.MultiheadAttention(24, 4, add_bias_kv=True, add_zero_attn=True, batch_first=True)


def _rebuilt() -> nn.Module:
    class Adapted(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + x

    module = _attention()
    module.out_proj = Adapted(24, 24)
    return module


CASES = (
    Case("Linear", lambda: nn.Linear(24, 36), _floats(5, 24)),
    Case(
        "Conv1d",
        lambda: nn.Conv1d(12, 16, 3, 2, 1),
        _floats(2, 12, 11),
        lambda: nn.Conv1d(12, 24, 3, groups=12),
        "depth-wise",
    ),
    Case(
        "Conv2d",
        lambda: nn.Conv2d(12, 16, (3, 1), 1, (1, 0), padding_mode="reflect"),
        _floats(2, 12, 7, 6),
        lambda: nn.Conv2d(12, 12, 3, groups=12),
        "depth-wise",
    ),
    Case(
        "Conv3d",
        lambda: nn.Conv3d(6, 8, (2, 3, 1), dilation=(1, 2, 1)),
        _floats(2, 6, 4, 7, 3),
        lambda: nn.Conv3d(6, 6, 1, groups=6),
        "depth-wise",
    ),
    Case(
        "Embedding",
        lambda: nn.Embedding(30, 24, padding_idx=3),
        lambda _: torch.arange(30).view(5, 6),
        lambda: nn.Embedding(30, 24, max_norm=1.0),
        "max_norm",
    ),
    Case(
        "LSTM",
        lambda: nn.LSTM(12, 16, 2, bidirectional=True, batch_first=True),
        _floats(3, 5, 12),
    ),
    Case("Conv1D", lambda: Conv1D(36, 24), _floats(5, 24)),
    Case(
        "ConvTranspose1d",
        lambda: nn.ConvTranspose1d(12, 16, 4, 2, 1, output_padding=1),
        _floats(2, 12, 7),
        lambda: nn.ConvTranspose1d(12, 12, 3, groups=12),
        "depth-wise",
    ),
    Case(
        "ConvTranspose2d",
        lambda: nn.ConvTranspose2d(12, 8, (3, 1), (2, 3), (1, 0), (1, 2)),
        _floats(2, 12, 4, 3),
    ),
    Case(
        "ConvTranspose3d",
        lambda: nn.ConvTranspose3d(6, 8, (2, 3, 1), dilation=(1, 2, 1)),
        _floats(2, 6, 3, 4, 2),
    ),
    Case("GRU", lambda: nn.GRU(12, 8, 2, bidirectional=True), _floats(5, 3, 12)),
    Case("RNN", lambda: nn.RNN(12, 8, 2, "relu", batch_first=True), _floats(3, 5, 12)),
    Case("LSTMCell", lambda: nn.LSTMCell(12, 16), _floats(3, 12)),
    Case("GRUCell", lambda: nn.GRUCell(12, 8), _floats(3, 12)),
    Case("RNNCell", lambda: nn.RNNCell(12, 8), _floats(3, 12)),
    Case(
        "EmbeddingBag",
        lambda: nn.EmbeddingBag(30, 24, mode="sum", padding_idx=3),
        lambda _: torch.arange(30).view(5, 6),
        lambda: nn.EmbeddingBag(30, 24, scale_grad_by_freq=True),
        "scale_grad_by_freq",
    ),
    Case(
        "MultiheadAttention",
        _attention,
        _floats(3, 5, 24),
        _rebuilt,
        "its out_proj",
    ),
    Case("Bilinear", lambda: nn.Bilinear(6, 4, 8), _floats(5, 6)),
)

# The same kinds otherwise: groups hold factors of their own, a projection has some as well.
VARIANTS = (
    Case("Conv1d", lambda: nn.Conv1d(12, 18, 4, 2, 1, groups=3), _floats(2, 12, 11), note="groups"),
    Case(
        "Conv2d",
        lambda: nn.Conv2d(12, 8, (3, 2), groups=2, padding_mode="circular", padding=(1, 0)),
        _floats(2, 12, 7, 6),
        note="groups",
    ),
    Case("Conv3d", lambda: nn.Conv3d(8, 12, 1, groups=2), _floats(2, 8, 4, 3, 3), note="groups"),
    Case(
        "ConvTranspose2d",
        lambda: nn.ConvTranspose2d(12, 8, 3, 2, groups=2),
        _floats(2, 12, 4, 3),
        note="groups",
    ),
    Case(
        "LSTM",
        lambda: nn.LSTM(12, 16, bidirectional=True, proj_size=6),
        _floats(5, 3, 12),
        note="projected",
    ),
    Case(
        "EmbeddingBag",
        lambda: nn.EmbeddingBag(30, 24, mode="mean", padding_idx=3),
        lambda _: torch.arange(30).view(5, 6),
        note="mean",
    ),
    Case(
        "EmbeddingBag",
        lambda: nn.EmbeddingBag(30, 24, mode="max"),
        lambda _: torch.arange(30).view(15, 2),
        note="max",
    ),
)


def kind(case: Case) -> Kind:
    """Return the kind of a case."""
    return next(one for one in KINDS if one.name == case.kind)


def call_shape(case: Case, x: Tensor) -> tuple[int, ...]:
    """Return what the costs of a call on ``x`` hang on."""
    return kind(case).call_shape(case.make(), arguments(case.make(), x), {}) or tuple(x.shape)


def given(case: Case, x: Tensor) -> Any:
    """Return what ``rows`` wants of a call on ``x``."""
    return kind(case).given(arguments(case.make(), x), {})


def output(layer: nn.Module, x: Tensor) -> Tensor:
    """Return a layer's main output; of a cell, that of a second step."""
    y = layer(*arguments(layer, x))
    return main(layer(x, y) if isinstance(layer, nn.RNNCellBase | BilinearCell) else y)


def arguments(layer: Any, x: Tensor) -> tuple[Tensor, ...]:
    """Return what a layer is called on: its input, several times where it takes more, or a second
    one that is made of it."""
    if not hasattr(layer, "in2_features"):
        return (x,) * (3 if hasattr(layer, "num_heads") else 1)
    steps = torch.arange(1, 1 + layer.in2_features, dtype=x.dtype, device=x.device)
    return x, (x.mean(-1, keepdim=True) * steps).sin()


def main(y: Any) -> Tensor:
    """Return the main one of what a layer puts out."""
    found: Tensor = y[0] if isinstance(y, tuple) else y
    return found
