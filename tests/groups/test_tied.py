"""A table that is looked up and multiplied by is converted as one, and stays one."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import bp_convert
from bp_convert.errors import FactorError, PlanError
from bp_convert.groups.table_metric import TableMetric, fit_table, table_errors
from bp_convert.groups.tied_linear import BPTiedLinear
from bp_convert.kron.metric import Diagonal, Full
from bp_convert.layers import BPEmbedding
from bp_convert.storage import read_plan, write_plan
from bp_convert.values.factors import FactorSpec
from bp_convert.values.plan import Plan

ROWS, COLUMNS = 70, 16
TOKENS = torch.randint(0, ROWS, (32, 8), generator=torch.Generator().manual_seed(1))


class _Language(nn.Module):
    def __init__(self, pad: int | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(ROWS, COLUMNS, padding_idx=pad)
        self.body = nn.Sequential(nn.Linear(COLUMNS, 32), nn.ReLU(), nn.Linear(32, COLUMNS))
        self.head = nn.Linear(COLUMNS, ROWS)
        self.head.weight = self.table.weight
        if pad is not None:
            with torch.no_grad():  # as a head trains it
                self.table.weight[pad] = 0.5

    def forward(self, tokens: torch.Tensor) -> Any:
        x = self.table(tokens)
        return self.head(x + self.body(x))


def _is_tied(model: Any) -> bool:
    return model.head.w1 is model.table.w1 and model.head.w2 is model.table.w2


PAIRS = [((8, 2), (7, 10)), ((16, 1), (1, 70)), ((1, 16), (70, 1)), ((4, 4), (9, 8))]


@pytest.mark.parametrize("pad", [None, 0, 5])
@pytest.mark.parametrize(("out", "inp"), PAIRS)
def test_the_layer_multiplies_by_the_table(out: Any, inp: Any, pad: int | None) -> None:
    torch.manual_seed(0)
    table = BPEmbedding(ROWS, COLUMNS, pad, factors=FactorSpec(out=out, inp=inp, rank=2))
    if pad is not None:
        table.padding_row.normal_()
    head = BPTiedLinear(COLUMNS, ROWS, factors=FactorSpec(out=inp, inp=out, rank=2))
    head.tie_(table)
    x = torch.randn(2, 3, COLUMNS)
    y = head(x)
    torch.testing.assert_close(y, x @ table.weight.t() + head.bias)
    torch.testing.assert_close(head.to_dense()(x), y)
    assert y.is_contiguous()
    y.sum().backward()
    assert table.w1.grad is not None
    both = copy.deepcopy(nn.ModuleList([table, head]))
    if pad is not None:
        with torch.no_grad():
            both[0].padding_row.add_(1)
    torch.testing.assert_close(both[1](x), x @ both[0].weight.t() + head.bias)


def test_a_table_of_other_sizes_is_refused() -> None:
    table = BPEmbedding(ROWS, COLUMNS, factors=FactorSpec(out=(8, 2), inp=(7, 10)))
    head = BPTiedLinear(COLUMNS, ROWS, factors=FactorSpec(out=(7, 10), inp=(4, 4)))
    with pytest.raises(FactorError, match="exchanged"):
        head.tie_(table)
    with pytest.raises(FactorError, match="at least 70"):
        BPTiedLinear(COLUMNS, ROWS, factors=FactorSpec(out=(7, 9), inp=(4, 4)))


def _metric(table: torch.Tensor) -> TableMetric:
    tokens = Diagonal(torch.rand(len(table)).pow(4).double() + 1e-3)
    x = torch.randn(200, table.shape[1]) @ torch.randn(table.shape[1], table.shape[1])
    return TableMetric(table, [tokens], [Full(x.t() @ x / 200)])


def test_the_fit_is_a_minimum_of_both_errors() -> None:
    torch.manual_seed(0)
    table = torch.randn(40, 12)
    metric = _metric(table)
    assert metric.energy(table.t()) == pytest.approx(1, abs=1e-6)
    left, right, error = fit_table(table, metric, 4, sweeps=50)
    assert metric.energy((table - left @ right).t()) == pytest.approx(error, rel=1e-4)
    for scale in (1e-2, 1e-3):
        for _ in range(20):
            near = (left + scale * torch.randn_like(left)) @ (
                right + scale * torch.randn_like(right)
            )
            assert metric.energy((table - near).t()) > error
    errors = table_errors(table, metric)
    assert errors[0] == 1
    assert errors[-1] == 0
    assert (errors[1:] <= errors[:-1]).all()


@pytest.mark.parametrize("pad", [None, 0])
@pytest.mark.parametrize("data", [False, True])
def test_both_are_converted_as_one(tmp_path: Path, pad: int | None, data: bool) -> None:
    model = _Language(pad)
    asked: dict[str, Any] = {"calibrate": TOKENS} if data else {"inputs": ["int64:1x8<70"]}
    small, report = bp_convert.convert(model, target="params=0.5", **asked)
    assert _is_tied(small)
    assert model.head.weight is model.table.weight
    count = sum(one.numel() for one in small.parameters())
    assert count == report.plan.params.after <= 0.5 * report.plan.params.before
    listed = sum(one.params[1] - one.shared[1] for one in report.plan.layers)
    assert listed + sum(one.params[1] for one in report.plan.others) == count
    head = report.plan.layer("head")
    assert head is not None
    assert head.shares == {"w1": "table", "w2": "table"}
    assert "shares w1, w2 with table" in head.notes
    assert _is_tied(copy.deepcopy(small))
    with torch.no_grad():
        wanted = small(TOKENS[:2])
        dense: Any = bp_convert.to_dense(small)
        assert dense.head.weight is dense.table.weight
        torch.testing.assert_close(dense(TOKENS[:2]), wanted)
        for name in ("small.pt", "small.safetensors"):
            trust = [str(Path(__file__))]
            written = bp_convert.save(small, tmp_path / name, arch=f"{__file__}:_Language")
            again: Any = bp_convert.load(tmp_path / name, model=_Language(pad), trust=trust)
            assert _is_tied(again)
            torch.testing.assert_close(again(TOKENS[:2]), wanted)
            assert written[0].stat().st_size < 4 * count + 40_000
    small.table.weight.sum().backward()  # trained as one
    torch.optim.SGD(small.parameters(), 1e-2).step()
    assert _is_tied(small)


def test_without_a_target_both_stay() -> None:
    plan = bp_convert.plan(_Language(), rank=0.5, inputs=["int64:1x8<70"], convert_anyway=True)
    assert plan.layer("table").reason == "its weight is tied to head.weight"  # type: ignore[union-attr]
    kept = bp_convert.plan(
        _Language(), target="params=0.9", inputs=["int64:1x8<70"], exclude=["head"]
    )
    assert "is tied to head.weight" in kept.layer("table").reason  # type: ignore[union-attr]


def _edited(plan: Plan, name: str, **fields: Any) -> Plan:
    layers = [one.model_copy(update=fields if one.name == name else {}) for one in plan.layers]
    return plan.model_copy(update={"layers": tuple(layers)})


def test_a_plan_that_splits_the_group_is_refused(tmp_path: Path) -> None:
    model = _Language()
    plan = bp_convert.plan(model, target="params=0.5", inputs=["int64:1x8<70"])
    assert plan.layer("table").action == "replaced"  # type: ignore[union-attr]
    plan = read_plan(write_plan(plan, tmp_path / "plan.json"))
    assert _is_tied(bp_convert.apply(model, plan))
    kept: dict[str, Any] = {"action": "kept", "factors": {}, "shares": {}}
    with pytest.raises(PlanError, match="is kept"):
        bp_convert.apply(model, _edited(plan, "table", **kept))
    with pytest.raises(PlanError, match="tied to that of table"):
        bp_convert.apply(model, _edited(plan, "head", **kept))
    spec = FactorSpec(out=(7, 10), inp=(4, 4), rank=1)
    with pytest.raises(PlanError, match="of other sizes"):
        bp_convert.apply(model, _edited(plan, "head", factors={"weight": spec}))
    both = _edited(_edited(plan, "head", **kept), "table", **kept)
    made: Any = bp_convert.apply(model, both)
    assert made.head.weight is made.table.weight
