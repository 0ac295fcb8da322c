"""Models whose weights are stored in few bits: converted, saved, loaded, refused, trained."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import bp_convert
from bp_convert.bits.grid import FORMS
from bp_convert.bits.packing import pack
from bp_convert.bits.stored import stored_forms
from bp_convert.errors import CheckpointError, PlanError


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Conv2d(3, 24, 3, padding=1), nn.ReLU(), nn.AvgPool2d(4), nn.Flatten()),
        *(nn.Linear(96, 64), nn.ReLU(), nn.Linear(64, 10)),
    ).eval()


def images(count: int = 64) -> Tensor:
    return torch.randn(count, 3, 8, 8, generator=torch.Generator().manual_seed(1))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(120, 24)
        self.rnn = nn.LSTM(24, 32, batch_first=True, bidirectional=True)
        self.attend = nn.MultiheadAttention(64, 4, batch_first=True)
        self.head = nn.Linear(64, 120, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        y = self.rnn(self.table(ids))[0]
        return self.head(self.attend(y, y, y)[0])


def ids(count: int = 48) -> Tensor:
    return torch.randint(120, (count, 7), generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("store", list(FORMS))
@pytest.mark.parametrize("calibrated", [False, True])
@pytest.mark.parametrize("target", ["params=1", "params=0.5"])
def test_every_weight_lies_on_its_grid(store: str, calibrated: bool, target: str) -> None:
    model = small()
    data = images() if calibrated else None
    made, report = bp_convert.convert(
        model, target=target, store=store, calibrate=data, inputs=["3x8x8"]
    )
    plan = report.plan
    forms = stored_forms(made, plan)
    assert forms
    weights = dict(made.named_parameters())
    assert all(pack(weights[name], form) is not None for name, form in forms.items())
    assert {layer.store for layer in plan.stored} == {store}
    assert plan.bytes.after < plan.bytes.before * (0.55 if FORMS[store].bits == 16 else 0.4)
    dense, _ = bp_convert.convert(
        model, target=target, store="fp32", calibrate=data, inputs=["3x8x8"]
    )
    x = images(16)
    gap = (made(x) - dense(x)).norm() / dense(x).norm()
    bound = {16: 0.01, 8: 0.03, 4: 0.3, 3: 0.6}[FORMS[store].bits]
    assert 0 < gap < bound


@pytest.mark.parametrize("store", ["int4", "int3"])
def test_data_makes_up_for_rounding(store: str) -> None:
    model, x = Recurrent().eval(), ids()
    kwargs = {"target": "params=1", "store": store}
    with_data, _ = bp_convert.convert(model, calibrate=x, **kwargs)
    without, _ = bp_convert.convert(model, inputs=["int64:1x7<120"], **kwargs)
    gap = [float((one.eval()(x) - model(x)).detach().norm()) for one in (with_data, without)]
    assert gap[0] < gap[1]


def test_files_have_the_bits_and_load_in_a_fresh_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.py").write_text(
        "from torch import nn\ndef small():\n    return nn.Sequential("
        "*(nn.Conv2d(3, 24, 3, padding=1), nn.ReLU(), nn.AvgPool2d(4), nn.Flatten()), "
        "*(nn.Linear(96, 64), nn.ReLU(), nn.Linear(64, 10)))\n"
    )
    asked = {"target": "params=0.6", "calibrate": images(), "inputs": ["3x8x8"], "ways": "factored"}
    made, report = bp_convert.convert(small(), store="int4", **asked)
    whole, _ = bp_convert.convert(small(), store="fp32", **asked)
    saved = report.plan.bytes.before - report.plan.bytes.after
    named = {"arch": "model.py:small", "trust": ["model.py"]}
    for name, more in (("alone.pt", {}), ("made.pt", named), ("made.safetensors", named)):
        bp_convert.save(made, name, **more)
        bp_convert.save(whole, f"whole-{name}", **more)
        sizes = [(tmp_path / one).stat().st_size for one in (name, f"whole-{name}")]
        assert sizes[0] < sizes[1] - 0.4 * saved
    x = images(4)
    torch.save((x, made.eval()(x)), "out.pt")
    code = (
        "import torch, bp_convert; x, y = torch.load('out.pt')\n"
        "for name, trust in (('alone.pt', ()), ('made.pt', ['model.py']), "
        "('made.safetensors', ['model.py'])):\n"
        "    model = bp_convert.load(name, trust=trust)\n"
        "    assert torch.equal(model(x), y)\n"
        "    assert [one.store for one in bp_convert.plan_of(model).stored] == ['int4'] * 3\n"
        "bp_convert.save(model, 'again.pt')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    assert torch.equal(bp_convert.load("again.pt")(x), made(x))


def test_a_file_holds_its_plan_and_what_stands_for_packed_numbers_once(tmp_path: Path) -> None:
    asked = {"target": "params=0.6", "inputs": ["3x8x8"], "ways": "factored"}
    made, report = bp_convert.convert(small(), store="int8", **asked)
    path = bp_convert.save(made, tmp_path / "small.pt")[0]
    with zipfile.ZipFile(path) as archive:
        tensors = sum("/data/" in one for one in archive.namelist())
        text = archive.read(next(one for one in archive.namelist() if one.endswith("data.pkl")))
    assert text.count(f'"fingerprint":"{report.plan.fingerprint}"'.encode()) == 1
    packed = len(stored_forms(made, report.plan))
    assert packed > 1
    # Codes and scales of each, one number for all, and what is stored as it is.
    assert tensors == 2 * packed + 1 + len(made.state_dict()) - packed


def test_weights_that_changed_are_refused_and_rounded_again_where_asked(tmp_path: Path) -> None:
    made, _ = bp_convert.convert(small(), target="params=1", store="int8", inputs=["3x8x8"])
    with torch.no_grad():
        made[4].weight.add_(1e-4)
    with pytest.raises(CheckpointError, match="changed since"):
        bp_convert.save(made, tmp_path / "no.pt")
    again = bp_convert.store(made, "int4")
    bp_convert.save(again, tmp_path / "again.pt")
    x = images(3)
    assert torch.equal(bp_convert.load(tmp_path / "again.pt")(x), again.eval()(x))
    whole = bp_convert.store(made, "fp32")
    assert not bp_convert.plan_of(whole).stored
    bp_convert.save(whole, tmp_path / "whole.pt")
    assert torch.equal(bp_convert.load(tmp_path / "whole.pt")(x), made.eval()(x))
    assert (tmp_path / "again.pt").stat().st_size < (tmp_path / "whole.pt").stat().st_size


def test_training_goes_on_from_the_numbers_that_are_stored(tmp_path: Path) -> None:
    model, x = small(), images()
    made, _ = bp_convert.convert(model, target="params=1", store="int4", inputs=["3x8x8"])
    trained, report = bp_convert.finetune(
        made, x, teacher=model, steps=3, batch=16, validation=0.25
    )
    assert any("few bits before" in note for note in report.notes)
    assert not bp_convert.plan_of(trained).stored
    assert bp_convert.plan_of(made).stored
    bp_convert.save(trained, tmp_path / "trained.pt")


def test_rules_and_layers_that_are_left_alone() -> None:
    asked = {"target": "params=1", "inputs": ["3x8x8"]}
    rules = [{"match": "4", "keep": True, "store": "int4"}]
    plan = bp_convert.plan(small(), layers=rules, store="int8", exclude="0", **asked)
    assert {layer.name: layer.store for layer in plan.layers} == {
        "0": None,
        "4": "int4",
        "6": "int8",
    }
    assert not bp_convert.plan(small(), store="fp32", **asked).stored


def test_tied_weights_are_rounded_once_and_stay_tied(tmp_path: Path) -> None:
    model = Recurrent()
    model.head = nn.Linear(24, 120, bias=False)
    model.head.weight = model.table.weight
    model.attend, model.rnn = nn.Identity(), nn.Identity()
    model.forward = None  # type: ignore[assignment]
    tied = nn.Sequential(model.table, model.head).eval()
    made, report = bp_convert.convert(
        tied, target="params=1", store="int4", calibrate=ids(), convert_head=True
    )
    assert made[0].weight is made[1].weight
    bp_convert.save(made, tmp_path / "tied.pt")
    back = bp_convert.load(tmp_path / "tied.pt")
    assert back[0].weight is back[1].weight
    assert torch.equal(back(ids(4)), made.eval()(ids(4)))
    assert len(report.plan.stored) == 2


def test_what_a_floating_type_does_not_hold_is_refused() -> None:
    model = small()
    with torch.no_grad():
        model[4].weight[0, 0] = 1e14  # whose root, in factors, is too large as well
    with pytest.raises(PlanError, match="do not hold"):
        bp_convert.convert(model, target="params=1", store="fp16", inputs=["3x8x8"])
    bp_convert.convert(model, target="params=1", store="bf16", inputs=["3x8x8"])


@pytest.mark.parametrize("change", ["codes", "shape", "store"])
def test_parts_that_do_not_fit_are_refused(tmp_path: Path, change: str) -> None:
    made, _ = bp_convert.convert(small(), target="params=1", store="int8", inputs=["3x8x8"])
    path = tmp_path / "small.pt"
    bp_convert.save(made, path)
    content = torch.load(path, weights_only=False)
    told = content["packed"]["4.weight"]
    if change == "codes":
        content["state"]["4.weight::codes"] = content["state"]["4.weight::codes"][:-1].clone()
    elif change == "shape":
        told["shape"] = [1 << 40, 1 << 20]
    else:
        told["store"] = "int5"
    torch.save(content, path)
    with pytest.raises(CheckpointError, match="packed weights"):
        bp_convert.load(path)


def test_the_report_tells_bytes_parameters_and_bits_apart() -> None:
    _, report = bp_convert.convert(small(), target="params=1", store="int8", inputs=["3x8x8"])
    text = str(report)
    assert "3 layers dense in int8" in text
    assert "bits a parameter on average" in text
    assert "of the bytes" in report.verdict
    assert "all layers dense, in int8" in report.verdict
    assert json.loads(report.model_dump_json(by_alias=True))["plan"]["layers"][0]["store"] == "int8"


@pytest.mark.parametrize("calibrated", [False, True])
def test_plain_bits_look_for_no_factors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calibrated: bool
) -> None:
    def searched(*_: object, **__: object) -> None:
        raise AssertionError("pairs were searched")

    monkeypatch.setenv("BP_CONVERT_CACHE", str(tmp_path))
    monkeypatch.setattr("bp_convert.search.candidates.curves_of", searched)
    asked = {"calibrate": images()} if calibrated else {"inputs": ["3x8x8"]}
    plan = bp_convert.plan(small(), target="params=1", store="int4", **asked)
    assert not plan.converted
    assert {layer.store for layer in plan.stored} == {"int4"}
    with pytest.raises(AssertionError, match="searched"):
        bp_convert.plan(small(), target="params=0.99", store="int4", **asked)
