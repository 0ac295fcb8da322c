"""Steps of Adam on one segment, judged on examples that are held out, never kept where worse."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from bp_convert.reconstruction.bench import Bench
from bp_convert.reconstruction.gap import relative

RATES = (5e-4, 2e-3)  # that are tried where none is given
TRIAL = 0.15  # share of the epochs on which a rate is judged
PATIENCE = 5  # epochs without a lower error, after which it stops
CLIP = 1.0  # largest norm of the gradient


@dataclass
class Tuned:
    """What became of a segment.

    Attributes:
        before, after: its relative error on what is held out.
        rate: of learning that was taken.
        epochs: that were run, trials left out.
    """

    before: float
    after: float
    rate: float = 0.0
    epochs: int = 0


@dataclass
class _Descent:
    """A course of Adam, which can be gone on with."""

    bench: Bench
    parameters: Sequence[nn.Parameter]
    rate: float
    learnt: Sequence[int]
    held: Sequence[int]
    epochs: int
    seed: int
    ticked: Callable[[], None]
    done: int = 0
    best: float = math.inf
    weights: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.optimizer = torch.optim.Adam(self.parameters, self.rate)
        self.now = [one.detach().clone() for one in self.parameters]

    def go(self, until: int) -> None:
        """Go on to an epoch, or until nothing gets better or the error is no number."""
        put(self.parameters, self.now)
        stale = 0
        while self.done < until and stale < PATIENCE:
            generator = torch.Generator().manual_seed(self.seed + self.done)
            order = torch.randperm(len(self.learnt), generator=generator).tolist()
            for at, place in enumerate(order):
                self._step(self.learnt[place], (self.done + at / len(order)) / self.epochs)
            self.done += 1
            self.ticked()
            error = self.bench.error(self.held)
            stale += 1
            if error < self.best:
                self.best, stale = error, 0
                self.weights = [one.detach().clone() for one in self.parameters]
            if not math.isfinite(error):
                break
        self.now = [one.detach().clone() for one in self.parameters]

    def _step(self, number: int, done: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate * 0.5 * (1 + math.cos(math.pi * done))
        self.optimizer.zero_grad()
        with torch.enable_grad():
            loss = relative(*self.bench.squares(number))
            torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(self.parameters, CLIP)
        self.optimizer.step()


def tune(
    bench: Bench,
    parameters: Sequence[nn.Parameter],
    learnt: Sequence[int],
    held: Sequence[int],
    *,
    epochs: int,
    rate: float | None,
    seed: int,
    ticked: Callable[[], None],
) -> Tuned:
    """Tune parameters in place to the least error on what is held out; they stay as they are
    where nothing is less than their own.

    Args:
        learnt, held: numbers of the batches that are learnt, and that judge.
        rate: of learning; None tries some and goes on with the best.
        ticked: called after each epoch.
    """
    start = [one.detach().clone() for one in parameters]
    before = bench.error(held)
    rates = RATES if rate is None else (rate,)
    runs = [_Descent(bench, parameters, one, learnt, held, epochs, seed, ticked) for one in rates]
    trial = max(1, round(TRIAL * epochs)) if len(runs) > 1 else 0
    for run in runs:
        put(parameters, start)
        run.go(trial)
    best = min(runs, key=lambda run: run.best)
    best.go(epochs)
    better = best.best < before
    put(parameters, best.weights if better else start)
    return Tuned(before, best.best if better else before, best.rate, best.done)


@torch.no_grad()
def put(parameters: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Set parameters to values."""
    for one, value in zip(parameters, values, strict=True):
        one.copy_(value)
