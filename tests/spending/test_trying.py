"""Ways of spending a target, tried on examples that nothing is fitted to."""

from __future__ import annotations

from itertools import pairwise
from math import log
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bp_convert
from bp_convert.calibration.norms import Norms
from bp_convert.spending.rehearsal import Rehearsal
from bp_convert.spending.trying import Trying, is_nearer
from bp_convert.values.plan import Plan
from tests.calibration.test_slopes import Closed

FIXED: dict[str, Any] = {"sides": "inputs", "allocation": "measured", "shrink": 0}


class _Forks(nn.Module):
    """Three layers that read the same, and one that reads all of them."""

    def __init__(self, inputs: int, hidden: int) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(inputs, hidden) for _ in range(3))
        self.last = nn.Linear(3 * hidden, 6)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.last(torch.cat([part(x).tanh() for part in self.parts], -1))
        return made


def _network(seed: int) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(seed)
    widths = [int(n) for n in torch.randint(8, 25, (4,))]
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.Tanh() if seed % 2 else nn.ReLU()]
    x = torch.randn(256, widths[0]) @ torch.randn(widths[0], widths[0])
    if seed % 3 == 0:
        return _Forks(widths[0], widths[1]).eval(), x
    return nn.Sequential(*layers[:-1]).eval(), x


def _plan(model: nn.Module, x: Tensor, **asked: Any) -> Plan:
    common: dict[str, Any] = {"convert_anyway": True, "reconstruct": "off"}
    return bp_convert.plan(model, target="params=0.5", calibrate=x, **common, **asked)


def _never_worse(seed: int) -> int:
    model, x = _network(seed)
    plan = _plan(model, x)
    if not plan.tried:
        return 0
    (taken,) = [one for one in plan.tried if one.taken]
    assert taken.error <= plan.tried[0].error
    assert plan.tried[0].words == "as measured"
    return int(taken is not plan.tried[0])


def test_what_is_taken_is_never_worse_than_what_was_there_before() -> None:
    assert sum(map(_never_worse, range(4)))


def test_what_is_better_by_chance_is_not_taken() -> None:
    before = torch.tensor([1.0, 2.0, 3.0, 4.0])
    assert is_nearer(before - 0.1, before)
    assert not is_nearer(before, before)
    assert not is_nearer(before + torch.tensor([-2.0, 1.0, 1.0, -0.2]), before)  # lower in the mean
    assert not is_nearer(torch.full((4,), torch.inf), before)
    assert is_nearer(before, torch.full((4,), torch.inf))


@pytest.mark.long
def test_what_is_taken_is_never_worse_in_fifty_models() -> None:
    assert sum(map(_never_worse, range(50))) > 10


def test_each_way_can_be_switched_off_and_nothing_is_then_tried() -> None:
    model, x = _network(1)
    assert not _plan(model, x, **FIXED).tried
    both = _plan(model, x, **{**FIXED, "sides": "both"})
    assert {one.sides for one in both.converted} == {"both"}
    alike = _plan(model, x, **{**FIXED, "allocation": "uniform"})
    assert [one.words for one in alike.tried] in ([], ["all layers alike"])


def test_what_was_tried_once_is_not_run_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("BP_CONVERT_CACHE", str(tmp_path))
    model, x = _network(1)
    first = _plan(model, x)
    assert len(first.tried) > 1
    monkeypatch.setattr(Rehearsal, "_run", None)
    assert _plan(model, x) == first
    monkeypatch.undo()
    monkeypatch.setenv("BP_CONVERT_CACHE", str(tmp_path))
    other = _plan(model, x + 1)  # other data, other numbers
    assert [one.error for one in other.tried] != [one.error for one in first.tried]


def test_what_was_tried_on_one_model_is_not_taken_for_another_of_the_same_weights(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model, x = _network(1)
    other = nn.Sequential(*(nn.ReLU() if isinstance(m, nn.Tanh) else m for m in model))

    def tried(net: nn.Module, folder: str) -> list[float]:
        monkeypatch.setenv("BP_CONVERT_CACHE", str(tmp_path / folder))
        return [one.error for one in _plan(net, x, sides="inputs", shrink=0).tried]

    tried(model, "both")
    assert tried(other, "both") == tried(other, "alone")


def test_a_model_without_slopes_is_fitted_by_what_its_layers_see() -> None:
    plan = _plan(Closed(), torch.randn(256, 6), convert_head=True)
    assert {one.sides for one in plan.layers} == {"inputs"}


def test_a_choice_is_rehearsed_as_it_is_stored() -> None:
    _, x = _network(3)
    wide = nn.Sequential(
        nn.Linear(x.shape[1], 128), nn.Tanh(), nn.Linear(128, 128), nn.Linear(128, 6)
    )
    plan = bp_convert.plan(
        wide.eval(), target="size=0.3", calibrate=x, convert_anyway=True, reconstruct="off"
    )
    words = {one.words: one.error for one in plan.tried}
    assert {"as measured", "all layers in int4"} <= set(words)
    (taken,) = [one for one in plan.tried if one.taken]
    assert taken.error <= words["as measured"]
    small = bp_convert.apply(wide, plan, calibrate=x).requires_grad_(False)
    wide.requires_grad_(False)
    gap = (small(x) - wide(x)).pow(2).sum() / (wide(x) - wide(x).mean(0)).pow(2).sum()
    assert 0.3 < float(gap.sqrt()) / taken.error < 3


def test_fewer_bits_are_seen_by_a_rehearsal(monkeypatch: pytest.MonkeyPatch) -> None:
    found: dict[str, list[float]] = {}
    plain = Rehearsal.errors

    def noted(self: Rehearsal, *args: Any, **more: Any) -> Tensor | None:
        errors = plain(self, *args, **more)
        for bits in ({"0": "int8", "2": "int8"}, {"0": "int3", "2": "int3"}):
            again = plain(self, {}, set(), stores=bits)
            assert again is not None
            found.setdefault(bits["0"], []).append(float(again.mean()))
        return errors

    monkeypatch.setattr(Rehearsal, "errors", noted)
    torch.manual_seed(0)
    wide = nn.Sequential(
        nn.Linear(16, 128), nn.Tanh(), nn.Linear(128, 128), nn.Linear(128, 6)
    ).eval()
    bp_convert.plan(
        wide,
        target="size=0.3",
        calibrate=torch.randn(256, 16),
        reconstruct="off",
        ways="factored",
    )
    assert 0 < found["int8"][0] < 0.05 * found["int3"][0]


def test_bits_are_confirmed_on_all_examples() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(96, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU())
    model.append(nn.Linear(256, 96)).eval()
    x = torch.randn(512, 24) @ torch.randn(24, 96) + 0.1 * torch.randn(512, 96)
    common: dict[str, Any] = {"convert_anyway": True, "reconstruct": "off", "sides": "inputs"}
    plan = bp_convert.plan(model, target="size=0.1", calibrate=x, shrink=0, **common)
    every = {one.words: one for one in plan.tried if one.words.endswith("fitted to all examples")}
    assert 2 <= len(every) <= 4
    (taken,) = [one for one in plan.tried if one.taken]
    # Weighing layers otherwise is tried before that, so that either is what is kept.
    assert taken.words in every
    assert taken.error <= 1.02 * min(one.error for one in every.values())
    # Where all examples are fitted to anyhow, there is nothing to confirm.
    few = bp_convert.plan(model, target="size=0.1", calibrate=x[:160], shrink=0, **common)
    assert not [one for one in few.tried if one.words.endswith("fitted to all examples")]


def test_layers_are_weighed_in_the_bits_that_were_best(monkeypatch: pytest.MonkeyPatch) -> None:
    free, coarse = [object()], [object()]
    trying = Trying.__new__(Trying)
    trying.settings = bp_convert.Settings()
    trying.alike, trying.units = {"all layers in int4": coarse}, ()  # type: ignore[dict-item]
    monkeypatch.setattr(Trying, "_ways", lambda *_: {"all layers alike": {}})
    monkeypatch.setattr(Trying, "_weighed", staticmethod(lambda units, _: list(units)))
    words = []
    for told, units in trying._others(free):  # type: ignore[arg-type]
        words.append((told, list(units)))
        if told == "all layers in int4":
            trying.units = coarse  # type: ignore[assignment]
    assert words == [
        ("all layers in int4", coarse),
        ("all layers alike", free),
        ("all layers alike, all layers in int4", coarse),
    ]


def test_norms_are_settled_in_a_rehearsal_as_in_the_conversion(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise([3, *[24] * 5]):
        conv = nn.Conv2d(inputs, outputs, 3, padding=1)
        layers += [conv, nn.ReLU(), nn.BatchNorm2d(outputs)]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(24, 6))
    x = torch.randn(256, 3, 8, 8)
    for _ in range(20):  # norms that have seen data
        model(x)
    model.eval()
    seen: list[list[float]] = []
    whole = Rehearsal.errors

    def both(self: Rehearsal, *given: Any, **more: Any) -> Any:
        found = whole(self, *given, **more)
        with monkeypatch.context() as patched:
            patched.setattr(Norms, "_settle", lambda *_: None)
            without = self._run(given[0], given[1], 0.0, (), {})
        assert found is not None
        assert without is not None
        seen.append([float(one.mean()) ** 0.5 for one in (found, without)])
        return found

    monkeypatch.setattr(Rehearsal, "errors", both)
    settings: Any = {"reconstruct": "off", "convert_anyway": True, "allocation": "uniform"}
    plan = bp_convert.plan(model, target="params=0.15", calibrate=x, **settings)
    small = bp_convert.apply(model, plan, calibrate=x)
    held = x[-32:]
    with torch.no_grad():
        wanted = model(held)
        gap, spread = small.eval()(held) - wanted, wanted - wanted.mean(0)
    real = float(gap.norm() / spread.norm())
    settled, unsettled = seen[0]
    assert abs(log(settled / real)) < 0.5 * abs(log(unsettled / real))
