"""What ``inspect`` shows of files that hold a model, weights alone, or a folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch import nn
from typer.testing import CliRunner, Result

from bp_convert.cli.app import app
from bp_convert.cli.session import TRACEBACK


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TRACEBACK, "1")
    monkeypatch.chdir(tmp_path)


def run(*words: object) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words])


def _bert() -> nn.Module:
    config = transformers.BertConfig(
        vocab_size=50, hidden_size=64, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=128, max_position_embeddings=16,
    )  # fmt: skip
    return transformers.BertModel(config)


def test_a_transformers_folder_with_its_architecture() -> None:
    _bert().save_pretrained("bert")
    done = run("inspect", "bert", "--arch", "transformers:bert", "--json")
    assert done.exit_code == 0, done.stderr
    names = [layer["name"] for layer in json.loads(done.stdout)["plan"]["layers"]]
    assert "encoder.layer.1.output.dense" in names


STATE = {
    "net.0.weight": torch.zeros(64, 32, dtype=torch.float16),
    "net.1.weight": torch.zeros(64, 32, dtype=torch.float16),
    "scale": torch.tensor(1.0),
}


def _saved(form: str) -> str:
    if form == "safetensors":
        save_file(STATE, "w.safetensors")
        return "w.safetensors"
    held: Any = {
        "state dict": STATE,
        "checkpoint": {"epoch": 3, "model": STATE, "optimizer": {"lr": torch.ones(2)}},
    }[form]
    torch.save(held, "w.pth")
    return "w.pth"


@pytest.mark.parametrize("form", ["state dict", "checkpoint", "safetensors"])
def test_weights_alone_are_listed(form: str) -> None:
    path = _saved(form)
    done = run("inspect", path)
    assert done.exit_code == 0, done.stderr
    assert f"{path}: weights without a model: 3 tensors, 4,097 numbers" in done.stdout
    (row,) = [line for line in done.stdout.splitlines() if line.startswith("net.")]
    assert row.split() == ["net.{0-1}.weight", "x2", "64x32", "float16", "4,096"]
    assert "scale" in done.stdout
    assert "--arch torchvision:resnet18" in " ".join(done.stdout.split())
    assert max(map(len, done.stdout.splitlines())) <= 80
    quiet = run("inspect", path, "-q")
    assert quiet.stdout.splitlines() == [
        f"{path}: weights without a model: 3 tensors, 4,097 numbers"
    ]
    asked = run("inspect", path, "--json")
    assert asked.exit_code == 0, asked.stderr
    held = json.loads(asked.stdout)
    assert held["net.0.weight"] == {"shape": [64, 32], "dtype": "float16"}
    assert len(held) == 3


class _Mine(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)


def test_a_model_that_is_not_trusted_is_no_weights_alone() -> None:
    torch.save(_Mine(), "mine.pt")
    done = run("inspect", "mine.pt")
    assert done.exit_code == 1
    assert "--trust" in done.stderr
    torch.save({"model": _Mine(), "epoch": 2}, "mine.pt")
    assert run("inspect", "mine.pt").exit_code == 1


def test_a_file_that_is_none_keeps_its_error() -> None:
    Path("text.pt").write_text("hello, this is no model")
    done = run("inspect", "text.pt")
    assert done.exit_code == 1
    assert "a text file" in done.stderr
    torch.save({"epoch": 3}, "empty.pt")
    assert run("inspect", "empty.pt").exit_code == 1
