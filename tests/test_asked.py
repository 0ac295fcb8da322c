"""What is asked for in Python: mistakes are told in words, results in a line."""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import bp_convert
from bp_convert.errors import CheckpointError, PlanError
from bp_convert.pipeline import KEYWORDS
from bp_convert.values.plan import Plan
from bp_convert.values.report import Report
from bp_convert.values.settings import Settings, SettingsKeywords


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
    assert len(repr(report)) < 500
    for shown in (str(report), str(plan)):
        assert max(map(len, shown.splitlines())) <= 80
        assert "params" in shown
        assert "8x8|8x8" in shown
    assert " ".join(str(report).split()).endswith(report.verdict)
    assert Plan.model_validate_json(plan.model_dump_json(by_alias=True)) == plan
    assert Report.model_validate_json(report.model_dump_json(by_alias=True)) == report


def test_notebooks_show_an_escaped_table() -> None:
    odd = nn.Sequential()
    odd.add_module("<b>&", nn.Linear(64, 64))
    plan = bp_convert.plan(odd, inputs=["64"])
    _, report = bp_convert.convert(_model(), inputs=["64"], convert_anyway=True)
    for value in (plan, report):
        shown = value._repr_html_()
        assert shown is not None
        assert "params" in shown
    assert "&lt;b&gt;&amp;" in (plan._repr_html_() or "")
    assert "<b>" not in (plan._repr_html_() or "")


def test_probes_and_sweeps_are_shown_as_tables() -> None:
    probe = bp_convert.probe(_model())
    assert repr(probe) == "<Probe of Sequential: 2 weights>"
    assert "truncated SVD" in str(probe)
    sweep = bp_convert.sweep(_model(), ["params=0.5"])
    assert repr(sweep).startswith("<Sweep of Sequential: 2 points>")
    assert "params=0.5" in str(sweep)
    assert "params=0.5" in (sweep._repr_html_() or "")


# Names and keywords


def test_every_public_name_is_there_and_documented() -> None:
    for name in bp_convert.__all__:
        assert getattr(bp_convert, name) is not None
        if name != "__version__":
            assert getattr(bp_convert, name).__doc__
    assert {*bp_convert.__all__} <= {*dir(bp_convert)}
    with pytest.raises(AttributeError, match="no attribute 'convrt'"):
        _ = bp_convert.convrt  # type: ignore[attr-defined]


def test_keywords_are_the_fields_of_settings() -> None:
    """A type checker sees a keyword that is none; pydantic sees its value."""
    assert {*SettingsKeywords.__annotations__} == {*Settings.model_fields} - {"inputs"}
    for function in (bp_convert.plan, bp_convert.convert, bp_convert.inspect):
        own = {*signature(function).parameters} - {"settings", "inputs", "model", "asked", "source"}
        assert own - {"arch", "trust"} <= {*KEYWORDS}


# Progress


def test_progress_is_told_drawn_and_logged(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    heard: list[str] = []
    with caplog.at_level("INFO", logger="bp_convert"):
        bp_convert.plan(_model(), progress=lambda words, done, total: heard.append(words))
    assert heard
    logged = [record.message.rpartition(" (")[0] for record in caplog.records]
    assert logged == list(dict.fromkeys(heard))
    bp_convert.plan(_model(), progress=True)
    assert capsys.readouterr().out == ""


# The plan of a model


def test_a_converted_model_knows_its_plan(tmp_path: Path) -> None:
    small, report = bp_convert.convert(_model(), inputs=["64"], convert_anyway=True)
    plan = bp_convert.plan_of(small)
    assert plan == report.plan
    bp_convert.save(small, tmp_path / "small.pt")
    assert bp_convert.plan_of(tmp_path / "small.pt") == plan
    assert bp_convert.plan_of(bp_convert.load(tmp_path / "small.pt")) == plan
    with pytest.raises(CheckpointError, match="without a conversion plan"):
        bp_convert.plan_of(_model())


def test_a_pruned_model_is_saved_with_its_plan(tmp_path: Path) -> None:
    small, plan = bp_convert.prune(_model(), 2000, inputs=["64"])
    assert sum(p.numel() for p in small.parameters()) == plan.params.after <= 2000
    bp_convert.save(small, tmp_path / "small.pt")
    assert bp_convert.plan_of(tmp_path / "small.pt") == plan
    x = torch.randn(3, 64)
    assert torch.equal(bp_convert.load(tmp_path / "small.pt")(x), small.eval()(x))
