from __future__ import annotations

import re

import pytest
from pydantic import ValidationError

from bp_convert.errors import PlanError
from bp_convert.values.settings import Settings
from bp_convert.values.target import Target

READ = [
    ("params=0.25", "params", 0.25),
    ("params=25%", "params", 0.25),
    ("params=.5", "params", 0.5),
    ("params=1", "params", 1),
    ("PARAMS=1.5M", "params", 1.5e6),
    ("params=300k", "params", 3e5),
    ("macs=2G", "macs", 2e9),
    ("macs=1e6", "macs", 1e6),
    ("size=20MB", "size", 20e6),
    ("size=20MiB", "size", 20 * 2**20),
    ("size=1GiB", "size", 2**30),
    ("size=512 KiB", "size", 512 * 2**10),
    ("size=4000b", "size", 4000),
    ("size=0.5", "size", 0.5),
    (" error=0.05 ", "error", 0.05),
    ("error=5%", "error", 0.05),
    ("latency=0.5", "latency", 0.5),
    ("latency=50%", "latency", 0.5),
    ("latency=8ms", "latency", 8e3),
    ("latency=0.5 ms", "latency", 500),
    ("latency=300us", "latency", 300),
    ("latency=2s", "latency", 2e6),
]


@pytest.mark.parametrize(("text", "quantity", "value"), READ)
def test_words_are_read(text: str, quantity: str, value: float) -> None:
    found = Target.parse(text)
    assert found.quantity == quantity
    assert found.value == pytest.approx(value, rel=1e-12)
    again = Target.parse(str(found))
    assert again.quantity == quantity
    assert again.value == pytest.approx(value, rel=1e-5)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "params",
        "params=",
        "params=0",
        "params=-1",
        "params=nan",
        "params=inf",
        "params=20MB",
        "macs=1GiB",
        "error=1",
        "error=2",
        "error=100%",
        "error=5k",
        "latency=8",
        "latency=0.001us",
        "latency=5k",
        "latency=5MB",
        "params=8ms",
        "params=0.5x",
        "params=0.5,macs=0.5",
        "params:0.5",
        "params=1.2.3",
        "size=20 M B",
    ],
)
def test_other_words_are_refused_with_an_example(text: str) -> None:
    with pytest.raises(PlanError, match=re.escape(repr(text))) as caught:
        Target.parse(text)
    assert "params=0.25" in caught.value.allowed
    assert "params=0.25" in caught.value.fix


def test_a_share_is_of_the_source_s_and_a_count_is_itself() -> None:
    assert Target(quantity="params", value=0.25).limit(1000) == 250
    assert Target(quantity="params", value=1).limit(1000) == 1000
    assert Target(quantity="params", value=250).limit(1000) == 250
    assert Target(quantity="params", value=1.5).limit(1000) == 1.5
    error = Target(quantity="error", value=0.25)
    assert not error.is_share
    assert error.limit(1000) == 0.25


@pytest.mark.parametrize("value", [0, -1, float("nan")])
def test_values_that_mean_nothing(value: float) -> None:
    with pytest.raises(ValidationError):
        Target(quantity="params", value=value)


def test_an_error_is_relative() -> None:
    with pytest.raises(ValidationError, match="relative"):
        Target(quantity="error", value=1)


def test_one_target_for_a_quantity() -> None:
    one, two = Target.parse("params=0.5"), Target.parse("macs=0.5")
    assert Settings(target=(one, two)).target == (one, two)
    with pytest.raises(ValidationError, match="two targets"):
        Settings(target=(one, Target.parse("params=1M")))
    with pytest.raises(ValidationError, match="warm"):
        Settings(target=(one,), init="random")


def test_a_target_survives_json() -> None:
    settings = Settings(target=(Target.parse("size=20MB"),))
    assert Settings.model_validate_json(settings.model_dump_json(by_alias=True)) == settings


def test_targets_that_differ_have_texts_that_differ() -> None:
    near = [Target.parse(f"params={count}") for count in (1_234_567, 1_234_568)]
    assert [str(one) for one in near] == ["params=1234567", "params=1234568"]
    assert [Target.parse(str(one)) for one in near] == near
    assert str(Target.parse("size=20MB")) == "size=20000000"
    assert str(Target.parse("params=0.25")) == "params=0.25"
