"""What is asked for in Python: mistakes are told in words, results in a line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import bp_convert
from bp_convert.errors import PlanError
from bp_convert.values.plan import Plan
from bp_convert.values.report import Report


def _model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))


CALLS: dict[str, Callable[..., Any]] = {
    "plan": bp_convert.plan,
    "convert": bp_convert.convert,
    "inspect": bp_convert.inspect,
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(
    ("word", "near"),
    [
        ("alhpa", "alpha"),
        ("input", "inputs"),
        ("targets", "target"),
        ("calibration", "calibrate"),
        ("converthead", "convert_head"),
    ],
)
def test_an_unknown_keyword_names_the_near_one(call: str, word: str, near: str) -> None:
    with pytest.raises(PlanError) as caught:
        CALLS[call](_model(), **{word: 2})
    assert caught.value.where == f"setting {word}"
    assert caught.value.fix == f"did you mean {near!r}?"
    assert near in caught.value.allowed


def test_a_keyword_like_none_lists_them_all() -> None:
    with pytest.raises(PlanError, match=r"unknown key 'zzz'(.|\n)*alpha(.|\n)*metric") as caught:
        bp_convert.plan(_model(), zzz=1)
    assert caught.value.fix.startswith("remove it")


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"rank": 0}, "a whole number of terms, or a share between 0 and 1"),
        ({"layers": [{"match": "0", "rnk": 2}]}, "did you mean 'rank'"),
        ({"layers": [{"match": "0", "pairs": "sqare"}]}, "fast, paper"),
        ({"alpha": 0.5}, "at least 1"),
    ],
)
def test_a_value_that_a_setting_does_not_take(asked: dict[str, Any], says: str) -> None:
    with pytest.raises(PlanError) as caught:
        bp_convert.plan(_model(), **asked)
    assert says in str(caught.value)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("settings", ["3x224x224", {"alpha": 2}, 5])
def test_settings_of_another_type(call: str, settings: Any) -> None:
    with pytest.raises(PlanError, match=r"bp_convert\.Settings"):
        CALLS[call](_model(), settings)


@pytest.mark.parametrize("call", ["plan", "convert"])
@pytest.mark.parametrize(
    ("thing", "found", "fix"),
    [
        ("net.pth", "'net.pth'", "bp_convert.open_model('net.pth').model"),
        (Path("net.pth"), "net.pth", "bp-convert net.pth"),
        (_model().state_dict(), "a OrderedDict", "load them into it"),
        (nn.Linear, "Linear", "Linear(...)"),
        (torch.ones(3), "a Tensor", "give the model itself"),
        (None, "a NoneType", "give the model itself"),
    ],
)
def test_what_is_no_model(call: str, thing: Any, found: str, fix: str) -> None:
    with pytest.raises(PlanError) as caught:
        CALLS[call](thing)
    assert caught.value.where == "model"
    assert found in caught.value.found
    assert fix in caught.value.fix


def test_a_loaded_file_is_more_than_its_model(tmp_path: Path) -> None:
    torch.save(_model(), tmp_path / "m.pt")
    with pytest.raises(PlanError, match="give its attribute model"):
        bp_convert.plan(bp_convert.open_model(tmp_path / "m.pt"))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("measure", "batches"), [(True, [1, 32]), (False, []), ((), []), (3, [3]), ([2, 4], [2, 4])]
)
def test_measure_takes_batches_or_yes(measure: Any, batches: list[int]) -> None:
    _, report = bp_convert.convert(_model(), inputs=["64"], convert_anyway=True, measure=measure)
    assert [one.batch for one in report.latency] == batches


@pytest.mark.parametrize("measure", [0, [0], ["a"], [1.5], "ab"])
def test_measure_refuses_what_is_no_batch(measure: Any) -> None:
    with pytest.raises(PlanError, match=r"True for \[1, 32\]"):
        bp_convert.convert(_model(), inputs=["64"], measure=measure)


def test_plans_and_reports_are_shown_in_a_line() -> None:
    _, report = bp_convert.convert(_model(), inputs=["64"], convert_anyway=True)
    plan = bp_convert.plan(_model(), inputs=["64"], convert_anyway=True)
    line = "Sequential: 1 of 2 layers replaced, 4,420 to"
    assert repr(plan).startswith(f"<Plan of {line}")
    assert len(repr(plan)) < 100
    first, rest = repr(report).split("\n", 1)
    assert first.startswith(f"<Report of {line}")
    assert rest == report.verdict
    assert str(report) == repr(report)
    assert Plan.model_validate_json(plan.model_dump_json(by_alias=True)) == plan
    assert Report.model_validate_json(report.model_dump_json(by_alias=True)) == report
