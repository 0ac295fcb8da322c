"""Compare bilinear LSTMs, GRUs, RNNs with torch's, and the rule that picks a path with the clock.

    python benchmarks/recurrent.py [LSTM|GRU|RNN_TANH] [--train] [--threads N] [--fit]

Prints how many times faster than torch's layer each path and the default are (above 1 is faster).
The least of several interleaved passes stands for each, as a shared machine only ever adds. With
--fit the prices of ``bp_convert/recurrence/path_cost.py`` are fitted to this machine and printed.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent.parent))
from benchmarks.clock import machine
from bp_convert.layers import BPGRU, BPLSTM, BPRNN
from bp_convert.layers.recurrent_stack import RecurrentStack
from bp_convert.recurrence import path_cost
from bp_convert.tuning.price_fit import prices

LAYERS: dict[str, type[RecurrentStack]] = {"LSTM": BPLSTM, "GRU": BPGRU, "RNN_TANH": BPRNN}
SIZES = ((32, 64), (128, 128), (256, 256), (512, 512), (256, 1000))
BATCHES = (1, 8, 32)
STEPS = (5, 20, 100)
RANKS = (1, 8)
SLACK = 1.1  # a pick within this of the faster path is no mistake

Row = tuple[RecurrentStack, int, int, dict[str, float]]


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("mode", nargs="?", default="LSTM", choices=LAYERS)
    options.add_argument("--train", action="store_true", help="time forward and backward")
    options.add_argument("--fit", action="store_true", help="fit the prices of the rule")
    options.add_argument("--threads", type=int, default=1)
    given = options.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(given.threads)
    print(machine(), "training" if given.train else "inference", sep=", ")
    kind = LAYERS[given.mode]
    print("input hidden batch steps terms |   dense us | default factored fused | rule")
    rows = []
    for (inputs, hidden), batch, steps, rank in product(SIZES, BATCHES, STEPS, RANKS):
        if hidden * batch * steps > 1000 * 32 * 20:
            continue
        layer = kind(inputs, hidden, rank=rank).train(given.train)
        times = timed(kind.DENSE(inputs, hidden).train(given.train), layer, batch, steps)
        rows.append((layer, steps, batch, times))
        _print(*rows[-1])
    _judge(rows)
    if given.fit:
        for side in ("factored", "fused"):
            print(side, {name: float(f"{x:.2g}") for name, x in fit(rows, side).items()})


def timed(dense: nn.Module, layer: RecurrentStack, batch: int, steps: int) -> dict[str, float]:
    """Return the least microseconds of one call: dense, default, and either path forced."""
    x = torch.randn(steps, batch, layer.input_size)
    forced = {factored: _force(copy.deepcopy(layer), factored) for factored in (True, False)}
    passes: dict[str, Callable[[], None]] = {
        "dense": lambda: _call(dense, x),
        "default": lambda: _call(layer, x),
        "factored": lambda: _call(forced[True], x),
        "fused": lambda: _call(forced[False], x),
    }
    times: dict[str, list[float]] = {name: [] for name in passes}
    # One thread's own time does not see what its neighbours do.
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    repeats = 4 if layer.hidden_size > 500 else 9
    for turn in range(repeats + 2):
        for name, one in passes.items():
            one()  # so that none pays for the caches that another has filled
            start = clock()
            one()
            if turn >= 2:
                times[name].append(1e6 * (clock() - start))
    return {name: min(taken) for name, taken in times.items()}


def _call(module: nn.Module, x: Tensor) -> None:
    with torch.set_grad_enabled(module.training):
        y = module(x)[0]
        if module.training:
            y.sum().backward()


def _force(layer: RecurrentStack, factored: bool) -> RecurrentStack:
    layer._factored = lambda *_: factored  # type: ignore[method-assign]
    return layer


def _print(layer: RecurrentStack, steps: int, batch: int, times: dict[str, float]) -> None:
    rank = layer.factors["hh_l0"].rank
    told = path_cost.prefers_factored(layer.factors, steps, batch, layer.mode)
    ratios = "   ".join(
        f"{times['dense'] / times[n]:6.2f}" for n in ("default", "factored", "fused")
    )
    print(
        f"{layer.input_size:5} {layer.hidden_size:6} {batch:5} {steps:5} {rank:5} |"
        f" {times['dense']:10.0f} | {ratios} | {'factored' if told else 'fused'}",
        flush=True,
    )


def _judge(rows: list[Row]) -> None:
    wrong = 0
    for layer, steps, batch, times in rows:
        told = path_cost.prefers_factored(layer.factors, steps, batch, layer.mode)
        taken, other = ("factored", "fused") if told else ("fused", "factored")
        wrong += times[taken] > SLACK * times[other]
    print(f"{len(rows)} cases, {wrong} where the rule picks a path more than 10 % slower")


def fit(rows: list[Row], side: str) -> dict[str, float]:
    """Return the prices of one path."""
    count = path_cost.loop_counts if side == "factored" else path_cost.fused_counts
    return prices(
        [
            (count(one, steps, batch), times[side])
            for layer, steps, batch, times in rows
            for one in path_cost.levels(layer.factors, layer.mode)
        ]
    )


if __name__ == "__main__":
    main()
