"""Layers that data hardly reached, such as experts: the weights decide where nothing else does."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bp_convert
from bp_convert.calibration.gatherer import Gatherer, Moments, Order
from bp_convert.errors import DataError
from bp_convert.fitting.sequence import _fit
from bp_convert.graph.clone import clone
from bp_convert.graph.walk import walk
from bp_convert.kinds import Factors, Spread
from tests.contract.cases import CASES, Case, given, output
from tests.tolerances import assert_near


class Alone(nn.Module):
    """One layer under a name."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return output(self.layer, x)


def _few(case: Case, rows: int) -> Tensor:
    """Return inputs of so many examples."""
    layer = case.make()
    axis = 1 if isinstance(layer, nn.RNNBase) and not layer.batch_first else 0
    return case.draw(torch.float32).narrow(axis, 0, rows)


def _twin(model: nn.Module) -> tuple[nn.Module, nn.Module, float]:
    """Return the model with its layer at half the rank, and the error by weight alone."""
    (site,) = walk(model)
    widths = site.kind.widths(site.module)
    factors: Factors = {}
    for role, choice in site.kind.choices(site.module, widths).items():
        thin = next(s for s in choice.specs() if s.out[1] == 1 and s.inp[0] == 1)
        factors[role] = thin.model_copy(update={"rank": max(1, thin.full_rank // 2)})
    twin = site.kind.build(site.module, widths, factors, "cpu")
    error = site.kind.fill(site.module, twin, Spread())
    site.kind.carry(site.module, twin)
    converted = clone(model)
    converted.layer = twin  # type: ignore[assignment]
    return converted, twin, error


def _moments(case: Case, model: nn.Module, x: Tensor) -> Moments:
    sites, seen = walk(model), given(case, x)
    order = Order({"layer": 1}, [["layer"]], frozenset())
    gatherer = Gatherer(sites, order, max(1, len(x)), cross=True)
    gatherer.add({"layer": [seen]}, 0, ((x,), {}), {"layer": [seen]})
    return gatherer.result()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_layer_that_nothing_reached_is_the_nearest_to_its_weights(case: Case) -> None:
    model = Alone(case.make()).eval()
    (site,) = walk(model)
    converted, twin, error = _twin(model)
    before = {name: t.clone() for name, t in twin.named_parameters()}
    moments = _moments(case, model, _few(case, 0))
    assert all(moment.count == 0 for found in moments.values() for moment in found)
    with torch.no_grad():
        assert _fit(site, converted, moments) == pytest.approx(error, rel=1e-3)
        dense = dict(twin.to_dense().named_parameters())  # type: ignore[operator]
        for name, parameter in before.items():
            twin.get_parameter(name).copy_(parameter)
        for name, parameter in twin.to_dense().named_parameters():  # type: ignore[operator]
            torch.testing.assert_close(dense[name], parameter, rtol=0, atol=1e-4)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("rows", [1, 2])
def test_a_layer_that_hardly_anything_reached_stays_near_its_weights(case: Case, rows: int) -> None:
    torch.manual_seed(2)
    model = Alone(case.make()).eval()
    (site,) = walk(model)
    converted, twin, error = _twin(model)
    moments = _moments(case, model, _few(case, rows))
    with torch.no_grad():
        found = _fit(site, converted, moments)
    assert math.isfinite(found)
    assert all(bool(p.isfinite().all()) for p in twin.parameters())
    back = site.kind.matrices(twin.to_dense(), Spread())  # type: ignore[operator]
    gap = total = 0.0
    for role, ones in site.kind.matrices(site.module, Spread()).items():
        for mine, theirs in zip(back[role], ones, strict=True):
            gap += float((mine - theirs).detach().square().sum())
            total += float(theirs.detach().square().sum())
    assert (gap / total) ** 0.5 < 1.35 * error + 0.1


class Experts(nn.Module):
    """Rows go to the expert of their sign; the last is for rows that never come."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.experts = nn.ModuleList([nn.Linear(width, width) for _ in range(3)])
        self.head = nn.Linear(width, 5)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        which = torch.where(x[:, 0] > 100, 2, (x[:, 0] > 2.2).long())
        out = torch.zeros_like(y)
        for number, expert in enumerate(self.experts):
            rows = which == number
            out[rows] = expert(y[rows])
        return self.head(out.relu())


@pytest.mark.slow
@pytest.mark.parametrize(
    "asked",
    [{"rank": 0.5, "convert_head": True}, {"rank": 10**6}, {"target": "params=0.5"}],
    ids=str,
)
def test_a_model_of_experts_converts_with_data(asked: dict[str, Any]) -> None:
    """One expert gets a row now and then, and one none at all."""
    model = Experts().eval()
    data = torch.randn(96, 24)
    data[:3, 0] = 3
    assert 0 < int((data[:, 0] > 2.2).sum()) < 6
    small, report = bp_convert.convert(
        model, inputs=["24"], calibrate=data, convert_anyway=True, **asked
    )
    assert "NaN" not in report.model_dump_json()
    for parameter in small.parameters():
        assert bool(parameter.isfinite().all())
    far = torch.randn(40, 24)
    far[:, 0] = 200  # what only the expert sees that no data reached
    with torch.no_grad():
        assert bool(small(far).isfinite().all())
        if asked == {"rank": 10**6}:
            assert_near(small(data), model(data))
            assert_near(small(far), model(far))


def test_data_that_a_layer_makes_infinite_of_names_that_layer() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.Linear(8, 8)).eval()
    with torch.no_grad():
        model[2].weight.mul_(1e36)
    asked: dict[str, Any] = {"rank": 0.5, "convert_anyway": True, "convert_head": True}
    with pytest.raises(DataError, match="not finite"):
        bp_convert.convert(model, inputs=["8"], calibrate=1e4 * torch.randn(40, 8), **asked)
