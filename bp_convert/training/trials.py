"""Short runs from the same start, before the real one: which rate is best, how long a step takes.

Whatever they change is put back, so that the real run is the one that it would have been with the
rate and the number of steps given.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from bp_convert.errors import TrainingError
from bp_convert.randomness import random_state, set_random_state
from bp_convert.training.loop import Loop, State
from bp_convert.training.optimizers import PLAIN, make_schedule, set_rate
from bp_convert.training.run_log import RunLog
from bp_convert.training.trouble import Watchdog
from bp_convert.values.progress import unheard

RATES = (1e-4, 3e-4, 1e-3, 3e-3)
LONG = 200  # steps of a run, from which on rates are tried
SHARE = 0.15  # of its steps that all trials take about, judging them included
JUDGING = 0.5  # what a pass of the validation takes, as a share of a step's
FEWEST, MOST = 10, 40  # steps of a trial
TIMED = 3  # steps that are timed, after one to warm up


@dataclass
class ShortRuns:
    """Short runs before a run that is about to start.

    Args:
        loop: the run; its schedule is of another rate and length yet.
        fresh: its optimiser's state when it was made.
        began: time of a clock, from which its minutes count.
    """

    loop: Loop
    fresh: dict[str, Any]
    began: float

    def settle(self, steps: int | None, rate: float | None) -> None:
        """Let the run have its number of steps and its rate.

        Args:
            steps: None for as many as fit into its minutes.
            rate: None for the one that is best of those tried, where the run is long enough.
        """
        loop, start = self.loop, time.monotonic()
        each = (0.0, 0.0)
        if steps is None:
            loop.log.say("timing a step", 0, 1)
            each = self._seconds()
        tried = () if rate is not None else self._tried(steps or self._fitting(*each))
        if tried:
            rate = _best(tried)
        if "_start" in vars(self):
            self._put_back()
        self.begin(steps or self._fitting(*each), PLAIN if rate is None else rate)
        loop.state.tried = tried
        loop.state.seconds = time.monotonic() - start

    def begin(self, steps: int, rate: float) -> None:
        """Let the run, or what goes on with it, have a number of steps and a rate."""
        self.loop.steps, self.loop.state.lr = steps, rate
        self.loop.schedule = self._schedule(steps, rate)

    @cached_property
    def _start(self) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        """All that a trial changes besides the optimiser, as it is when this is first asked for."""
        scaler = self.loop.engine.scaler
        scale = {} if scaler is None else copy.deepcopy(scaler.state_dict())
        return self.loop.engine.weights(), random_state(), scale

    def _put_back(self) -> None:
        engine, (weights, drawn, scale) = self.loop.engine, self._start
        engine.set_weights(weights)
        engine.raw_optimizer.zero_grad(set_to_none=True)
        if engine.scaler is not None:
            engine.scaler.load_state_dict(scale)
        set_random_state(drawn)

    def _schedule(self, steps: int, rate: float) -> Any:
        """Let the optimiser be as it was made, but for the rate; return its schedule."""
        optimizer, settings = self.loop.engine.raw_optimizer, self.loop.settings
        optimizer.load_state_dict(copy.deepcopy(self.fresh))
        set_rate(optimizer, settings, rate)
        return make_schedule(optimizer, settings, steps)

    def _run(self, rate: float, steps: int) -> None:
        """Train for some steps from the start."""
        self._put_back()
        replace(
            self.loop,
            schedule=self._schedule(steps, rate),
            steps=steps,
            validation=None,
            average=None,
            log=RunLog(None, unheard),
            checkpoints=None,
            state=State(),
            logdog=Watchdog(),
            peak=0,  # not measured
        ).run()

    def _tried(self, steps: int) -> tuple[tuple[float, float], ...]:
        """Return rates, up to the first that comes to a higher validation loss than what is before
        it, and these losses; none where the run is too short, nothing judges them, or what a trial
        reads would be missing from the run."""
        loop = self.loop
        if steps < LONG or loop.validation is None or loop.teacher is None or loop.feed.once:
            return ()
        each = round(SHARE * steps / len(RATES) / (1 + JUDGING))
        each = max(FEWEST, min(MOST, each))
        found: list[tuple[float, float]] = []
        self._put_back()
        last = self._judged(each)
        for number, rate in enumerate(RATES):
            self.loop.log.say(f"trying a learning rate of {rate:g}", number, len(RATES))
            found.append((rate, self._loss(rate, each)))
            if not found[-1][1] < last:
                break
            last = found[-1][1]
        return tuple(found)

    def _loss(self, rate: float, steps: int) -> float:
        """Return what the validation says after so many steps, on as many passes of it."""
        try:
            self._run(rate, steps)
        except TrainingError:  # the loss runs away
            return math.inf
        return self._judged(steps)

    def _judged(self, passes: int) -> float:
        """Return the loss of the model as it is on some passes of the validation."""
        assert self.loop.validation is not None
        loss = self.loop.validation.score(self.loop.engine.model, passes)["loss"]
        return loss if math.isfinite(loss) else math.inf

    def _seconds(self) -> tuple[float, float]:
        """Return what a step takes, and a validation."""
        validation = self.loop.validation
        self._run(PLAIN, 1)
        start = time.monotonic()
        self._run(PLAIN, TIMED)
        step = (time.monotonic() - start) / TIMED
        if validation is None:
            return step, 0.0
        passes = validation.feed.passes
        looked = None if passes is None else min(passes, TIMED)
        start = time.monotonic()
        validation.score(self.loop.engine.model, looked)
        took = time.monotonic() - start
        return step, took * (passes / looked if passes and looked else 1)

    def _fitting(self, step: float, validation: float) -> int:
        """Return how many steps fit into what is left of the minutes.

        Args:
            step, validation: seconds that each takes.
        """
        loop, settings = self.loop, self.loop.settings
        assert settings.minutes is not None
        left = 60 * settings.minutes - (time.monotonic() - self.began) - 2 * validation
        every = settings.validate_every
        if every is None and loop.feed.passes is not None:
            every = -(-loop.feed.passes // settings.accumulate)
        count = left / (step + (validation / every if every else 0.0))
        return max(1, int(loop.engine.mean(count)))


def _best(tried: Sequence[tuple[float, float]]) -> float:
    """Return the rate that is best for the whole run: the first that was worse than the one before
    it, or the highest, where its loss is a number.

    In a few steps low rates look better than they are: on MiniLM at 25 % and a digit CNN at 3 % the
    best of 40, 100 and 400 steps was three times the best of 10.
    """
    finite = [rate for rate, loss in tried if math.isfinite(loss)]
    return finite[-1] if finite else tried[0][0]
