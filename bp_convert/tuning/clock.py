"""Calls timed in turn, so that a machine whose speed drifts treats them alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Any

import torch

REPEATS = 15
BUDGET_S = 20.0  # per batch size, warm-up excluded
WARM_UP = 3
CPU = torch.device("cpu")


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


def own_time(device: torch.device) -> float:
    """Return seconds by a clock that waits for the device; one thread's own time on a CPU, which
    does not see what its neighbours do."""
    if device.type == "cpu" and torch.get_num_threads() == 1:
        return time.thread_time()
    _wait(device)
    return time.perf_counter()


@contextmanager
def threads(count: int | None) -> Iterator[None]:
    """Let torch run on so many threads for a while; None leaves it as it is."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _timed(one: Callable[[], Any], device: torch.device) -> float:
    _wait(device)
    start = time.perf_counter()
    one()
    _wait(device)
    return 1e3 * (time.perf_counter() - start)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _spread(values: Sequence[float]) -> float:
    """Return the distance between the quartiles."""
    if len(values) < 2:
        return 0.0
    low, _, high = quantiles(values, n=4)
    return high - low
