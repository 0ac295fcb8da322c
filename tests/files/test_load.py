"""Whole models and weights in files of every kind, onto the CPU."""

from __future__ import annotations

import argparse
import functools
import io
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torchvision
from safetensors.torch import save_file
from torch import nn
from torch.serialization import get_unsafe_globals_in_checkpoint

from bp_convert.errors import CheckpointError
from bp_convert.files.read_model import load_model
from bp_convert.layers import BPConv2d, BPEmbedding, BPLinear
from bp_convert.models import MODELS, build
from bp_convert.pickles.admit import admit
from bp_convert.torch_private import fills_lists_of_classes

RESNET = "torchvision:resnet18"
# One of each family of torchvision's classifiers, the smallest.
FAMILIES = """alexnet convnext_tiny densenet121 efficientnet_b0 efficientnet_v2_s googlenet
inception_v3 maxvit_t mnasnet0_5 mobilenet_v2 mobilenet_v3_small regnet_y_400mf resnet18 resnet50
resnext50_32x4d shufflenet_v2_x0_5 squeezenet1_1 swin_t swin_v2_t vgg11 vgg11_bn vit_b_16
wide_resnet50_2"""


def assert_same(model: nn.Module, source: nn.Module) -> None:
    left, right = model.state_dict(), source.state_dict()
    assert list(left) == list(right)
    for name, value in left.items():
        assert value.device.type == "cpu"
        assert torch.equal(value, right[name]), name


class Other(nn.Module):
    """A class that no one admitted."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        self.body[0].act = torch.relu
        self.register_buffer("scratch", torch.zeros(2), persistent=False)
        self.tied = self.body[0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.body(x)
        return out


@pytest.fixture
def resnet() -> nn.Module:
    return torchvision.models.resnet18(num_classes=3)


@pytest.fixture
def net_file(tmp_path: Path) -> Path:
    path = tmp_path / "my_net.py"
    path.write_text(
        "from torch import nn\n"
        "class Net(nn.Sequential):\n"
        "    def __init__(self, width=4):\n"
        "        super().__init__(nn.Linear(4, width), nn.Linear(width, 2))\n"
        "def make(): return Net()\n"
        "def wrong(): return 3\n"
        "def fails(): raise RuntimeError('no luck')\n"
    )
    return path


@pytest.mark.parametrize("name", ["squeezenet1_1", "mobilenet_v3_small", "shufflenet_v2_x0_5"])
def test_a_pickled_torchvision_model(name: str, tmp_path: Path) -> None:
    source = torchvision.models.get_model(name, weights=None, num_classes=3).eval()
    torch.save(source, tmp_path / "m.pt")
    loaded = load_model(tmp_path / "m.pt")
    assert loaded.source == f"a pickled torchvision {type(source).__name__}"
    assert loaded.arch is None
    assert loaded.notes == ()
    assert not loaded.model.training
    assert_same(loaded.model, source)
    x = torch.randn(1, 3, 64, 64)
    assert torch.equal(loaded.model(x), source(x))


@pytest.mark.parametrize("name", FAMILIES.split())
def test_every_torchvision_family_is_admitted(name: str) -> None:
    options = {"init_weights": True} if name in {"googlenet", "inception_v3"} else {}
    with torch.device("cpu" if name.startswith("regnet") else "meta"):
        model = torchvision.models.get_model(name, weights=None, **options)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    names = get_unsafe_globals_in_checkpoint(buffer)
    assert len(names) > 3
    assert [one for one in names if admit(one) is None] == []


@pytest.mark.parametrize("name", list(MODELS))
def test_the_reference_models_are_admitted(name: str) -> None:
    buffer = io.BytesIO()
    with torch.device("meta"):
        torch.save(build(name), buffer)
    buffer.seek(0)
    assert [one for one in get_unsafe_globals_in_checkpoint(buffer) if admit(one) is None] == []


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.TransformerEncoderLayer(8, 2, activation="gelu"),
        lambda: nn.TransformerEncoderLayer(8, 2, activation=torch.tanh),
        lambda: nn.LSTM(4, 4, 2, bidirectional=True),
        lambda: BPLinear(12, 12, rank=2),
        lambda: BPConv2d(4, 8, 3),
        lambda: BPEmbedding(12, 8),
        lambda: _with(nn.Linear(2, 2), args=argparse.Namespace(lr=0.1), where=Path("a/b")),
        lambda: _with(nn.Linear(2, 2), norm=functools.partial(nn.LayerNorm, eps=1e-6)),
        lambda: _with(nn.Linear(2, 2), bag=torch.nn.functional.silu, kept=torch.zeros(3)),
    ],
    ids=["gelu", "tanh", "lstm", "bplinear", "bpconv", "bpembedding", "values", "partial", "silu"],
)
def test_what_models_keep_is_admitted(make: Callable[[], nn.Module], tmp_path: Path) -> None:
    source = make()
    torch.save(source, tmp_path / "m.pt")
    loaded = load_model(tmp_path / "m.pt").model
    assert type(loaded) is type(source)
    assert_same(loaded, source)
    for key, value in vars(source).items():
        if callable(value) and not isinstance(value, (nn.Module, functools.partial)):
            assert vars(loaded)[key] is value


def _with(module: nn.Module, **attributes: object) -> nn.Module:
    vars(module).update(attributes)
    return module


def test_wrapped_models(resnet: nn.Module, tmp_path: Path) -> None:
    torch.save(nn.DataParallel(resnet), tmp_path / "m.pt")
    loaded = load_model(tmp_path / "m.pt")
    assert type(loaded.model) is type(resnet)
    assert "unwrapped from DataParallel" in loaded.notes
    torch.save({"epoch": 1, "model": resnet, "best": 0.5}, tmp_path / "m.pt")
    loaded = load_model(tmp_path / "m.pt")
    assert_same(loaded.model, resnet)
    assert "epoch, best" in loaded.notes[0]


def test_a_foreign_class_is_named_with_its_remedy(tmp_path: Path) -> None:
    torch.save(Other(), tmp_path / "m.pt")
    with pytest.raises(CheckpointError) as caught:
        load_model(tmp_path / "m.pt")
    assert "tests.files.test_load.Other" in caught.value.found
    assert "--trust tests" in caught.value.fix
    assert "--arch" in caught.value.fix
    assert isinstance(load_model(tmp_path / "m.pt", trust=["tests"]).model, Other)


@pytest.mark.slow
def test_a_class_of_main_needs_its_script(tmp_path: Path, net_file: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        f"import runpy, torch\nexec(open({str(net_file)!r}).read())\n"
        f"torch.save(Net(5), {str(tmp_path / 'm.pt')!r})\n"
    )
    subprocess.run([sys.executable, script], check=True)
    with pytest.raises(CheckpointError, match=r"__main__\.Net") as caught:
        load_model(tmp_path / "m.pt")
    assert "--trust FILE.py" in caught.value.fix
    assert "--arch FILE.py:Net" in caught.value.fix
    loaded = load_model(tmp_path / "m.pt", trust=[str(net_file)]).model
    assert type(loaded).__name__ == "Net"
    assert loaded[0].out_features == 5
    by_arch = load_model(tmp_path / "m.pt", arch=f"{net_file}:Net?width=5")
    assert by_arch.source.startswith("the weights of a pickled Net")
    assert_same(by_arch.model, loaded)


def test_weights_of_a_pickled_model_without_its_class(tmp_path: Path) -> None:
    source = Other()
    torch.save(nn.DataParallel(source), tmp_path / "m.pt")
    (tmp_path / "same.py").write_text(
        "from torch import nn\n"
        "class Same(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.body = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))\n"
        "        self.tied = self.body[0]\n"
    )
    loaded = load_model(tmp_path / "m.pt", arch=f"{tmp_path / 'same.py'}:Same")
    assert_same(loaded.model, source)
    assert "module. removed from the names" in loaded.notes


def test_a_state_dict_needs_arch(resnet: nn.Module, tmp_path: Path) -> None:
    torch.save(resnet.state_dict(), tmp_path / "w.pt")
    save_file(resnet.state_dict(), tmp_path / "w.safetensors")
    for name in ("w.pt", "w.safetensors"):
        with pytest.raises(CheckpointError, match="torchvision:resnet18"):
            load_model(tmp_path / name)
        loaded = load_model(tmp_path / name, arch=f"{RESNET}?num_classes=3")
        assert_same(loaded.model, resnet)
        assert loaded.arch == f"{RESNET}?num_classes=3"
        assert loaded.notes == ()


def test_the_old_format(resnet: nn.Module, tmp_path: Path) -> None:
    path = tmp_path / "w.pt"
    torch.save(resnet.state_dict(), path, _use_new_zipfile_serialization=False)
    assert_same(load_model(path, arch=f"{RESNET}?num_classes=3").model, resnet)
    torch.save(nn.Linear(2, 2), path, _use_new_zipfile_serialization=False)
    with pytest.raises(CheckpointError, match=r"torch 1\.5 or older"):
        load_model(path)


def test_cuda_checkpoints_load_on_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.serialization, "location_tag", lambda storage: "cuda:1")
    torch.save(nn.Linear(2, 2), tmp_path / "m.pt")
    assert b"cuda:1" in (tmp_path / "m.pt").read_bytes()
    assert load_model(tmp_path / "m.pt").model.weight.device.type == "cpu"


def test_a_model_without_values_is_refused(tmp_path: Path) -> None:
    torch.save(nn.Linear(2, 2, device="meta"), tmp_path / "m.pt")
    with pytest.raises(CheckpointError, match="meta"):
        load_model(tmp_path / "m.pt")


def test_a_module_without_its_parts_is_refused(tmp_path: Path) -> None:
    torch.save(_bare(nn.Linear(2, 2)), tmp_path / "m.pt")
    with pytest.raises(CheckpointError, match="incomplete"):
        load_model(tmp_path / "m.pt")


def _bare(module: nn.Module) -> nn.Module:
    vars(module).clear()
    vars(module)["x"] = 1
    return module


def test_other_things_in_a_torch_file(tmp_path: Path) -> None:
    torch.save(torch.zeros(3), tmp_path / "m.pt")
    with pytest.raises(CheckpointError, match="a Tensor, not a model"):
        load_model(tmp_path / "m.pt")
    with pytest.raises(CheckpointError, match="no weights, but a Tensor"):
        load_model(tmp_path / "m.pt", arch=RESNET)
    torch.save({"epoch": 3}, tmp_path / "m.pt")
    with pytest.raises(CheckpointError, match="a dictionary of epoch"):
        load_model(tmp_path / "m.pt", arch=RESNET)


def test_training_objects_in_a_checkpoint_are_not_needed(
    tmp_path: Path, net_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    helper = tmp_path / "training_only.py"
    helper.write_text(
        "import enum, collections\n"
        "class Meter:\n    def __init__(self): self.log = [1, 2]\n"
        "class Bag(dict): pass\n"
        "class Rows(list): pass\n"
        "class Phase(enum.Enum): TRAIN = 1\n"
        "class Slots:\n    __slots__ = ('a',)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    import training_only as t  # type: ignore[import-not-found]

    source = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    slots = t.Slots()
    slots.a = 3
    extras = {
        "meter": t.Meter(),
        "phase": t.Phase.TRAIN,
        "slots": slots,
        "args": argparse.Namespace(lr=3),
    }
    torch.save({"net": source.state_dict(), **extras}, tmp_path / "plain.pt")
    torch.save({"net": source.state_dict(), "bag": t.Bag(a=1)}, tmp_path / "bag.pt")
    rows = t.Rows([1, t.Meter()])
    torch.save({"net": source.state_dict(), "rows": rows}, tmp_path / "rows.pt")
    monkeypatch.delitem(sys.modules, "training_only")
    helper.unlink()
    for name in ("plain.pt", "bag.pt", "rows.pt"):
        if name == "rows.pt" and not fills_lists_of_classes():
            with pytest.raises(CheckpointError, match="a list of an unknown class, which torch"):
                load_model(tmp_path / name, arch=f"{net_file}:make")
            continue
        loaded = load_model(tmp_path / name, arch=f"{net_file}:make")
        assert_same(loaded.model, source)
        assert loaded.source == f"a state dict, key 'net', loaded into {net_file}:make"
    assert "training_only" not in sys.modules


def test_a_converted_file_is_said_to_be_one(tmp_path: Path) -> None:
    from bp_convert.files.converted import save_converted

    for name in ("out.pt", "out.safetensors"):
        path = tmp_path / name
        save_converted(path, model=nn.Linear(2, 2), plan_json="{}", settings_json="{}", arch=None)
        with pytest.raises(CheckpointError, match="already converted") as caught:
            load_model(path)
        assert f"bp-convert dense {path}" in caught.value.fix
        assert "bp_convert.load" in caught.value.fix
