"""Layers that read one tensor, or stand in blocks that follow each other, may share a factor."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bp_convert
from bp_convert.errors import PlanError
from bp_convert.graph.walk import walk
from bp_convert.groups.stacked import coefficients, errors_on, shared_rows, stacks_of
from bp_convert.kron.als import fit_in_metric
from bp_convert.kron.column_order import Columns
from bp_convert.kron.metric import Full
from bp_convert.values.factors import FactorSpec
from bp_convert.values.plan import Plan

WIDTH = 16


class _Block(nn.Module):
    """Attention whose queries, keys and values look at a few directions of their inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, many) for many in (16, 8, 8))
        self.o = nn.Linear(8, WIDTH)
        common = torch.randn(5, WIDTH) / 4
        with torch.no_grad():
            for one in (self.q, self.k, self.v):
                noise = 0.05 * torch.randn_like(one.weight)
                one.weight.copy_(torch.randn(one.out_features, 5) @ common / 2 + noise)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.q(x)[..., :8] @ self.k(x).transpose(1, 2)
        return x + self.o(scores.softmax(-1) @ self.v(x)) + 0.1 * self.q(x)


class _Net(nn.Module):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.blocks = nn.ModuleList([_Block(), _Block()])
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(x.mean(1))
        return out


def _data(seed: int = 0) -> Tensor:
    return torch.randn(96, 5, WIDTH, generator=torch.Generator().manual_seed(seed))


def _metric() -> Full:
    x = torch.randn(200, 8) @ torch.randn(8, 8)
    return Full(x.t() @ x / 200)


def test_one_metric_gives_the_best_terms_of_all_weights() -> None:
    torch.manual_seed(0)
    metric, weights = _metric(), [torch.randn(many, 8) for many in (6, 10)]
    rows = shared_rows(weights, [metric, metric], [1.0, 3.0])
    scaled = [
        one * (count / metric.energy(one)) ** 0.5
        for one, count in zip(weights, (1.0, 3.0), strict=True)
    ]
    for rank in (1, 3, 6):
        spec = FactorSpec(out=(16, 1), inp=(1, 8), rank=rank)
        best = fit_in_metric(torch.cat(scaled), spec, Columns.of(spec), metric)
        own = [errors_on(one, metric, rows, 6)[rank] for one in weights]
        assert (own[0] + 3 * own[1]) / 4 == pytest.approx(best.error**2, rel=1e-3, abs=1e-7)
        for one, error in zip(weights, own, strict=True):
            near = coefficients(one, metric, rows[:, :rank].t()) @ rows[:, :rank].t()
            lost = metric.energy(one - near.float()) / metric.energy(one)
            assert lost == pytest.approx(error, rel=1e-3, abs=1e-6)


def test_each_weight_takes_its_best_part_in_its_own_metric() -> None:
    torch.manual_seed(1)
    metrics = [_metric(), _metric()]
    weights = [torch.randn(6, 8), torch.randn(6, 8)]
    rows = shared_rows(weights, metrics, [1.0, 1.0])
    for weight, metric in zip(weights, metrics, strict=True):
        errors = errors_on(weight, metric, rows, 6)
        assert errors[0] == 1
        assert (errors[1:] <= errors[:-1]).all()
        near = coefficients(weight, metric, rows[:, :3].t()) @ rows[:, :3].t()
        energy = metric.energy(weight)
        assert metric.energy(weight - near.float()) / energy == pytest.approx(errors[3], rel=1e-3)


def test_who_may_share() -> None:
    sites = {site.name: site for site in walk(_Net())}
    together = [[sites[f"blocks.{i}.{one}"] for one in "qkv"] for i in range(2)]
    found = {one.names for one in stacks_of(together, list(sites.values()), across=True)}
    assert ("blocks.0.q", "blocks.0.k", "blocks.0.v") in found
    assert ("blocks.1.k", "blocks.1.v") in found
    assert ("blocks.0.o", "blocks.1.o") in found
    assert tuple(f"blocks.{i}.{one}" for i in range(2) for one in "qkv") in found
    assert not any("head" in names for names in found)
    inside = stacks_of(together, list(sites.values()), across=False)
    assert {one.names for one in inside} < found
    assert len(inside) == 8


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("target", ["params=0.5", "error=0.3"])
def test_never_above_layers_on_factors_of_their_own(seed: int, target: str) -> None:
    model, data = _Net(seed), _data(seed)
    plan = bp_convert.plan(model, target=target, calibrate=data)
    alone = bp_convert.plan(model, target=target, calibrate=data, groups=False)
    assert not any(one.shares for one in alone.layers)
    assert plan.error is not None
    assert alone.error is not None
    if target.startswith("params"):
        assert plan.error <= alone.error
        assert plan.params.ratio <= 0.5
    else:
        assert plan.params.after <= alone.params.after
        assert plan.error <= 0.3 * (1 + 1e-6)


def _plan(model: nn.Module) -> Plan:
    plan = bp_convert.plan(model, target="params=0.5", calibrate=_data())
    assert any(one.shares for one in plan.layers)
    return plan


def _groups(plan: Plan) -> dict[str, str]:
    return {one.name: one.shares["w2"] for one in plan.layers if one.shares}


def test_shared_factors_are_one_parameter_wherever_the_model_goes(tmp_path: Path) -> None:
    model = _Net()
    plan = _plan(model)
    small, report = bp_convert.convert(model, plan=plan, calibrate=_data())
    x = _data(1)[:3]
    wanted = small(x)
    places = {"copied": copy.deepcopy(small), "made": small}
    for name in ("small.pt", "small.safetensors"):
        path = bp_convert.save(small, tmp_path / name, arch=f"{__file__}:_Net", trust=[__file__])[0]
        places[name] = bp_convert.load(path, model=_Net)
        assert path.stat().st_size < 4 * plan.params.after + 40_000
    for one in places.values():
        assert sum(p.numel() for p in one.parameters()) == plan.params.after
        for name, leader in _groups(plan).items():
            mine: Any = one.get_submodule(name)
            assert mine.w2 is one.get_submodule(leader).w2
        torch.testing.assert_close(one(x), wanted)
    torch.testing.assert_close(bp_convert.to_dense(small)(x), wanted)
    listed = sum(one.params[1] - one.shared[1] for one in report.plan.layers)
    assert listed == plan.params.after
    name, leader = next(iter(_groups(plan).items()))
    assert f"shares w2 with {leader}" in report.plan.layer(name).notes  # type: ignore[union-attr]


def test_bits_and_blocks_keep_what_is_shared() -> None:
    model = _Net()
    asked: dict[str, Any] = {"epochs": 3}
    small, report = bp_convert.convert(
        model, target="params=0.5", calibrate=_data(), store="int8", reconstruct=asked
    )
    groups = _groups(report.plan)
    assert groups
    for name, leader in groups.items():
        mine: Any = small.get_submodule(name)
        assert mine.w2 is small.get_submodule(leader).w2
    assert report.verification is not None


def test_the_fit_to_data_beats_that_to_the_weights() -> None:
    model = _Net().eval()
    plan, data, held = _plan(model), _data(), _data(1)
    with torch.no_grad():
        wanted = model(held)
        fitted, plain = (
            float((bp_convert.apply(model, plan, calibrate=given)(held) - wanted).norm())
            for given in (data, None)
        )
    assert fitted < plain


def test_a_plan_that_splits_a_group_is_refused() -> None:
    model = _Net()
    plan = _plan(model)
    name, leader = next(iter(_groups(plan).items()))

    def edited(which: str, **fields: Any) -> Plan:
        ones = [one.model_copy(update=fields if one.name == which else {}) for one in plan.layers]
        return plan.model_copy(update={"layers": tuple(ones)})

    with pytest.raises(PlanError, match=f"is that of {leader}, which is kept"):
        bp_convert.apply(model, edited(leader, action="kept", factors={}))
    with pytest.raises(PlanError, match="no layer of this plan"):
        bp_convert.apply(model, edited(name, shares={"w2": "nowhere"}))
    spec = plan.layer(name).factors["weight"]  # type: ignore[union-attr]
    fewer = {"weight": spec.model_copy(update={"rank": spec.rank - 1})}
    with pytest.raises(PlanError, match="of other sizes"):
        bp_convert.apply(model, edited(name, factors=fewer))
    made: Any = bp_convert.apply(model, edited(name, shares={}))  # a member may leave
    assert made.get_submodule(name).w2 is not made.get_submodule(leader).w2
