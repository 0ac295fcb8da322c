from __future__ import annotations

from typing import Any

import pytest

import bp_convert
from bp_convert.planner.latency import host_of
from bp_convert.tuning.machine_table import MachineTable, write_table
from bp_convert.values.plan import Plan
from bp_convert.values.settings import Settings
from tests.search.models import mlp

WIDTHS = (300, 320, 280, 310)


def _ranks(plan: Plan) -> list[int]:
    flat = [spec for one in plan.layers for spec in one.factors.values()]
    return [one.rank for one in flat if one.out[1] == one.inp[0] == 1]


@pytest.mark.parametrize("prefer", ["balanced", "quality"])
def test_larger_numbers_of_terms_are_multiples_where_that_is_nearly_free(
    prefer: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    model = mlp(*WIDTHS)
    asked = {"target": "params=0.4", "inputs": [str(WIDTHS[0])], "method": "svd", "prefer": prefer}
    monkeypatch.setenv("BP_CONVERT_CACHE", str(tmp_path))
    before = bp_convert.plan(model, **asked)
    write_table(MachineTable(host_of(model, Settings()), {"aligned": {"step": 8.0}}))
    after = bp_convert.plan(model, **asked)
    assert any(one % 8 for one in _ranks(before))
    assert after.params.ratio <= 0.4
    assert before.error is not None
    assert after.error is not None
    if prefer == "quality":  # it is not free
        assert after.error == before.error
        return
    assert all(one % 8 == 0 for one in _ranks(after) if one >= 32)
    assert len([one for one in _ranks(after) if one >= 32]) >= 2
    assert after.error <= before.error * 1.01
    assert after.params.ratio > 0.38
