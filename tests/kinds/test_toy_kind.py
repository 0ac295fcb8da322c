"""To add a kind, write one file and list it: ``tests/toy_kind.py`` is such a file."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import bp_convert
from bp_convert import CheckpointError, Settings
from bp_convert.kinds import KINDS, kind_of, registered
from tests.tolerances import assert_near
from tests.toy_kind import BPScaled, Net, Scaled, ScaledKind

INPUTS = (torch.randn(4, 24, generator=torch.Generator().manual_seed(1)),)
WAYS = {
    "alpha 1": Settings(),
    "alpha 2": Settings(alpha=2, rank=2),
    "rank": Settings(rank=0.4, method="svd"),
    "target": Settings(target="params=50%"),
}


@pytest.fixture
def listed() -> Iterator[None]:
    before = list(KINDS)
    with registered(ScaledKind()):
        yield
    assert before == KINDS


def _net() -> Net:
    torch.manual_seed(0)
    return Net().eval()


@pytest.mark.usefixtures("listed")
@pytest.mark.parametrize("way", WAYS)
def test_a_kind_of_one_file_is_planned_converted_and_counted(way: str) -> None:
    model = _net()
    plan = bp_convert.plan(model, WAYS[way], inputs=INPUTS)
    assert [layer.kind for layer in plan.layers] == ["Scaled", "Scaled", "Linear"]
    replaced = [layer for layer in plan.converted if layer.kind == "Scaled"]
    assert replaced
    if way == "alpha 2":
        assert plan.layers[0].outputs == (48, 96)
        assert plan.layers[1].inputs == (48, 96)
    twin, _ = bp_convert.convert(model, plan=plan, inputs=INPUTS)
    for layer in replaced:
        assert isinstance(twin.get_submodule(layer.name), BPScaled)
        held = sum(p.numel() for p in twin.get_submodule(layer.name).parameters())
        assert layer.params[1] == held
    with FlopCounterMode(display=False) as counter:
        twin.to("meta")(INPUTS[0][:1].to("meta"))
    assert plan.macs is not None
    assert counter.get_total_flops() == 2 * plan.macs.after


@pytest.mark.slow
@pytest.mark.usefixtures("listed")
def test_it_is_fitted_to_data_and_turned_back() -> None:
    model, data = _net(), torch.randn(512, 24)
    settings = Settings(target="params=60%", method="kron-data")
    twin, _ = bp_convert.convert(model, settings, inputs=INPUTS, calibrate=data)
    blind, _ = bp_convert.convert(model, Settings(target="params=60%"), inputs=INPUTS)
    fresh = torch.randn(256, 24)
    with torch.no_grad():
        whole = model(fresh)
        gaps = [float((one(fresh) - whole).square().mean()) for one in (twin, blind)]
        assert gaps[0] < gaps[1]
        dense = bp_convert.to_dense(twin)
        assert all(not isinstance(one, BPScaled) for one in dense.modules())
        assert any(isinstance(one, Scaled) for one in dense.modules())
        assert_near(dense(fresh), twin(fresh))


LOADS = """
import sys, torch, bp_convert
path, given, out, kind = sys.argv[1:]
if kind == "plan":
    from bp_convert.kinds import registered
    from tests.toy_kind import Net, ScaledKind
    with registered(ScaledKind()):
        model = bp_convert.load(path, model=Net)
else:
    model = bp_convert.load(path, trust=["tests.toy_kind"])
with torch.no_grad():
    torch.save(model(torch.load(given, weights_only=True)), out)
"""


@pytest.mark.slow
@pytest.mark.parametrize("form", ["whole", "plan"])
def test_it_is_saved_and_reloaded_in_a_fresh_process(
    listed: None, tmp_path: Path, form: str
) -> None:
    twin, _ = bp_convert.convert(_net(), WAYS["target"], inputs=INPUTS)
    path = tmp_path / ("twin.pt" if form == "whole" else "twin.safetensors")
    bp_convert.save(twin, path)
    torch.save(INPUTS[0], tmp_path / "x.pt")
    command = [sys.executable, "-c", LOADS, path, tmp_path / "x.pt", tmp_path / "y.pt", form]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr
    with torch.no_grad():
        assert torch.equal(torch.load(tmp_path / "y.pt", weights_only=True), twin(INPUTS[0]))
    if form == "whole":  # a kind of one's own is code of one's own
        with pytest.raises(CheckpointError, match=r"--trust"):
            bp_convert.load(path)


def test_it_is_unknown_again_afterwards() -> None:
    assert kind_of(Scaled(4, 4)) is None
    plan = bp_convert.plan(_net(), inputs=INPUTS)
    assert [layer.kind for layer in plan.layers] == ["Linear"]
