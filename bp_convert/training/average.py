"""A moving average of the weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import get_ema_multi_avg_fn

from bp_convert.training.engine import as_shard


class Average:
    """The exponential moving average of a model's parameters; buffers are taken as they are.

    Args:
        decay: share that the average keeps in each step.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._values: list[Tensor] = [p.detach().clone() for p in self._parameters]
        self._step: Any = get_ema_multi_avg_fn(decay)  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def update(self) -> None:
        """Take the weights of a step in."""
        self._step(self._values, [p.detach() for p in self._parameters], None)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Let the model have the average inside ``with``."""
        kept = [p.detach().clone() for p in self._parameters]
        self._put(self._values)
        try:
            yield
        finally:
            self._put(kept)

    def put(self) -> None:
        """Let the model have the average for good."""
        self._put(self._values)

    @property
    def held(self) -> int:
        """Bytes of the averages."""
        return sum(one.numel() * one.element_size() for one in self._values)

    @torch.no_grad()
    def _put(self, values: list[Tensor]) -> None:
        for parameter, value in zip(self._parameters, values, strict=True):
            parameter.copy_(value)

    def state(self) -> list[Tensor]:
        """Return copies of the averages, on the CPU and whole."""
        whole = [v.full_tensor() if isinstance(v, DTensor) else v for v in self._values]
        return [one.detach().cpu().clone() for one in whole]

    @torch.no_grad()
    def load(self, state: list[Tensor]) -> None:
        """Put averages back."""
        for mine, value in zip(self._values, state, strict=True):
            mine.copy_(as_shard(value, mine))
