"""Latency and memory, measured: dense and converted in turn, in one run."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from statistics import median, quantiles
from typing import Any

import torch
from torch import nn

from bp_convert.counting import count_bytes
from bp_convert.graph.example import make_inputs
from bp_convert.graph.running import evaluating, quiet_forward
from bp_convert.torch_private import memory_events
from bp_convert.values.report import Latency
from bp_convert.values.tensors import TensorSpec

REPEATS = 15
BUDGET_S = 20.0  # per batch size, warm-up excluded
WARM_UP = 3
CPU = torch.device("cpu")


def measure(
    dense: nn.Module,
    converted: nn.Module,
    inputs: Sequence[TensorSpec],
    *,
    batch: int,
    device: torch.device | str = "cpu",
) -> Latency:
    """Time one forward pass of each model in eval mode, interleaved; report medians in ms.

    Peak memory is the weights and the most that one pass holds besides: the allocator's count on
    CUDA, the profiler's on a CPU.

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


@dataclass(frozen=True)
class Times:
    """Milliseconds that calls took: their lower quartile, their median, the distance between the
    quartiles, how many they were."""

    low: float
    middle: float
    spread: float
    count: int


def in_turn(
    passes: Sequence[Callable[[], Any]],
    device: torch.device = CPU,
    *,
    repeats: int = REPEATS,
    seconds: float = BUDGET_S,
) -> list[Times]:
    """Time calls that take turns, so that a machine whose speed drifts treats them alike.

    Args:
        seconds: after which no more turns are taken; three are at least.
    """
    times: list[list[float]] = [[] for _ in passes]
    start = time.perf_counter()
    while len(times[0]) < repeats and (
        len(times[0]) < WARM_UP or time.perf_counter() - start < seconds
    ):
        for one, taken in zip(passes, times, strict=True):
            taken.append(_timed(one, device))
    return [
        Times(quantiles(taken, n=4)[0], median(taken), _spread(taken), len(taken))
        for taken in times
    ]


def _timed(one: Callable[[], Any], device: torch.device) -> float:
    _wait(device)
    start = time.perf_counter()
    one()
    _wait(device)
    return 1e3 * (time.perf_counter() - start)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _peak(one: partial[Any], device: torch.device) -> int | None:
    """Return the bytes of the model's weights and of what one pass holds at most besides."""
    model: Any = one.func
    weights = count_bytes(model).after
    if device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        one()
        return weights + torch.cuda.max_memory_allocated(device) - before
    return weights + peak_of_pass(one) if device.type == "cpu" else None


def peak_of_pass(one: Callable[[], Any]) -> int:
    """Return the most bytes that a pass on the CPU has allocated at once."""
    return max(accumulate(memory_events(one), initial=0))


def _spread(values: Sequence[float]) -> float:
    """Return the distance between the quartiles."""
    if len(values) < 2:
        return 0.0
    low, _, high = quantiles(values, n=4)
    return high - low


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return "CPU" if device.type == "cpu" else str(device)
