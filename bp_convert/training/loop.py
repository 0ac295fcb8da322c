"""The loop: passes, steps, validations, checkpoints, in an order that resuming repeats exactly."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor, nn

from bp_convert.feeding.feed import Feed, Micro, groups
from bp_convert.randomness import random_state, set_random_state
from bp_convert.training.average import Average
from bp_convert.training.checkpoints import Checkpoints
from bp_convert.training.engine import Engine, on_cpu
from bp_convert.training.loss import Objective
from bp_convert.training.memory import bytes_of, held_by, held_by_optimizer, measured
from bp_convert.training.run_log import RunLog
from bp_convert.training.trouble import Watchdog, diagnose, diverged
from bp_convert.training.validation import Validation, taught, to_device
from bp_convert.training.watched import Watched
from bp_convert.values.training import Training

ENOUGH = "all steps done"


@dataclass
class State:
    """How far a run is; with weights and random states it is all that a checkpoint holds."""

    step: int = 0
    epoch: int = 0
    position: int = 0  # passes of the epoch that are done
    examples: int = 0
    seconds: float = 0.0
    waited: int = 0  # validations since the best
    stopped: str = ""
    before: dict[str, float] = field(default_factory=dict)
    teacher: dict[str, float] = field(default_factory=dict)
    best_step: int = 0
    best: dict[str, float] = field(default_factory=dict)
    best_weights: dict[str, Any] | None = None
    losses: list[float] = field(default_factory=list)
    lr: float | None = None
    tried: tuple[tuple[float, float], ...] = ()  # rates, and the losses that they came to


@dataclass
class Loop:
    """A run.

    Attributes:
        about: what a checkpoint must agree on with the run that goes on from it.
        peak: bytes of a step, once measured.
    """

    engine: Engine
    settings: Training
    feed: Feed
    objective: Objective
    schedule: Any
    steps: int
    validation: Validation | None
    teacher: nn.Module | None
    watched: Watched
    average: Average | None
    log: RunLog
    checkpoints: Checkpoints | None
    about: dict[str, Any]
    state: State = field(default_factory=State)
    logdog: Watchdog = field(default_factory=Watchdog)
    peak: int | None = None
    _written: float = field(default_factory=time.monotonic)
    _first: int = -1  # the first step of this part of the run
    _spent: float = 0.0  # seconds in steps

    def run(self) -> None:
        """Train until the steps are done or nothing gets better.

        Raises:
            TrainingError: the loss is no number any more.
            CheckpointError: a checkpoint cannot be written.
        """
        state, start = self.state, time.monotonic()
        earlier = state.seconds
        self._first = state.step
        if state.step == 0 and self.validation is not None:
            state.before = self._validated()
            state.teacher = self.validation.of_teacher()
            self._note_best(state.before)
            self.log.validation(0, state.before)
        while state.step < self.steps and not state.stopped:
            micros = self.feed.epoch(state.epoch, state.position)
            for group, last in groups(micros, self.settings.accumulate):
                began = time.monotonic()
                self._step(group)
                self._spent += time.monotonic() - began
                if last:
                    state.epoch, state.position = state.epoch + 1, 0
                else:
                    state.position += len(group)
                done = state.step >= self.steps
                if self._validation_due(last, done):
                    self._validate()
                state.seconds = earlier + time.monotonic() - start
                if done and not state.stopped:
                    state.stopped = ENOUGH
                if self._checkpoint_due(last, bool(state.stopped)):
                    self.write()
                if state.stopped:
                    break
        if state.best_weights is not None:  # there was a validation
            self.engine.set_weights(state.best_weights)
            return
        state.best_step = state.step
        if self.average is not None:
            self.average.put()

    @property
    def rate(self) -> float:
        """Examples a second in this part of the run, validation left out."""
        each = self.state.examples / max(1, self.state.step)
        return (self.state.step - self._first) * each / self._spent if self._spent else 0.0

    def _step(self, group: list[Micro]) -> None:
        """Make one step of the optimiser out of some passes."""
        state = self.state
        if self.peak is None and state.step >= min(self._first + 1, self.steps - 1):
            # The second step: the optimiser has its states by then.
            held = held_by(self.engine.model, self.teacher)
            held += held_by_optimizer(self.engine.raw_optimizer)
            held += 0 if self.average is None else bytes_of(self.average.tensors)
            (loss, norm), self.peak = measured(
                lambda: self._advance(group), self.engine.device, held
            )
        else:
            loss, norm = self._advance(group)
        if not self.engine.optimizer_step_was_skipped:
            self.schedule.step()
            if self.average is not None:
                self.average.update()
        state.step += 1
        state.examples += sum(one.total for one in group)
        state.losses.append(loss)
        self.log.step(
            state.step,
            self.steps,
            {
                "loss": loss,
                "lr": float(self.engine.raw_optimizer.param_groups[0]["lr"]),
                "norm": norm,
                "rate": round(self.rate, 1),
            },
        )

    def _advance(self, group: list[Micro]) -> tuple[float, float]:
        """Change the weights once; return the loss and the norm of its gradient."""
        loss = self._gradients(group)
        norm = self.engine.norm(self.settings.clip)
        healthy = self.logdog.healthy(loss) and (
            math.isfinite(norm) or self.engine.scaler is not None
        )
        if self.engine.any(not healthy):
            self._give_up(group[-1], loss if not math.isfinite(loss) else norm, loss)
        self.engine.optimizer.step()
        self.engine.raw_optimizer.zero_grad(set_to_none=True)
        return loss, norm

    def _gradients(self, group: list[Micro]) -> float:
        """Add up the gradients of some passes; return the mean loss over all their examples."""
        total = sum(one.total for one in group)
        values: list[Tensor] = []
        for i, micro in enumerate(group):
            there = to_device(micro, self.engine.model)
            with self.engine.quiet_gradients(i == len(group) - 1):
                loss = self._loss(there) * (micro.share * micro.total / total)
                self.engine.backward(loss)
            values.append(loss.detach())
        mine = float(torch.stack(values).sum())
        return self.engine.mean(mine)

    def _loss(self, there: Micro) -> Tensor:
        with self.watched, self.engine.autocast():
            reference = None if self.teacher is None else taught(self.teacher, there)
            raw = self.engine.wrapped(*there.args, **there.kwargs)
        return self.objective(raw, there, reference, **self.watched.gaps(there))

    def _validation_due(self, last: bool, done: bool) -> bool:
        if self.validation is None:
            return False
        every = self.settings.validate_every
        return done or (last if every is None else self.state.step % every == 0)

    def _validated(self) -> dict[str, float]:
        assert self.validation is not None
        self.log.say("validating", self.state.step, self.steps)
        with self._averaged():
            return self.validation.score(self.engine.model)

    def _validate(self) -> None:
        state = self.state
        found = self._validated()
        self.log.validation(state.step, found)
        # A loss that is no number is never the lowest.
        if found["loss"] < state.best.get("loss", math.inf):
            self._note_best(found)
            return
        state.waited += 1
        if self.settings.patience is not None and state.waited >= self.settings.patience:
            state.stopped = f"no lower validation loss in {state.waited} validations"

    def _note_best(self, found: dict[str, float]) -> None:
        state = self.state
        state.best_step, state.best, state.waited = state.step, found, 0
        with self._averaged():
            state.best_weights = self.engine.weights()

    def _averaged(self) -> AbstractContextManager[None]:
        """Let the model have what is validated and kept: the average, where there is one."""
        return nullcontext() if self.average is None else self.average.in_place()

    def _checkpoint_due(self, last: bool, done: bool) -> bool:
        if self.checkpoints is None:
            return False
        every, minutes = self.settings.checkpoint_every, self.settings.checkpoint_minutes
        if done or (every is None and minutes is None and last):
            return True
        if every is not None and self.state.step % every == 0:
            return True
        late = minutes is not None and time.monotonic() - self._written >= 60 * minutes
        return self.engine.any(late) if minutes is not None else False

    def write(self) -> None:
        """Write a checkpoint; the first process does, the others wait."""
        assert self.checkpoints is not None
        content = self.captured()
        if self.engine.is_main_process:
            self.checkpoints.write(self.state.step, content)
            self.log.event(self.state.step, "checkpoint")
        self.engine.wait_for_everyone()
        self._written = time.monotonic()

    def captured(self) -> dict[str, Any]:
        """Return all that the rest of the run depends on, as plain values and tensors."""
        scaler = self.engine.scaler
        return {
            "about": self.about,
            "run": dict(vars(self.state)),
            "watchdog": dict(vars(self.logdog)),
            "model": self.engine.weights(),
            "optimizer": on_cpu(self.engine.raw_optimizer.state_dict()),
            "schedule": _plain(self.schedule.state_dict()),
            "scaler": None if scaler is None else scaler.state_dict(),
            "average": None if self.average is None else on_cpu(self.average.tensors),
            "random": gather_object([random_state()]),
        }

    def restore(self, content: Mapping[str, Any]) -> None:
        """Go back to where a checkpoint was written."""
        self.state = State(**content["run"])
        vars(self.logdog).update(content["watchdog"])
        self.engine.set_weights(content["model"])
        self.engine.set_optimizer_state(content["optimizer"])
        self.schedule.load_state_dict(content["schedule"])
        if self.engine.scaler is not None and content["scaler"]:
            self.engine.scaler.load_state_dict(content["scaler"])
        if self.average is not None:
            self.average.load(content["average"])
        set_random_state(content["random"][self.engine.place.rank])

    def _give_up(self, micro: Micro, value: float, loss: float) -> None:
        model = self.engine.model
        there = to_device(micro, model)

        def again() -> None:
            with self.engine.autocast():
                model(*there.args, **there.kwargs)

        words = diagnose(model, again)
        self.log.event(self.state.step + 1, f"stopped: {words}")
        raise diverged(self.state.step + 1, value if math.isfinite(loss) else loss, words)


def _plain(state: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out of a scheduler's state what is no plain value, such as its functions."""
    plain = (int, float, str, bool, list, tuple, dict, type(None), Tensor)
    return {key: value for key, value in state.items() if isinstance(value, plain)}
