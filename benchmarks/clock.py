"""Interleaved timing, and the line that names the machine."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch

from bp_convert import provenance


def interleaved(
    passes: Sequence[Callable[[], Any]],
    repeats: int = 15,
    warm_up: int = 3,
    device: str = "cpu",
) -> list[float]:
    """Return each pass's median in microseconds; the passes take turns, so that a machine whose
    speed drifts treats them alike, in an order drawn anew each time, as each finds in the caches
    what the one before left."""
    clock = _on_cuda if device.startswith("cuda") else _on_cpu
    for one in passes:
        for _ in range(warm_up):
            one()
    times: list[list[float]] = [[] for _ in passes]
    turns, order = list(zip(passes, times, strict=True)), random.Random(0)
    for _ in range(repeats):
        order.shuffle(turns)
        for one, taken in turns:
            taken.append(clock(one))
    return [median(taken) for taken in times]


def _on_cpu(one: Callable[[], Any]) -> float:
    # One thread's own time does not see what its neighbours do.
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    start = clock()
    one()
    return 1e6 * (clock() - start)


def _on_cuda(one: Callable[[], Any], times: int = 5) -> float:
    """Time several passes between two events of the device, so that launching them is hidden."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(times):
        one()
    end.record()
    torch.cuda.synchronize()
    return 1e3 * start.elapsed_time(end) / times


def machine(device: str = "cpu") -> str:
    """Name the CPU or the CUDA device, the threads and torch's version."""
    if device.startswith("cuda"):
        return f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}"
    return f"{provenance.machine()}, torch {torch.__version__}"
