"""Latency and memory are measured, in turn, and said in words."""

from __future__ import annotations

import torch
from torch import nn

from bp_convert.costs import measure
from bp_convert.values.tensors import TensorSpec


class Wide(nn.Module):
    """Holds one intermediate of N x 100,000 floats."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x.repeat(1, 100_000) * self.scale).sum(1)


class Narrow(Wide):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sum(1) * self.scale


def test_time_and_peak_memory_on_the_cpu() -> None:
    one = measure(Wide(), Narrow(), (TensorSpec(shape=(1,)),), batch=8)
    assert one.device == "CPU"
    assert one.threads == 1
    assert one.repeats >= 3
    assert one.dense_peak_bytes is not None
    assert one.converted_peak_bytes is not None
    assert 3_200_000 <= one.dense_peak_bytes < 10_000_000  # 8 x 100,000 floats, and the product
    assert one.converted_peak_bytes < 10_000
    assert one.speedup > 1


def test_the_modes_of_the_models_do_not_matter() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)).train()
    one = measure(model, model, (TensorSpec(shape=(4,)),), batch=2)
    assert one.dense_ms > 0
    assert one.converted_spread_ms >= 0
