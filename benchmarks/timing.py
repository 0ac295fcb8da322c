"""Interleaved timing, and the line that names the machine."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch


def interleaved(
    passes: Sequence[Callable[[], Any]], repeats: int = 15, warm_up: int = 3
) -> list[float]:
    """Return each pass's median in microseconds; the passes take turns, so that a machine whose
    speed drifts treats them alike."""
    for one in passes:
        for _ in range(warm_up):
            one()
    times: list[list[float]] = [[] for _ in passes]
    for _ in range(repeats):
        for one, taken in zip(passes, times, strict=True):
            start = time.perf_counter()
            one()
            taken.append(1e6 * (time.perf_counter() - start))
    return [median(taken) for taken in times]


def machine() -> str:
    """Name the CPU, the threads and torch's version."""
    name = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [
            line.split(":")[1].strip()
            for line in info.read_text().splitlines()
            if "model name" in line
        ]
        name = names[0] if names else name
    return f"{name}, {torch.get_num_threads()} threads, torch {torch.__version__}"
