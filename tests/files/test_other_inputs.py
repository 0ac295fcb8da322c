"""Checkpoints of Lightning, timm and open_clip, and models that were saved on a GPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import bp_convert
from bp_convert.errors import CheckpointError


class Settings:
    """What a Lightning module keeps among its hyper-parameters, of a class that nobody trusts."""


NET = """
from torch import nn

def net():
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))

class Task(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = net()
"""


@pytest.fixture
def lightning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    """Write what a Trainer of Lightning writes, and return its inner model."""
    monkeypatch.chdir(tmp_path)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    Path("net.py").write_text(NET)
    content: dict[str, Any] = {
        "epoch": 3,
        "pytorch-lightning_version": "2.4.0",
        "state_dict": {f"model.{name}": one for name, one in model.state_dict().items()},
        "callbacks": {"ModelCheckpoint": {"best_model_score": torch.tensor(0.5)}},
        "optimizer_states": [{"state": {0: {"exp_avg": torch.zeros(4, 4)}}}],
        "hyper_parameters": {"lr": 1e-3, "settings": Settings()},
    }
    torch.save(content, "last.ckpt")
    return model


@pytest.mark.parametrize("factory", ["net", "Task"])
def test_a_lightning_checkpoint_needs_an_arch_and_no_trust(
    lightning: nn.Module, factory: str
) -> None:
    with pytest.raises(CheckpointError, match="a Lightning checkpoint") as told:
        bp_convert.open_model("last.ckpt")
    assert "--arch" in told.value.fix
    model = bp_convert.open_model("last.ckpt", arch=f"net.py:{factory}").model
    inner: Any = getattr(model, "model", model)
    assert torch.equal(inner[1].weight, lightning[1].weight)


def test_a_folder_of_timm_is_a_model(tmp_path: Path) -> None:
    timm = pytest.importorskip("timm")
    import transformers.conversion_mapping  # noqa: F401  # whose rules are not for such models
    from timm.models import save_for_hf

    given = {"num_classes": 5, "in_chans": 1}
    model = timm.create_model("test_resnet", pretrained=False, **given)
    save_for_hf(model, tmp_path, model_args=given, safe_serialization=True)
    loaded = bp_convert.open_model(tmp_path)
    assert loaded.arch is not None
    assert loaded.arch.startswith("timm:test_resnet?")
    for name, one in loaded.model.state_dict().items():
        assert torch.equal(one, model.state_dict()[name]), name


def test_a_checkpoint_of_open_clip_says_what_to_install(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    torch.save(model.state_dict(), tmp_path / "open_clip_pytorch_model.bin")
    (tmp_path / "open_clip_config.json").write_text(json.dumps({"model_cfg": {}}))
    with pytest.raises(CheckpointError, match="pip install open_clip_torch"):
        bp_convert.open_model(tmp_path)
    (tmp_path / "clip.py").write_text(NET)
    loaded = bp_convert.open_model(tmp_path, arch=f"{tmp_path / 'clip.py'}:net").model
    assert torch.equal(loaded.state_dict()["0.weight"], model[0].weight)


@pytest.mark.parametrize(
    ("name", "words"), [("m.gguf", "a folder of a GGUF"), ("saved_model.pb", "TensorFlow")]
)
def test_a_folder_of_another_framework_says_what_to_give(
    tmp_path: Path, name: str, words: str
) -> None:
    (tmp_path / name).write_bytes(b"GGUF\x03")
    with pytest.raises(CheckpointError, match=words):
        bp_convert.open_model(tmp_path)


def test_a_model_of_a_gpu_opens_on_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.serialization, "location_tag", lambda _: "cuda:0")
    torch.save(nn.Sequential(nn.Linear(4, 4)), tmp_path / "whole.pt")
    monkeypatch.undo()
    if not torch.cuda.is_available():
        with pytest.raises(RuntimeError, match="CUDA"):  # so it says that it is one
            torch.load(tmp_path / "whole.pt", weights_only=False)
    model = bp_convert.open_model(tmp_path / "whole.pt").model
    assert {one.device.type for one in model.parameters()} == {"cpu"}
