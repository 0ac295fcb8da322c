from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import bp_convert
from bp_convert.errors import PlanError
from bp_convert.planner import latency
from bp_convert.tuning.layer_clock import WHOLE, Subject
from bp_convert.tuning.machine_table import Host, MachineTable, write_table
from bp_convert.values.plan import Plan
from tests.search.models import Words, mlp

REST = 40.0  # microseconds that no layer takes
PRICES = {"Linear.dense": {"macs": 1e-3}, "Linear.twin": {"macs": 1e-3}}


class _Watch:
    """Says that layers take time by their numbers, those on factors more than is predicted."""

    def __init__(self, slower: float = 1.0, drift: float = 1.0) -> None:
        self.slower = slower
        self.drift = drift  # of the machine since the source was timed
        self.calls = 0

    def __call__(self, subjects: list[Subject], inputs: Any, place: Host) -> list[dict[str, float]]:
        self.calls += 1
        found = []
        for subject in subjects:
            model = subject.make()
            inputs(model)
            layers = {}
            for name in subject.layers:
                layer = model.get_submodule(name)
                numbers = sum(p.numel() for p in layer.parameters() if p.dim() > 1)
                layers[name] = 1e-2 * numbers
                if type(layer).__name__.startswith("BP"):
                    layers[name] *= self.slower
            drift = self.drift if len(subjects) > 1 else 1.0
            layers[WHOLE] = sum(layers.values()) + REST
            found.append({name: drift * one for name, one in layers.items()})
        return found


@pytest.fixture(autouse=True)
def _tuned(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("BP_CONVERT_CACHE", str(tmp_path))
    write_table(MachineTable(Host("cpu", 1, "float32"), PRICES))


def _plan(watch: _Watch, monkeypatch: pytest.MonkeyPatch, target: Any, **asked: Any) -> Plan:
    monkeypatch.setattr(latency.layer_clock, "time_models", watch)
    torch.manual_seed(0)
    return bp_convert.plan(mlp(60, 72, 48), target=target, inputs=["60"], **asked)


def _time(plan: Plan, slower: float = 1.0) -> float:
    """Return what the watch says of a plan's model."""
    torch.manual_seed(0)
    small = bp_convert.apply(mlp(60, 72, 48), plan)
    names = tuple(one.name for one in plan.layers)
    return _Watch(slower)([Subject(lambda: small, names)], lambda _: None, Host())[0][WHOLE]


WAS = 1e-2 * (60 * 72 + 72 * 48) + REST


@pytest.mark.parametrize("asked", ["latency=0.6", "latency=0.08ms", "latency=95%"])
def test_the_target_holds_on_the_model(asked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = _plan(_Watch(), monkeypatch, asked)
    limit = {"latency=0.6": 0.6 * WAS, "latency=0.08ms": 80.0, "latency=95%": 0.95 * WAS}[asked]
    assert 0.97 * limit <= _time(plan) <= 1.001 * limit
    (note,) = [one for one in plan.notes if one.startswith("latency=")]
    assert "measured" in note
    assert "batch 1, " in note
    assert "1 thread" in note
    assert "NOT" not in note


@pytest.mark.parametrize("slower", [0.6, 1.3, 1.6])
def test_what_was_predicted_wrong_is_corrected(
    slower: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = _Watch(slower)
    plan = _plan(watch, monkeypatch, "latency=0.7")
    taken = _time(plan, slower)
    assert taken <= latency.OVER * 0.7 * WAS
    assert taken >= 0.85 * 0.7 * WAS  # nor is error given away
    assert watch.calls == 3  # the source, and two choices


def test_a_machine_that_has_slowed_down_is_no_reason_to_choose_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    watch = _Watch(drift=3.0)
    _plan(watch, monkeypatch, "latency=0.7")
    assert watch.calls == 2


def test_equal_settings_give_equal_plans_and_nothing_is_timed_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first = _plan(_Watch(1.3), monkeypatch, "latency=0.7")
    watch = _Watch(5.0)
    assert _plan(watch, monkeypatch, "latency=0.7") == first
    assert watch.calls == 0


def test_it_goes_along_with_other_targets(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = _plan(_Watch(), monkeypatch, ("latency=0.9", "params=0.3"))
    assert plan.params.ratio <= 0.3
    plan = _plan(_Watch(), monkeypatch, ("latency=0.6", "params=0.9"))
    assert _time(plan) <= 0.601 * WAS
    assert plan.params.ratio <= 0.9


def test_out_of_reach_names_the_range(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PlanError, match="out of reach") as caught:
        _plan(_Watch(), monkeypatch, "latency=0.2")  # the rest takes more
    assert " ms (a share of 0.3" in caught.value.allowed
    assert caught.value.lowest is not None
    assert caught.value.lowest > 0.2 * WAS


def test_what_is_not_kept_in_the_end_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latency, "ROUNDS", 1)
    plan = _plan(_Watch(1.6), monkeypatch, "latency=0.7")
    (note,) = [one for one in plan.notes if one.startswith("latency=")]
    assert "NOT kept" in note


def test_batch_and_threads_are_what_was_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    class Watch(_Watch):
        def __call__(self, subjects: Any, inputs: Any, place: Host) -> Any:
            seen.append((place.threads, inputs(subjects[0].make())[0][0].shape[0]))
            return super().__call__(subjects, inputs, place)

    write_table(MachineTable(Host("cpu", 2, "float32"), PRICES))
    plan = _plan(Watch(), monkeypatch, "latency=0.7", latency_at={"batch": 8, "threads": 2})
    assert set(seen) == {(2, 8)}
    assert any("batch 8, " in one and "2 threads" in one for one in plan.notes)


def test_a_machine_is_measured_for_the_first_target_and_not_for_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = []

    def measured(place: Host, progress: Any) -> MachineTable:
        calls.append(place)
        return MachineTable(place, PRICES)

    monkeypatch.setattr(latency.tuner, "measured", measured)
    at = {"threads": 3}
    bp_convert.plan(mlp(60, 72, 48), target="params=0.5", inputs=["60"])
    assert not calls
    for _ in range(2):
        _plan(_Watch(), monkeypatch, "latency=0.7", latency_at=at)
        assert [one.threads for one in calls] == [3]


def test_plans_tell_whose_prices_they_go_by_and_others_are_as_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = mlp(60, 72, 48)
    tuned = bp_convert.plan(model, target="params=0.5", inputs=["60"])
    assert any(one.startswith("times are predicted as tuned on ") for one in tuned.notes)
    monkeypatch.setenv("BP_CONVERT_CACHE", "/nonexistent")
    plain = bp_convert.plan(model, target="params=0.5", inputs=["60"])
    assert not any("tuned" in one for one in plain.notes)


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"target": "latency=0.5", "latency_at": {"batch": 0}}, "batch"),
        ({"target": "latency=0.5", "latency_at": {"devise": "cpu"}}, "devise"),
        ({"target": "params=0.5", "latency_at": {"batch": 2}}, "latency"),
        ({"target": "latency=0.5", "latency_at": {"device": "tpu"}}, "device"),
    ],
)
def test_settings_are_checked(asked: dict[str, Any], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        bp_convert.plan(mlp(60, 72, 48), inputs=["60"], **asked)


def test_it_needs_an_input(monkeypatch: pytest.MonkeyPatch) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Linear(60, 72)

        def forward(self, x: Any, y: Any, z: Any) -> Any:
            return self.one(x[y["a"]] @ z.odd)

    monkeypatch.setattr(latency.layer_clock, "time_models", _Watch())
    with pytest.raises(PlanError, match="no example input"):
        bp_convert.plan(Two(), target="latency=0.7")


def test_recurrent_layers_and_tables_are_timed_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latency.layer_clock, "time_models", _Watch())
    plan = bp_convert.plan(
        Words(), target="latency=0.99", inputs=["tokens=int64:1x9<90"], prefer="speed"
    )
    assert any(one.startswith("latency=") for one in plan.notes)
