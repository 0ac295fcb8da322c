"""A moving average of the weights."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
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
        _copy(self._kept.parameters(), self._live)

    @property
    def held(self) -> int:
        """Bytes of the averages."""
        return sum(one.numel() * one.element_size() for one in self._kept.parameters())

    def state(self) -> list[Tensor]:
        """Return copies of the averages, on the CPU and whole."""
        kept = [one.detach() for one in self._kept.parameters()]
        return [(v.full_tensor() if isinstance(v, DTensor) else v).cpu().clone() for v in kept]

    def load(self, state: list[Tensor]) -> None:
        """Put averages back."""
        kept = list(self._kept.parameters())
        _copy((as_shard(one, like) for one, like in zip(state, kept, strict=True)), kept)


@torch.no_grad()
def _copy(values: Iterable[Tensor], places: Iterable[Tensor]) -> None:
    for value, place in zip(values, places, strict=True):
        place.copy_(value)
