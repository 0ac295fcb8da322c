"""A target of size is spent on bits and factors alike, and kept by the file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import bp_convert
from bp_convert.bits.stored import stored_bytes
from bp_convert.search import cache
from bp_convert.search.bit_axis import FREE, Noise, in_bits
from bp_convert.search.curves import Curve
from bp_convert.values.factors import FactorSpec
from tests.bits.test_store import Recurrent, ids
from tests.search.units import made_up


class Net(nn.Module):
    """Of layers whose inputs are of few dimensions, so that factors gain."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(24, 256)
        self.second = nn.Linear(256, 256)
        self.third = nn.Linear(256, 128)
        self.head = nn.Linear(128, 32)
        self.kept = nn.Linear(32, 127)  # of a prime width: low rank alone
        self.head.weight.data += torch.randn(32, 1) @ torch.randn(1, 128)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.first(x))
        x = torch.relu(self.third(torch.relu(self.second(x))))
        return self.kept(self.head(x))


def rows(count: int = 256) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    low = torch.randn(6, 24, generator=generator)
    return torch.randn(count, 6, generator=generator) @ low


def error(model: nn.Module, made: nn.Module) -> float:
    x = rows(512)[256:]
    return float(((made.eval()(x) - model(x)).norm() / model(x).norm()).detach())


def test_the_best_bits_are_chosen_layer_by_layer_and_the_file_keeps_the_limit(
    tmp_path: Path,
) -> None:
    model = Net().eval()
    size = sum(one.numel() for one in model.parameters()) * 4
    path = tmp_path / "small.pt"
    seen = set()
    asked = {"calibrate": rows(), "reconstruct": "off", "sides": "inputs"}
    for share in (0.3, 0.12):
        made, report = bp_convert.convert(model, target=f"size={share}", **asked)
        bp_convert.save(made, path, force=True, trust=["tests"])
        assert path.stat().st_size <= share * size
        assert report.plan.bytes.after == stored_bytes(made, report.plan)
        seen |= {(layer.action, layer.store) for layer in report.plan.layers}
    whole, _ = bp_convert.convert(model, target="size=0.12", store="fp32", **asked)
    assert not bp_convert.plan_of(whole).stored
    assert error(model, made) < error(model, whole)
    assert len({store for _, store in seen} - {None}) >= 2
    assert {"replaced", "kept"} <= {action for action, store in seen if store}


def test_a_store_that_is_asked_for_keeps_a_size_in_its_bits(tmp_path: Path) -> None:
    model = Net().eval()
    size = sum(one.numel() for one in model.parameters()) * 4
    made, report = bp_convert.convert(model, target="size=0.2", store="int8", calibrate=rows())
    bp_convert.save(made, tmp_path / "small.pt", trust=["tests"])
    assert (tmp_path / "small.pt").stat().st_size <= 0.2 * size
    assert {layer.store for layer in report.plan.layers} == {"int8"}
    whole = bp_convert.plan(model, target="size=0.2", store="fp32", calibrate=rows())
    assert report.plan.params.after > 2 * whole.params.after


def test_roles_of_one_layer_are_stored_alike() -> None:
    model = Recurrent().eval()
    plan = bp_convert.plan(model, target="size=0.22", calibrate=ids(), convert_head=True)
    assert plan.stored
    made = bp_convert.apply(model, plan, calibrate=ids())
    assert stored_bytes(made, plan) == plan.bytes.after
    assert plan.bytes.after <= 0.22 * plan.bytes.before


def test_layers_that_stay_for_a_reason_are_stored_in_few_bits_too() -> None:
    model = Net().eval()
    model.second.register_forward_hook(lambda module, args, output: output * 1.0)
    plan = bp_convert.plan(model, target="size=0.2", calibrate=rows())
    layer = plan.layer("second")
    assert layer is not None
    assert layer.action == "kept"
    assert layer.store is not None
    left = bp_convert.plan(model, target="size=0.75", exclude="second", calibrate=rows())
    assert left.layer("second").store is None  # type: ignore[union-attr]


def test_errors_of_rounding_are_part_of_the_estimate() -> None:
    model = Net().eval()
    found = [
        bp_convert.plan(model, target="params=1", store=store, calibrate=rows()).error or 0.0
        for store in ("fp32", "int8", "int4", "int3")
    ]
    assert found == sorted(found)
    assert found[0] == 0 < found[1]


def test_what_was_measured_is_kept_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BP_CONVERT_CACHE", str(tmp_path))
    plans = [bp_convert.plan(Net().eval(), target="size=0.15", calibrate=rows()) for _ in range(2)]
    assert plans[0] == plans[1]
    pair = FactorSpec(out=(4, 1), inp=(1, 8))
    each = {"int8": 0.1, "int4": 0.2, "int3": 0.3, "bf16": 0.0, "fp16": 0.0}
    noise = Noise(each, {pair: each}, each)
    cache.write("key", noise.curves(), 1.0)
    held = cache.read("key")
    assert held is not None
    assert Noise.of(held[0]) == noise


def test_every_option_stands_in_each_way() -> None:
    unit = made_up([0.0], params=[64.0])
    unit.dense[-1] = 256.0
    unit.shape = (8, 8)
    each = dict.fromkeys(("int8", "int4", "int3", "bf16", "fp16"), 0.01)
    found = in_bits(unit, Noise(each, {}, each), FREE)
    assert found.whole == FREE
    assert [found.store(at) for at in range(len(FREE))] == list(FREE)
    assert np.allclose(found.errors, [0, 0.01, 0.01, 0.01, 0.01])
    assert Curve(FactorSpec(out=(1, 1), inp=(1, 1)), np.zeros(2)).store is None


@pytest.mark.parametrize(
    ("model", "inputs", "share"),
    [
        (lambda: nn.Sequential(nn.Conv1d(128, 128, 32)), "128x40", 0.26),
        (lambda: nn.Sequential(nn.Embedding(8192, 32)), "int64:1x7<8192", 0.265),
    ],
)
def test_scales_of_the_tensors_that_are_stored_are_counted(
    tmp_path: Path, model: Callable[[], nn.Module], inputs: str, share: float
) -> None:
    """A scale is of one kernel of a convolution, and of one row of a table."""
    torch.manual_seed(0)
    source = model().eval()
    size = sum(one.numel() for one in source.parameters()) * 4
    asked = {"store": "int8", "inputs": [inputs]}
    made, report = bp_convert.convert(source, target=f"size={share}", **asked)
    bp_convert.save(made, tmp_path / "small.pt")
    assert (tmp_path / "small.pt").stat().st_size <= share * size
    assert report.plan.stored
