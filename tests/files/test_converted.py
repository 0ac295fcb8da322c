"""Converted models are written whole and come back as they were, without trust."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torchvision
from torch import Tensor, nn

from bp_convert.errors import CheckpointError
from bp_convert.files.converted import (
    is_converted,
    needs_trust,
    read_converted,
    save_converted,
)
from bp_convert.files.entries import fill, split_ties
from bp_convert.files.read_model import load_model
from bp_convert.graph.clone import all_weights
from bp_convert.layers import BPConv2d, BPLinear
from bp_convert.storage import save_dense

PLAN, SETTINGS = '{"layers": [1.5]}', '{"alpha": 2}'


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.body = BPLinear(4, 4, rank=2)
        self.again = self.body
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight
        self.norm = nn.BatchNorm1d(6)
        self.register_buffer("table", torch.randn(3), persistent=False)
        self.register_buffer("none", None)
        self.head.weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(self.head(self.again(self.body(self.embed(x)))))
        return out


def plain() -> nn.Module:
    return nn.Sequential(
        BPConv2d(4, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), BPLinear(8, 6, bias=False), nn.PReLU()
    )


def save(path: Path, model: nn.Module, arch: str | None = None, force: bool = False) -> list[Path]:
    return save_converted(
        path, model=model, plan_json=PLAN, settings_json=SETTINGS, arch=arch, force=force
    )


def assert_same(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert list(left) == list(right)
    for name, value in left.items():
        assert value.dtype == right[name].dtype
        assert torch.equal(value, right[name]), name


def test_a_whole_model(tmp_path: Path) -> None:
    source = plain()
    assert save(tmp_path / "out.pt", source) == [tmp_path / "out.pt"]
    assert is_converted(tmp_path / "out.pt")
    assert needs_trust(tmp_path / "out.pt") == []
    read = read_converted(tmp_path / "out.pt")
    assert (read.format, read.plan_json, read.settings_json, read.arch) == (1, PLAN, SETTINGS, None)
    assert read.skeleton is not None
    assert_same(read.state, all_weights(source))
    x = torch.randn(2, 4, 3, 3)
    assert torch.equal(read.skeleton.eval()(x), source.eval()(x))
    assert repr(read.skeleton) == repr(source)


def test_weights_for_an_arch(tmp_path: Path) -> None:
    source = Tied()
    save(tmp_path / "out.pt", source, arch="net.py:make")
    read = read_converted(tmp_path / "out.pt")  # no trust, though the class is not admitted
    assert read.skeleton is None
    assert read.arch == f"{Path.cwd() / 'net.py'}:make"  # to be found from any folder
    assert_same(read.state, all_weights(source))
    target = Tied()
    fill(target, read.state)
    assert_same(all_weights(target), all_weights(source))
    assert target.head.weight is target.embed.weight
    assert target.again is target.body


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_safetensors(dtype: torch.dtype, tmp_path: Path) -> None:
    source = Tied().to(dtype)
    paths = save(tmp_path / "my.net.safetensors", source, arch="a:b")
    assert paths == [tmp_path / "my.net.safetensors", tmp_path / "my.net.plan.json"]
    assert is_converted(paths[0])
    content = json.loads(paths[1].read_text())
    assert content["plan"] == json.loads(PLAN)
    assert content["ties"]["head.weight"] == "embed.weight"
    read = read_converted(paths[0])
    assert json.loads(read.plan_json) == json.loads(PLAN)
    assert json.loads(read.settings_json) == json.loads(SETTINGS)
    assert read.arch == "a:b"
    assert read.state.keys() == all_weights(source).keys()
    target = Tied()
    fill(target, read.state)
    assert_same(all_weights(target), all_weights(source))
    kept = sum(p.numel() * p.element_size() for p in split_ties(all_weights(source))[0].values())
    assert paths[0].stat().st_size < kept + 3000


def test_ties_survive_in_a_whole_model(tmp_path: Path) -> None:
    source = Tied()
    save(tmp_path / "out.pt", source)
    assert needs_trust(tmp_path / "out.pt") == ["tests.files.test_converted.Tied"]
    with pytest.raises(CheckpointError, match="--trust tests"):
        read_converted(tmp_path / "out.pt")
    model = read_converted(tmp_path / "out.pt", trust=["tests"]).skeleton
    assert isinstance(model, Tied)
    assert model.head.weight is model.embed.weight
    assert model.again is model.body
    assert not model.head.weight.requires_grad
    assert torch.equal(model.table, source.table)


@pytest.mark.slow
def test_a_fresh_process(tmp_path: Path) -> None:
    model = torchvision.models.squeezenet1_1(num_classes=2).eval()
    model.classifier[1] = BPConv2d(512, 2, 1)
    save(tmp_path / "out.pt", model)
    x = torch.randn(1, 3, 64, 64)
    torch.save({"x": x, "y": model(x)}, tmp_path / "io.pt")
    code = (
        "import torch; from bp_convert.files.converted import read_converted\n"
        "torch.set_num_threads(1)\n"
        "io = torch.load('io.pt'); m = read_converted('out.pt').skeleton\n"
        "torch.testing.assert_close(m(io['x']), io['y'])"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path)


def test_fill_is_strict() -> None:
    model, state = plain(), all_weights(plain())
    kept = {name: value.clone() for name, value in all_weights(model).items()}
    more = {**state, "more": torch.zeros(1)}
    less = {name: value for name, value in state.items() if name != "3.w1"}
    other = {**state, "3.w1": torch.zeros(5)}
    for bad, words in ((more, "no place in it: more"), (less, "for 3.w1"), (other, "other shapes")):
        with pytest.raises(CheckpointError, match=words):
            fill(model, bad)
    assert_same(all_weights(model), kept)


def test_fill_shares_nothing() -> None:
    model, state = plain(), {k: v.detach().clone() for k, v in all_weights(plain()).items()}
    fill(model, state)
    for value in state.values():
        value.zero_()
    assert all_weights(model)["3.w1"].abs().sum() > 0


def test_slices_are_written_without_their_storage(tmp_path: Path) -> None:
    model = nn.Linear(4, 4, bias=False)
    model.weight = nn.Parameter(torch.randn(4000, 4)[:4])
    for name in ("a.pt", "b.pt", "c.safetensors"):
        save(tmp_path / name, model, arch="x:y" if name == "b.pt" else None)
        assert (tmp_path / name).stat().st_size < 4000
        assert torch.equal(read_converted(tmp_path / name).state["weight"], model.weight)
    assert model.weight.untyped_storage().nbytes() == 4000 * 4 * 4  # the source is left alone


@pytest.mark.parametrize("where", ["class", "attribute", "hook", "list"])
def test_what_cannot_be_pickled(where: str, tmp_path: Path) -> None:
    class Local(nn.Module):
        pass

    model = nn.Sequential(nn.Linear(2, 2))
    expected = {"class": "1", "attribute": "0.act", "hook": "0._forward_hooks", "list": "0.acts"}
    if where == "class":
        model.append(Local())
    elif where == "attribute":
        model[0].act = lambda x: x
    elif where == "hook":
        model[0].register_forward_hook(lambda m, x, y: None)
    else:
        model[0].acts = [lambda x: x]
    path = tmp_path / "out.pt"
    path.write_text("precious")
    for call in (save, lambda path, model, force: save_dense(model, path, force=force)):
        with pytest.raises(CheckpointError, match="cannot be pickled") as caught:
            call(path, model, force=True)
        assert expected[where] in caught.value.where
        assert "--arch" in caught.value.fix
    assert path.read_text() == "precious"
    assert [one.name for one in tmp_path.iterdir()] == ["out.pt"]
    save(path, model, arch="net.py:make", force=True)  # weights alone need no pickle of a class


def test_damaged_and_foreign_files(tmp_path: Path) -> None:
    torch.save({"format": 1, "plan": "{}"}, tmp_path / "half.pt")
    with pytest.raises(CheckpointError, match="other contents"):
        read_converted(tmp_path / "half.pt")
    torch.save(nn.Linear(2, 2), tmp_path / "other.pt")
    with pytest.raises(CheckpointError, match="did not write"):
        read_converted(tmp_path / "other.pt")
    save(tmp_path / "out.pt", plain())
    content = torch.load(tmp_path / "out.pt", weights_only=False)
    for key, value, words in (
        ("format", 4, "a newer one"),
        ("settings", None, "other contents"),
        ("plan", 3, "other contents"),
        ("arch", 3, "an arch that is a int"),
        ("skeleton", 3, "no weights"),
        ("skeleton", None, "no weights"),
    ):
        torch.save({**content, key: value}, tmp_path / "bad.pt")
        with pytest.raises(CheckpointError, match=words):
            read_converted(tmp_path / "bad.pt")


def test_a_plan_of_another_conversion(tmp_path: Path) -> None:
    weights, beside = save(tmp_path / "out.safetensors", Tied())
    text = beside.read_text()
    beside.write_text(text.replace("1.5", "2.5"))
    with pytest.raises(CheckpointError, match="another plan"):
        read_converted(weights)
    beside.write_text("{")
    with pytest.raises(CheckpointError, match="no plan that can be read"):
        read_converted(weights)
    beside.unlink()
    with pytest.raises(CheckpointError, match="keep it beside"):
        read_converted(weights)


def test_dense(tmp_path: Path) -> None:
    source = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    assert save_dense(source, tmp_path / "dense.pt") == tmp_path / "dense.pt"
    assert not is_converted(tmp_path / "dense.pt")
    assert_same(load_model(tmp_path / "dense.pt").model.state_dict(), dict(source.state_dict()))
