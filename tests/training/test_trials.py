"""Rates tried and steps timed before a run, which is then the one that it would have been."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import bp_convert
from bp_convert.errors import TrainingError
from bp_convert.render.words import trained_lines
from bp_convert.training import trials
from bp_convert.training.trials import ShortRuns
from tests.training import runs
from tests.training.test_resume import same


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let runs of a few steps be long enough."""
    torch.set_num_threads(1)
    monkeypatch.setattr(trials, "SHARE", 0.5)
    monkeypatch.setattr(trials, "LONG", 8)
    monkeypatch.setattr(trials, "FEWEST", 2)


def pair() -> tuple[nn.Module, nn.Module]:
    """A model with state of all kinds, and its teacher."""
    torch.manual_seed(0)
    source = runs.Digest()
    model = copy.deepcopy(source)
    with torch.no_grad():
        model.body[4].weight.mul_(0.5)
    return model, source


def train(**asked: Any) -> tuple[nn.Module, Any]:
    model, source = pair()
    how = {"steps": 24, "batch": 16, "ema": 0.9, "warmup": 0.1, "teacher": source, **asked}
    return bp_convert.finetune(model, runs.data(), **how)


def test_a_rate_is_taken_and_nothing_of_the_trials_stays() -> None:
    trained, report = train()
    rates = [rate for rate, _ in report.tried]
    assert rates == list(trials.RATES[: len(rates)])
    assert len({loss for _, loss in report.tried}) == len(rates) > 1
    assert report.lr == rates[-1]
    told = " ".join(trained_lines(report))
    assert f"learning rate {report.lr:g}" in told
    assert "at 0.0001" in told
    given, plain = train(lr=report.lr)
    assert plain.tried == ()
    assert plain.curve == report.curve
    assert same(trained.state_dict(), given.state_dict())


@pytest.mark.parametrize(
    ("losses", "taken"),
    [
        ([9, 8, 7, 6, 5], 3e-3),
        ([9, 8, 7, 7.5], 1e-3),  # three times the best of so few steps
        ([9, 10], 1e-4),
        ([9, 8, 7, math.inf], 3e-4),
        ([9, math.inf], 1e-4),
    ],
)
def test_the_first_rate_that_is_worse_after_a_few_steps_is_the_one(
    losses: list[float], taken: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = iter(losses)
    monkeypatch.setattr(ShortRuns, "_run", lambda *_: None)
    monkeypatch.setattr(ShortRuns, "_judged", lambda *_: next(left))
    _, report = train(steps=8, ema=None)
    assert report.lr == taken
    assert [loss for _, loss in report.tried] == losses[1:]
    assert next(left, None) is None


def test_a_rate_at_which_the_loss_runs_away_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials, "RATES", (1e-3, 1e30))
    _, report = train()
    assert report.tried[1] == (1e30, math.inf)
    assert report.lr == 1e-3
    assert report.after["loss"] < report.before["loss"]
    assert type(report).model_validate_json(report.model_dump_json()) == report


@pytest.mark.parametrize(
    "asked", [{"teacher": None}, {"validation": 0.0}, {"steps": 7}, {"lr": 1e-3}]
)
def test_without_a_teacher_a_validation_or_steps_enough_none_is_tried(
    asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ShortRuns, "_run", None)
    _, report = train(**{"steps": 12, **asked})
    assert (report.lr, report.tried) == (1e-3, ())


def test_what_can_be_read_once_is_left_to_the_run() -> None:
    x, labels = runs.data(80)
    model, source = pair()
    batches = ((x[at : at + 8], labels[at : at + 8]) for at in range(0, 80, 8))
    held = runs.data(40)
    _, report = bp_convert.finetune(model, batches, teacher=source, validation=held, steps=9)
    assert (report.steps, report.tried) == (9, ())  # one batch told what the outputs are


class _Stop(Exception):  # noqa: N818 - a signal, not an error
    pass


def cut(folder: Path, **asked: Any) -> None:
    """Stop a run after its second checkpoint."""

    def stop(words: str, done: int, total: int) -> None:
        if words.startswith("loss") and done >= 7:
            raise _Stop

    with pytest.raises(_Stop):
        train(folder=folder, progress=stop, **{"checkpoint_every": 3, **asked})


def test_what_goes_on_does_not_try_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, told = train(checkpoint_every=3)
    cut(tmp_path)
    monkeypatch.setattr(ShortRuns, "_run", None)
    model, report = train(folder=tmp_path, checkpoint_every=3, resume=True)
    assert report.resumed_from == 6
    assert (report.lr, report.tried, report.curve) == (told.lr, told.tried, told.curve)
    assert same(model.state_dict(), whole.state_dict())


def test_minutes_become_steps_which_a_run_keeps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ShortRuns, "_seconds", lambda _: (1.5, 0.5))  # of a step, of a validation
    asked = {"steps": None, "minutes": 0.5, "checkpoint_every": 3}
    cut(tmp_path, **asked)
    monkeypatch.setattr(ShortRuns, "_run", None)
    model, report = train(folder=tmp_path, resume=True, **asked)
    assert report.resumed_from == 6
    # Less what the trials took; a validation every 12 steps, one before and one at the end.
    assert 8 <= report.steps <= (30 - 2 * 0.5) / (1.5 + 0.5 / 12)
    given, plain = train(steps=report.steps, lr=report.lr)
    assert plain.curve == report.curve
    assert same(model.state_dict(), given.state_dict())


def test_a_run_of_some_minutes_ends_about_then() -> None:
    _, report = train(steps=None, minutes=0.02)
    assert report.steps >= 1
    assert 0.2 < report.seconds < 12
    with pytest.raises(TrainingError, match="give one of them"):
        train(minutes=1)
    settings = bp_convert.Training(minutes=1)
    assert settings.epochs is None
    assert bp_convert.training.settings_for(settings, {"steps": 2}).minutes is None
