"""A moving average of the weights."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from bp_convert.training.engine import as_shard


class Average:
    """The exponential moving average of a model's parameters; buffers are taken as they are.

    Args:
        decay: share that the average keeps in each step.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self._live = nn.ParameterList(p for p in model.parameters() if p.requires_grad)
        self._kept: Any = AveragedModel(
            self._live,
            multi_avg_fn=get_ema_multi_avg_fn(decay),  # type: ignore[no-untyped-call]
        )
        self._kept.n_averaged.fill_(1)  # it starts from these weights, not from the next

    def update(self) -> None:
        """Take the weights of a step in."""
        self._kept.update_parameters(self._live)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Let the model have the average inside ``with``."""
        before = [p.detach().clone() for p in self._live]
        self.put()
        try:
            yield
        finally:
            _copy(before, self._live)

    def put(self) -> None:
        """Let the model have the average for good."""
        _copy(self.tensors, self._live)

    @property
    def tensors(self) -> list[Tensor]:
        """The averages."""
        return [one.detach() for one in self._kept.parameters()]

    def load(self, state: list[Tensor]) -> None:
        """Put averages back that were copied whole."""
        _copy(map(as_shard, state, self.tensors), self.tensors)


@torch.no_grad()
def _copy(values: Iterable[Tensor], places: Iterable[Tensor]) -> None:
    for value, place in zip(values, places, strict=True):
        place.copy_(value)
