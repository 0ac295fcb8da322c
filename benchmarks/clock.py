"""Interleaved timing, prices fitted to it, and the line that names the machine."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

import numpy as np
import torch
from scipy.optimize import nnls

from bp_convert import provenance


def interleaved(
    passes: Sequence[Callable[[], Any]],
    repeats: int = 15,
    warm_up: int = 3,
    device: str = "cpu",
) -> list[float]:
    """Return each pass's median in microseconds; the passes take turns, so that a machine whose
    speed drifts treats them alike."""
    clock = _on_cuda if device.startswith("cuda") else _on_cpu
    for one in passes:
        for _ in range(warm_up):
            one()
    times: list[list[float]] = [[] for _ in passes]
    for _ in range(repeats):
        for one, taken in zip(passes, times, strict=True):
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


def prices(samples: Sequence[tuple[Mapping[str, float], float]]) -> dict[str, float]:
    """Fit a price above 0 to each thing that is counted, by least squares of relative errors.

    Args:
        samples: counts, and the time that they took together.
    """
    names = sorted({name for counted, _ in samples for name in counted})
    table = np.array([[counted.get(n, 0.0) / taken for n in names] for counted, taken in samples])
    scale = np.linalg.norm(table, axis=0).clip(min=1e-30)
    found, _ = nnls(table / scale, np.ones(len(samples)))
    return {name: float(one) for name, one in zip(names, found / scale, strict=True) if one > 0}


def machine(device: str = "cpu") -> str:
    """Name the CPU or the CUDA device, the threads and torch's version."""
    if device.startswith("cuda"):
        return f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}"
    return f"{provenance.machine()}, torch {torch.__version__}"
