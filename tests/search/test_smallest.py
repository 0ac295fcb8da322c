"""One output, one input, one channel, one row, one column: every search over the smallest sizes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

import bp_convert
from bp_convert.errors import FactorError
from bp_convert.graph.walk import walk
from bp_convert.kinds import Factors, Spread, whole
from bp_convert.search.candidates import Candidates
from bp_convert.search.units import FreeLayer, Unit
from tests.search.models import examples
from tests.search.smallest import SMALLEST

EVERY = pytest.mark.parametrize("name", SMALLEST)
BY_DATA = pytest.mark.parametrize("by_data", [False, True], ids=["weights", "data"])


def _units(model: nn.Module, method: Any, data: torch.Tensor | None) -> list[Unit]:
    wanted = [
        FreeLayer(
            site=site,
            widths=site.kind.widths(site.module),
            shapes=((), ()),
            dense_macs=0,
        )
        for site in walk(model)
    ]
    held = None if data is None else examples(data)
    batches = () if held is None else held.batches
    return Candidates(model, wanted, method, batches, held.digest if held else "").units()


@pytest.mark.slow
@EVERY
@BY_DATA
@pytest.mark.parametrize("method", ["kron", "svd"])
def test_every_option_of_every_smallest_layer_builds_and_saves(
    name: str, by_data: bool, method: str
) -> None:
    make, draw = SMALLEST[name]
    model = make().eval()
    units = _units(model, f"{method}-data" if by_data else method, draw(40) if by_data else None)
    assert {unit.name for unit in units} == {site.name for site in walk(model)}
    saved = 0
    for unit in units:
        kind, module = unit.layer.site.kind, unit.layer.site.module
        matrices = kind.matrices(module, Spread())
        assert unit.shape == tuple(matrices[unit.role][0].shape)
        others = {role: ones[0].shape for role, ones in matrices.items() if role != unit.role}
        kept = [at for at in range(len(unit.errors)) if not unit.picked[at][1]]
        assert kept == [0]
        for at in range(1, len(unit.errors)):
            spec = unit.spec(at)
            assert spec is not None
            assert math.prod(spec.out) == unit.shape[0]
            assert math.prod(spec.inp) >= unit.shape[1]
            assert 0 <= unit.errors[at] <= 1
            assert unit.costs[at, 0] == unit.matrices * spec.params <= unit.dense[0]
            if unit.alone:
                assert spec.params < unit.size
            factors: Factors = {unit.role: spec}
            factors.update({role: whole(cols, rows) for role, (rows, cols) in others.items()})
            twin = kind.build(module, unit.layer.widths, factors, "meta")
            held = sum(parameter.numel() for parameter in twin.parameters())
            assert held == kind.params(module, unit.layer.widths, factors)
            saved += 1
    assert saved >= (2 if name in ("Linear", "Conv1d", "Embedding") else 10)


@EVERY
@BY_DATA
def test_a_model_of_the_smallest_layers_meets_its_target(name: str, by_data: bool) -> None:
    make, draw = SMALLEST[name]
    model = make().eval()
    data = draw(40)
    asked: dict[str, Any] = {"calibrate": examples(data)} if by_data else {}
    if name == "Embedding":
        asked["inputs"] = ["int64:5<4"]
    else:
        asked["inputs"] = ["x".join(map(str, data.shape[1:]))]
    small, report = bp_convert.convert(model, target="params=0.97", **asked)
    assert report.plan.params.after <= 0.97 * report.plan.params.before
    assert len(report.layers) == sum(1 for _ in walk(model))
    assert bool(small(data).isfinite().all())
    assert "NaN" not in report.model_dump_json()


@BY_DATA
@pytest.mark.parametrize("inputs", [1, 7, 36, 256])
def test_a_single_output_is_kept_or_made_of_its_pairs(inputs: int, by_data: bool) -> None:
    """A row of 256 numbers is a table of 16 x 16, whose terms save something; no row is
    low-rank with a gain."""
    model = nn.Sequential(nn.Linear(inputs, 1)).eval()
    (unit,) = _units(model, "kron-data" if by_data else "kron", torch.randn(64, inputs))
    specs = [unit.spec(at) for at in range(1, len(unit.errors))]
    assert bool(specs) == (inputs >= 36)
    assert all(spec is not None and min(spec.inp) > 1 for spec in specs)


@BY_DATA
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused_by_name(bad: float, by_data: bool) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).eval()
    with torch.no_grad():
        model[1].weight[2, 3] = bad
    data = torch.randn(20, 8) if by_data else None
    with pytest.raises(FactorError, match=r"1 \(Linear\)(.|\n)*1 of 64 entries"):
        _units(model, "kron-data" if by_data else "kron", data)
