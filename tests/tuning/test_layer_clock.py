from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from bp_convert.tuning import layer_clock
from bp_convert.tuning.layer_clock import WHOLE, Subject, time_models
from bp_convert.tuning.machine_table import Host


class _Timed(nn.Module):
    """A layer that takes some made-up time, on a clock of the test."""

    def __init__(self, clock: list[float], seconds: float) -> None:
        super().__init__()
        self.clock = clock
        self.seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        self.clock[0] += self.seconds
        return x


def test_layers_and_the_whole_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(layer_clock, "own_time", lambda device: clock[0])
    model = nn.Sequential(_Timed(clock, 2e-3), _Timed(clock, 1e-3), _Timed(clock, 5e-3))
    model.append(model[0])  # is called twice
    fast = nn.Sequential(_Timed(clock, 1e-3))
    subjects = [Subject(lambda: model, ("0", "2")), Subject(lambda: fast, ("0", "absent"))]
    slow, quick = time_models(subjects, lambda _: ((torch.zeros(1),), {}), Host())
    assert slow == pytest.approx({WHOLE: 10e3, "0": 4e3, "2": 5e3})
    assert quick == pytest.approx({WHOLE: 1e3, "0": 1e3})
    assert not any(one._forward_hooks or one._forward_pre_hooks for one in model.modules())


def test_layers_take_no_more_than_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Watching them costs time, too."""
    clock = [0.0]

    def reading(device: torch.device) -> float:
        clock[0] += 1e-3
        return clock[0]

    monkeypatch.setattr(layer_clock, "own_time", reading)
    model = nn.Sequential(*(_Timed(clock, 1e-3) for _ in range(4)))
    (found,) = time_models(
        [Subject(lambda: model, ("0", "1", "2", "3"))], lambda _: ((torch.zeros(1),), {}), Host()
    )
    assert sum(found[name] for name in "0123") <= found[WHOLE] * (1 + 1e-9)
