"""--arch makes models, downloads nothing, and runs only what the user named."""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path

import pytest
import torch
import torchvision
from torch import nn

import bp_convert
from bp_convert.errors import CheckpointError
from bp_convert.files.arch import arch_factory
from bp_convert.files.read_model import load_model

SCRIPT = """
from torch import nn
class Net(nn.Linear):
    def __init__(self, width=3):
        super().__init__(2, width)
class Needy(nn.Module):
    def __init__(self, width): ...
def make(): return Net(5)
def wrong(): return 3
def fails(): raise RuntimeError("no luck")
number = 3
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "path", [*sys.path])
    path = tmp_path / "some_nets.py"
    path.write_text(SCRIPT)
    yield path
    for name, module in [*sys.modules.items()]:
        if getattr(module, "__file__", None) == str(path):
            del sys.modules[name]


def test_torchvision() -> None:
    model = arch_factory("torchvision:resnet18?num_classes=7")()
    assert isinstance(model, torchvision.models.ResNet)
    assert model.fc.out_features == 7


@pytest.mark.parametrize("name", ["googlenet?init_weights=False", "lraspp_mobilenet_v3_large"])
def test_torchvision_warns_and_downloads_nothing(name: str) -> None:
    with torch.device("meta"):
        assert isinstance(arch_factory(f"torchvision:{name}")(), nn.Module)


def test_bp() -> None:
    assert isinstance(arch_factory("bp:squeezenet?num_classes=3")(), nn.Module)


def test_timm() -> None:
    pytest.importorskip("timm")
    model = arch_factory("timm:resnet18?num_classes=4&in_chans=1")()
    assert model.fc.out_features == 4
    assert model.conv1.in_channels == 1


def test_transformers_folder(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    small = {"hidden_size": 8, "intermediate_size": 16, "num_attention_heads": 2}
    config = transformers.BertConfig(**small, num_hidden_layers=1, vocab_size=30)
    folder = tmp_path / "bert"
    transformers.BertForMaskedLM(config).save_pretrained(folder)
    arch = f"transformers:{folder}"
    for path in (folder, folder / "model.safetensors"):
        loaded = load_model(path, arch=f"{arch}?class=AutoModelForMaskedLM")
        assert type(loaded.model).__name__ == "BertForMaskedLM"
        assert loaded.notes == ()
        # The bare model has a pooler, which a masked language model was saved without.
        with pytest.raises(CheckpointError, match=r"pooler\.dense\.weight"):
            load_model(path, arch=arch)
        bare = load_model(path, arch=f"{arch}?add_pooling_layer=False", allow_missing=True)
        assert type(bare.model).__name__ == "BertModel"
        assert "prefix bert. removed from the names" in bare.notes
    with pytest.raises(CheckpointError, match="AutoModel"):
        arch_factory(f"{arch}?class=pipeline")
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        arch_factory("transformers:bert-base-uncased")


def test_a_folder_of_shards(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    small = {"hidden_size": 8, "intermediate_size": 16, "num_attention_heads": 2}
    config = transformers.BertConfig(**small, num_hidden_layers=1, vocab_size=30)
    source = transformers.BertModel(config)
    source.save_pretrained(tmp_path, max_shard_size="1KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    loaded = load_model(tmp_path, arch=f"transformers:{tmp_path}")
    for name, value in source.state_dict().items():
        assert torch.equal(loaded.model.state_dict()[name], value)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "../../etc/passwd"}}))
    with pytest.raises(CheckpointError, match="no file of this name"):
        load_model(tmp_path, arch=f"transformers:{tmp_path}")
    index.write_text("{")
    with pytest.raises(CheckpointError, match="an index that cannot be read"):
        load_model(tmp_path, arch=f"transformers:{tmp_path}")


def test_a_script(script: Path) -> None:
    assert arch_factory(f"{script}:make", typed=True)().out_features == 5
    assert arch_factory(f"{script}:Net", typed=True)().out_features == 3
    assert arch_factory(f"{script}:Net?width=8", typed=True)().out_features == 8
    assert arch_factory(f"{script}:make", trust=[str(script)])().out_features == 5


def test_a_script_hides_no_module(tmp_path: Path, script: Path) -> None:
    other = tmp_path / "json.py"
    other.write_text(SCRIPT)
    model = arch_factory(f"{other}:make", typed=True)()
    assert model.out_features == 5
    assert sys.modules["json"] is json
    assert type(model).__module__ in sys.modules  # so it can be pickled in this process


def test_a_package_needs_trust(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(script.parent)
    with pytest.raises(CheckpointError, match="--trust some_nets"):
        arch_factory("some_nets:make", typed=True)
    assert arch_factory("some_nets:make", trust=["some_nets"])().out_features == 5
    with pytest.raises(CheckpointError, match="cannot be imported"):
        arch_factory("no_nets:make", trust=["no_nets"])


@pytest.mark.parametrize(
    ("arch", "words"),
    [
        ("resnet18", "no known form"),
        ("torchvision:resnet19", "resnet18"),
        ("torchvision:resnet18?num_classes", "options"),
        ("torchvision:resnet18?weights=DEFAULT", "the option weights"),
        ("torchvision:resnet18?colour=3", "fails with TypeError"),
        ("bp:svg", "svgg"),
        ("timm:resnet18?pretrained=True", "the option pretrained"),
        ("timm:resnet18?checkpoint_path=x.pth", "the option checkpoint_path"),
        ("timm:hf-hub:someone/something", "near names"),
        ("nowhere.py:make", "no Python file"),
        (":", "no known form"),
        ("", "no known form"),
    ],
)
def test_what_is_refused(arch: str, words: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        arch_factory(arch, typed=True)()
    assert words in str(caught.value)
    assert f"--arch {arch}" in caught.value.where


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("wrong", "it makes a int"),
        ("fails", "RuntimeError: no luck"),
        ("Needy", "missing 1 required positional argument"),
        ("number", "no 'number' there"),
        ("mak", "make"),
    ],
)
def test_factories_that_fail(name: str, words: str, script: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        arch_factory(f"{script}:{name}", typed=True)()
    assert words in str(caught.value)


def test_a_script_that_fails_leaves_no_half_module(script: Path) -> None:
    script.write_text("import sys\nsys.exit(3)\n")
    before = {*sys.modules}
    with pytest.raises(CheckpointError, match="SystemExit"):
        arch_factory(f"{script}:make", typed=True)
    assert {*sys.modules} == before


def test_a_bare_transformers_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder says of which class it is; a result finds it from anywhere, or says what to do."""
    transformers = pytest.importorskip("transformers")
    small = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2}
    config = transformers.BertConfig(**small, num_hidden_layers=1, vocab_size=30, num_labels=3)
    source = transformers.BertForSequenceClassification(config).eval()
    monkeypatch.chdir(tmp_path)
    source.save_pretrained("bert")
    for path in ("bert", Path("bert")):
        loaded = load_model(path)
        assert type(loaded.model) is transformers.BertForSequenceClassification
        assert loaded.notes == ()
    with pytest.raises(CheckpointError, match="give the folder bert"):
        load_model("bert/model.safetensors")
    with pytest.raises(CheckpointError, match="AutoModel"):
        arch_factory("transformers:bert?class=BertTokenizer")
    small_model, _ = bp_convert.convert(
        loaded.model.eval(), inputs=["input_ids=int64:1x8<30"], rank=4
    )
    for name in ("out.pt", "out.safetensors"):
        bp_convert.save(
            small_model, name, arch="transformers:bert?class=BertForSequenceClassification"
        )
    ids = torch.arange(8).view(1, 8)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    for name in ("out.pt", "out.safetensors"):
        again = bp_convert.load(tmp_path / name)
        assert torch.equal(again(ids).logits, small_model(ids).logits)
    (tmp_path / "bert").rename(tmp_path / "moved")
    for name in ("out.pt", "out.safetensors"):
        with pytest.raises(CheckpointError, match="bert is not there") as caught:
            bp_convert.load(tmp_path / name)
        assert "load(path, model=YourModel)" in caught.value.fix
        arch = f"transformers:{tmp_path / 'moved'}?class=BertForSequenceClassification"
        for given in ({"arch": arch}, {"model": source}, {"model": lambda: source}):
            again = bp_convert.load(tmp_path / name, **given)
            assert torch.equal(again(ids).logits, small_model(ids).logits)


def test_a_script_that_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    Path("gone_net.py").write_text("from torch import nn\ndef make(): return nn.Linear(16, 16)\n")
    model, _ = bp_convert.convert(
        nn.Linear(16, 16), inputs=["16"], convert_anyway=True, convert_head=True
    )
    bp_convert.save(model, "out.pt", arch="gone_net.py:make")
    monkeypatch.chdir("/")
    assert isinstance(
        bp_convert.load(tmp_path / "out.pt", trust=[str(tmp_path / "gone_net.py")]), nn.Module
    )
    (tmp_path / "gone_net.py").unlink()
    with pytest.raises(CheckpointError, match="is not there"):
        bp_convert.load(tmp_path / "out.pt", trust=[str(tmp_path / "gone_net.py")])


def test_save_pretrained_of_a_part_of_a_converted_model_refuses(tmp_path: Path) -> None:
    """It would write what from_pretrained passes over, and starts at random."""
    transformers = pytest.importorskip("transformers")
    small = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2}
    config = transformers.BertConfig(**small, num_hidden_layers=1, vocab_size=30)
    source = transformers.BertForMaskedLM(config).eval()
    model, _ = bp_convert.convert(source, inputs=["input_ids=int64:1x8<30"], rank=4)
    bp_convert.save(model, tmp_path / "out.pt")
    loaded = bp_convert.load(tmp_path / "out.pt", trust=["transformers"])
    for one in (model.bert, copy.deepcopy(model).bert, loaded.bert):
        with pytest.raises(CheckpointError, match="save the whole model"):
            one.save_pretrained(tmp_path / "folder")
    assert not (tmp_path / "folder").exists()
    source.save_pretrained(tmp_path / "source")  # the source is as it was
    dense = bp_convert.to_dense(model)
    dense.save_pretrained(tmp_path / "dense")
    again = transformers.BertForMaskedLM.from_pretrained(tmp_path / "dense")
    ids = torch.arange(8).view(1, 8)
    torch.testing.assert_close(again(ids).logits, model(ids).logits)
