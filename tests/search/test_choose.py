from __future__ import annotations

from math import sqrt
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from bp_convert.errors import PlanError
from bp_convert.graph.walk import walk
from bp_convert.kinds import Spread
from bp_convert.search.curves import Curve, curves_of
from bp_convert.search.selection import SLOWER, Budget, choose
from bp_convert.search.units import COSTS, FreeLayer, Unit, make_unit
from bp_convert.spending.budget import budget_for
from bp_convert.values.target import Target
from tests.search.models import mlp


def _units(model: nn.Module, **asked: Any) -> list[Unit]:
    units = []
    for site in walk(model):
        widths = site.kind.widths(site.module)
        wanted = FreeLayer(site, widths, ([(1, widths[0])], [(32, widths[0])]),
                        widths[0] * widths[1], **asked)  # fmt: skip
        matrices = site.kind.matrices(site.module, Spread())
        choices = site.kind.choices(site.module, widths)
        for role, ones in matrices.items():
            shape = (ones[0].shape[0], ones[0].shape[1])
            curves = curves_of(ones, choices[role])
            units.append(
                make_unit(wanted, role, shape, len(ones), curves, 1.0, alone=len(matrices) == 1)
            )
    return units


def _budget(units: list[Unit]) -> Budget:
    before = {
        name: float(sum(unit.dense[COSTS.index(name)] for unit in units))
        for name in ("params", "macs")
    }
    return Budget({**before, "size": 4 * before["params"]}, dict.fromkeys(
        ("params", "macs", "size"), 0.0))  # fmt: skip


def _targets(*texts: str) -> list[Target]:
    return [Target.parse(text) for text in texts]


def test_options_cost_what_their_twins_cost() -> None:
    """Every option, counted on the twin itself."""
    model = nn.Sequential(mlp(24, 36, 20), nn.LSTM(20, 12, 2))
    for unit in _units(model):
        site, widths = unit.layer.site, unit.layer.widths
        for at in range(1, len(unit.errors), 7):
            spec = unit.spec(at)
            assert spec is not None
            factors = {
                role: next(choices.specs())
                for role, choices in site.kind.choices(site.module, widths).items()
            }
            rest = site.kind.params(site.module, widths, factors)
            other = site.kind.params(site.module, widths, {**factors, unit.role: spec})
            own = factors[unit.role].params * unit.matrices
            assert unit.costs[at, 0] == other - rest + own
            if unit.alone:
                macs = site.kind.macs(site.module, widths, {unit.role: spec}, unit.layer.shapes[0])
                assert unit.costs[at, 1] == pytest.approx(macs, rel=0.02)
        assert unit.errors[0] == 0
        assert float(unit.costs[1:, 0].max()) < float(unit.costs[0, 0])
        assert bool((unit.errors[1:] >= 0).all())


def test_a_choice_is_polished_to_the_best_of_its_price() -> None:
    model = mlp(60, 72, 48)
    units = _units(model)
    budget = _budget(units)
    found = choose(units, _targets("params=0.3"), budget, guarded=False)
    spent = 0
    for unit in units:
        spec = found.factors[unit.name]["weight"]
        spent += spec.params
        best = min(curve.at(spec.params * (1 + 1e-9)) for curve in unit.curves)
        assert found.errors[unit.name] == pytest.approx(sqrt(best), rel=1e-5)
    assert 0.96 * 0.3 <= spent / budget.before["params"] <= 0.3


def test_small_errors_add_up_in_squares_by_sensitivity() -> None:
    units = _units(mlp(60, 72, 48))
    units[1].sensitivity = 4.0
    found = choose(units, _targets("params=0.9"), _budget(units), guarded=False)
    squares = {name: error**2 for name, error in found.errors.items()}
    expected = squares.get("0", 0) + 4 * squares.get("2", 0)
    assert 0 < expected < 0.1
    assert found.error == pytest.approx(sqrt(expected), rel=0.1)
    assert found.sensitivities == {"0": 1.0, "2": 4.0}


def test_the_more_sensitive_layer_gets_more() -> None:
    params = []
    for sensitivity in (1.0, 4.0):
        units = _units(mlp(60, 72, 48))
        units[1].sensitivity = sensitivity
        found = choose(units, _targets("params=0.3"), _budget(units), guarded=False)
        params.append(found.factors["2"]["weight"].params)
    assert params[1] > params[0]


def test_the_estimate_for_one_layer_is_its_own_error() -> None:
    units = _units(mlp(60, 72))
    for share in (0.9, 0.5, 0.1):
        found = choose(units, _targets(f"params={share}"), _budget(units), guarded=False)
        assert found.error == pytest.approx(found.errors["0"], rel=1e-6)


def test_a_floor_takes_the_options_below_away() -> None:
    (unit,) = _units(mlp(60, 72), floor=0.4)
    assert float(unit.costs[:, 0].min()) >= 0.4 * 60 * 72
    (whole,) = _units(mlp(60, 72), floor=1.0)
    assert len(whole.errors) == 1


def test_what_is_out_of_reach_names_target_and_range() -> None:
    units = _units(mlp(60, 72, 48))
    budget = _budget(units)
    least = sum(float(unit.costs[:, 0].min()) for unit in units)
    with pytest.raises(PlanError, match=r"target params=0\.001") as caught:
        choose(units, _targets("params=0.001"), budget)
    assert f"from {least:,.0f}" in caught.value.allowed
    with pytest.raises(PlanError, match=r"error is at least|out of reach"):
        choose(units, _targets("error=1e-6", "params=0.1"), budget)


def test_of_parameters_and_a_size_the_tighter_is_named() -> None:
    """Both limit the same numbers; a file's head, which stays, takes a share of its size."""
    units = _units(mlp(24, 36))
    budget = _budget(units)
    budget = Budget(budget.before, {**budget.fixed, "size": 0.9 * budget.before["size"]})
    for targets in (("params=0.6", "size=0.8"), ("size=0.8", "params=0.6")):
        with pytest.raises(PlanError, match=r"target size=0\.8"):
            choose(units, _targets(*targets), budget)


def test_the_guard_gives_way_to_a_target_and_says_so() -> None:
    units = _units(mlp(60, 72, 48))
    for unit in units:  # every option is slower than the layer
        for column in (COSTS.index("time"), COSTS.index("time32")):
            unit.costs[:, column] = 2.0
            unit.costs[0, column] = unit.dense[column] = 1.0
    found = choose(units, _targets("params=0.5"), _budget(units))
    assert SLOWER in found.notes
    assert found.factors
    free = choose(units, _targets("params=0.5"), _budget(units), guarded=False)
    assert free.notes == []
    kept = choose(units, _targets("params=1"), _budget(units))
    assert kept.factors == {}
    assert kept.error == 0


def test_what_is_left_of_a_target_is_said() -> None:
    units = _units(mlp(12, 10))
    budget = _budget(units)
    least = int(units[0].costs[:, COSTS.index("params")].min())
    near = choose(units, _targets(f"params={least}"), budget, guarded=False)
    assert near.notes == []
    far = choose(units, _targets(f"params={least + 2}"), budget, guarded=False)
    assert far.factors == near.factors
    words = f"params={least + 2} leaves 2 over: nothing that fits in gains by it"
    assert far.notes == [words]
    fast = choose(units, _targets(f"params={least + 2}"), budget, guarded=False, prefer="speed")
    assert fast.notes == [f"params={least + 2} leaves 2 over: for speed, which is preferred"]


def test_a_layer_no_role_of_which_gains_stays() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.LSTM(12, 10))
    units = _units(model)
    assert len(units) == 2
    budget = budget_for(model, [units[0].layer], {}, None)
    whole = int(budget.before["params"])
    assert choose(units, _targets(f"params={whole}"), budget).factors == {}
    # Within less it may not stay, though: only its twin has one bias a gate.
    merged = choose(units, _targets(f"params={whole - 1}"), budget)
    assert merged.error == 0
    assert units[0].layer.site.kind.params(model[0], (12, 10), merged.factors["0"]) < whole
    half = choose(units, _targets("params=0.5"), budget, guarded=False)
    assert half.factors["0"].keys() == {"ih_l0", "hh_l0"}


def test_a_curve_is_not_followed_beyond_what_it_saves() -> None:
    model = mlp(12, 10)
    site = walk(model)[0]
    spec_curve = curves_of(site.kind.matrices(site.module, Spread())["weight"],
                           site.kind.choices(site.module, (12, 10))["weight"])  # fmt: skip
    wanted = FreeLayer(site, (12, 10), ((), ()), 0)
    unit = make_unit(wanted, "weight", (10, 12), 1, spec_curve, 1.0, alone=True)
    for place, cost in enumerate(unit.costs[1:, 0], start=1):
        spec = unit.spec(place)
        assert spec is not None
        assert spec.params == cost < 120
    none = Curve(spec_curve[0].spec, np.array([1.0], np.float32))
    assert len(make_unit(wanted, "weight", (10, 12), 1, [none], 1.0, alone=True).errors) == 1


def test_a_limit_that_the_others_leave_no_room_for_is_said_so() -> None:
    units = _units(mlp(24, 36))
    budget = _budget(units)
    for unit in units:  # what has fewer parameters takes more multiply-adds
        unit.costs[:, COSTS.index("macs")] = 2e6 / unit.costs[:, 0]
    with pytest.raises(PlanError, match="out of reach beside the other targets") as caught:
        choose(units, _targets("params=0.3", "macs=0.001"), budget)
    assert "loosen one of the targets" in caught.value.fix
    with pytest.raises(PlanError) as caught:
        choose(units, _targets("params=1e-9"), budget)
    assert "beside" not in caught.value.found
