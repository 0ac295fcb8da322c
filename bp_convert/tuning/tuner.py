"""The prices of a machine measured: layers over a grid of shapes, dense and on factors, in turn."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import mean, median, quantiles
from typing import Any

import torch
from torch import Tensor, nn

from bp_convert.errors import PlanError
from bp_convert.graph.running import same_draws
from bp_convert.kinds import kind_of
from bp_convert.prices import ALIGNED, Counts, shipped
from bp_convert.tuning.clock import own_time, threads
from bp_convert.tuning.fused_prices import Clock, fused_prices
from bp_convert.tuning.layer_grid import GridCase, factorings, grid
from bp_convert.tuning.machine_table import Host, MachineTable, write_table
from bp_convert.tuning.price_fit import Sample, fit, off, scaled
from bp_convert.values.progress import Progress, told

SECONDS = 90.0  # after which no further layer is timed
REPEATS = 9
EACH = 0.25  # seconds for one layer and its factorings, after which three turns are enough
FEW = 3
ENOUGH = (
    12  # samples of a family of kinds, below which its prices are the shipped ones at this scale
)

WIDE = ((768, 768, 197), (2048, 512, 32), (768, 3072, 128), (512, 2048, 64))  # and rows
EVEN, ODD = 64, (61, 62, 63)  # inner widths to compare
INNER = (*ODD, EVEN, EVEN + 8)
GAIN = 0.05  # of the time, from which on a multiple is worth its while


def tune(
    *,
    device: str = "cpu",
    threads: int | None = None,
    dtype: str = "float32",
    progress: Progress | bool | None = None,
) -> MachineTable:
    """Measure how fast layers run here, dense and bilinear, and keep it for later plans.

    Takes a minute and a half. What is measured is kept in the cache folder by device, threads,
    dtype and torch's version; every later plan for them on this machine goes by it.

    Args:
        device: ``cpu`` or ``cuda``.
        threads: of torch; None takes those that it has.
        dtype: floating type of the weights.
        progress: called with words, steps done and their number; True draws a bar.

    Returns:
        The prices, and how far off they are.

    Raises:
        PlanError: a device that is not there, or another type.
    """
    host = Host(device, threads or torch.get_num_threads(), dtype)
    check_host(host)
    with told(progress) as tell:
        table = measured(host, tell)
    write_table(table)
    return table


def check_host(host: Host) -> None:
    """Check that layers can run at a host.

    Raises:
        PlanError: a device that is not there, or another type.
    """
    kind, _, number = host.device.partition(":")
    known = kind == "cpu" or (kind == "cuda" and int(number or 0) < torch.cuda.device_count())
    found: Any = getattr(torch, host.dtype, None)
    if not known or not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise PlanError(
            where=f"device {host.device}, dtype {host.dtype}",
            found="nothing that layers can be timed on here",
            allowed="cpu, or a CUDA device that torch finds; float32, bfloat16, float16, float64",
            fix="leave them out to time float32 on the CPU",
        )


def measured(
    host: Host,
    progress: Progress,
    *,
    cases: Sequence[GridCase] | None = None,
    seconds: float = SECONDS,
    clock: Clock | None = None,
) -> MachineTable:
    """Return the prices of a host.

    Args:
        cases: layers to time; None takes the grid.
        seconds: after which no further layer is timed.
        clock: times calls in turn, in microseconds.
    """
    cases = grid() if cases is None else cases
    start = time.perf_counter()
    samples: list[Sample] = []
    with threads(host.threads), torch.no_grad(), same_draws():
        for done, case in enumerate(cases):
            spent = time.perf_counter() - start
            if spent > seconds:
                break
            progress("timing layers", done, len(cases))
            samples += timed(case, host, clock or lows)
    progress("timing layers", len(cases), len(cases))
    counts: dict[str, int] = {}
    for one in samples:
        counts[one.family] = counts.get(one.family, 0) + 1
    enough = [one for one in samples if counts[one.family] >= ENOUGH]
    found = scaled(shipped(), samples) | fit(enough)
    if samples:
        with threads(host.threads), torch.no_grad(), same_draws():
            found |= aligned(host, clock or lows)
            if host.device != "cpu":
                device, dtype = torch.device(host.device), getattr(torch, host.dtype)
                found |= fused_prices(device, dtype, clock or lows)
    took = time.perf_counter() - start
    return MachineTable(host, found, off(found, samples), took)


def timed(case: GridCase, host: Host, clock: Clock) -> list[Sample]:
    """Time one layer, dense and on several factorings, all in turn."""
    device, dtype = torch.device(host.device), getattr(torch, host.dtype)
    module: Any = case.make().to(device, dtype).eval()
    kind = kind_of(module)
    if kind is None:
        return []
    widths = kind.widths(module)
    tries = factorings(kind, module, widths)
    twins: list[nn.Module] = [
        kind.build(module, widths, factors, device).eval() for factors in tries
    ]
    x = _input(case, device, dtype, rows=module.num_embeddings if kind.lookup else None)
    dense, *others = clock([partial(one, x) for one in (module, *twins)], device)
    found = []
    for factors, taken in zip(tries, others, strict=True):
        counts = kind.operations(module, widths, factors, case.shape)
        if counts is not None:
            words = f"{module} {case.shape} {', '.join(map(str, factors.values()))}"
            found.append(Sample(kind.name, (dense, taken), counts, words))
    return found


def aligned(host: Host, clock: Clock) -> dict[str, Counts]:
    """Return the step of inner widths at which layers of low rank are faster; nothing where no
    step gains more than ``GAIN``."""
    device, dtype = torch.device(host.device), getattr(torch, host.dtype)
    gains, eighths = [], []
    for inputs, outputs, rows in WIDE:
        x = torch.randn(rows, inputs, device=device, dtype=dtype)
        layers = [
            nn.Sequential(nn.Linear(inputs, inner, bias=False), nn.Linear(inner, outputs))
            for inner in INNER
        ]
        times = clock([partial(one.to(device, dtype), x) for one in layers], device)
        taken = dict(zip(INNER, times, strict=True))
        gains.append(mean(taken[one] for one in ODD) / taken[EVEN])
        eighths.append(taken[EVEN + 8] * EVEN / (EVEN + 8) / taken[EVEN])
    if median(gains) < 1 + GAIN:
        return {}
    step = 8 if median(eighths) < 1 + GAIN else 16
    return {ALIGNED: {"step": float(step), "gain": median(gains) - 1}}


def lows(passes: Sequence[Callable[[], Any]], device: torch.device) -> list[float]:
    """Return the lower quartile of each call's microseconds; the calls take turns."""
    for one in passes:
        one()
    times: list[list[float]] = [[] for _ in passes]
    start = time.perf_counter()
    while len(times[0]) < REPEATS and (len(times[0]) < FEW or time.perf_counter() - start < EACH):
        for one, taken in zip(passes, times, strict=True):
            before = own_time(device)
            one()
            taken.append(1e6 * (own_time(device) - before))
    return [max(1e-3, quantiles(taken, n=4)[0]) for taken in times]


def _input(case: GridCase, device: torch.device, dtype: torch.dtype, *, rows: int | None) -> Tensor:
    if rows is not None:  # of a table, not one of them over and over
        return torch.randint(rows, case.shape, device=device)
    return torch.randn(case.shape, device=device, dtype=dtype)
