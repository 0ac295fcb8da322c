"""Latency and memory, measured: dense and converted in turn, in one run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import nn

from bp_convert.counting import count_bytes
from bp_convert.graph.example import make_inputs
from bp_convert.graph.running import evaluating, quiet_forward
from bp_convert.torch_private import memory_events
from bp_convert.tuning.clock import WARM_UP, in_turn
from bp_convert.values.report import Latency
from bp_convert.values.tensors import TensorSpec
from bp_convert.ways.expanding import kept_bytes


def measure(
    dense: nn.Module,
    converted: nn.Module,
    inputs: Sequence[TensorSpec],
    *,
    batch: int,
    device: torch.device | str = "cpu",
) -> Latency:
    """Time one forward pass of each model in eval mode, interleaved; report medians in ms.

    Peak memory is the weights, those that expanded layers keep included, and the most that one
    pass holds besides: the allocator's count on CUDA, the profiler's on a CPU.

    Args:
        batch: examples in one pass.
    """
    on = torch.device(device)
    passes: list[partial[Any]] = []
    for model in (dense, converted):
        model = evaluating(model.to(on))
        args, kwargs = make_inputs(model, inputs, batch=batch, device=on)
        passes.append(partial(model, *args, **kwargs))
    peaks: list[int | None] = []
    with torch.no_grad(), quiet_forward():
        for one in passes:
            for _ in range(WARM_UP):
                one()
            peaks.append(_peak(one, on))
        old, new = in_turn(passes, on)
    return Latency(
        batch=batch,
        dense_ms=old.middle,
        converted_ms=new.middle,
        dense_spread_ms=old.spread,
        converted_spread_ms=new.spread,
        repeats=old.count,
        device=_device_name(on),
        threads=torch.get_num_threads(),
        dense_peak_bytes=peaks[0],
        converted_peak_bytes=peaks[1],
    )


def _peak(one: partial[Any], device: torch.device) -> int | None:
    """Return the bytes of the model's weights and of what one pass holds at most besides."""
    model: Any = one.func
    weights = count_bytes(model).after + kept_bytes(model)
    if device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        one()
        return weights + torch.cuda.max_memory_allocated(device) - before
    return weights + peak_of_pass(one) if device.type == "cpu" else None


def peak_of_pass(one: Callable[[], Any]) -> int:
    """Return the most bytes that a pass on the CPU has allocated at once."""
    return max(accumulate(memory_events(one), initial=0))


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return "CPU" if device.type == "cpu" else str(device)
