"""Every command and snippet of the README runs."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torchvision
from torch import nn
from typer.testing import CliRunner

from bp_convert.cli.app import app

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
# Run by other means: the first three make environments, the others are benchmarks.
ELSEWHERE = (
    "pip install",
    "make ",
    "python benchmarks/real_models.py",
    "python benchmarks/quality.py",
    "bp-convert finetune 'bp:svgg",  # these two need FashionMNIST, and take twenty minutes
    "bp-convert full.pt",
)


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def commands() -> list[str]:
    return [
        line.removeprefix("$ ").split("    #")[0].strip()
        for block in blocks("console")
        for line in block.splitlines()
        if line.startswith("$ ")
    ]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the files that the README speaks of."""
    monkeypatch.chdir(tmp_path)
    torch.save(
        nn.Sequential(
            OrderedDict(
                flatten=nn.Flatten(),
                hidden=nn.Linear(3072, 1024),
                relu=nn.ReLU(),
                middle=nn.Linear(1024, 1024),
                classifier=nn.Linear(1024, 10),
            )
        ),
        "model.pt",
    )
    np.savez("examples.npz", inputs=np.random.randn(600, 3072).astype("float32"))
    torch.save(torchvision.models.resnet18().state_dict(), "weights.pth")
    return tmp_path


def test_the_commands_run_in_their_order(folder: Path) -> None:
    done = []
    for command in commands():
        if command.startswith(ELSEWHERE):
            continue
        words = shlex.split(command)
        if words[0] == "bp-convert":
            result = CliRunner().invoke(app, words[1:])
            assert result.exit_code == 0, f"{command}\n{result.output}\n{result.stderr}"
        else:
            assert words[0] == "python"
            script = [sys.executable, str(ROOT / words[1]), *words[2:]]
            printed = subprocess.run(script, capture_output=True, text=True, check=True).stdout
            for line in printed.splitlines():
                assert line in README
        done.append(command)
    assert len(done) >= 9


def test_the_snippets_run_in_their_order(folder: Path) -> None:
    scope: dict[str, Any] = {
        "model": nn.Sequential(nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10))
    }
    for snippet in blocks("python"):
        exec(compile(snippet, "README.md", "exec"), scope)
    x = torch.randn(2, 1024)
    assert scope["again"](x).shape == (2, 10)
    assert scope["exact"].factors.rank == scope["exact"].factors.full_rank


def test_the_settings_file_is_valid(folder: Path) -> None:
    from bp_convert.cli.reading import settings_from

    Path("s.yaml").write_text(blocks("yaml")[0])
    assert settings_from(Path("s.yaml")).layers[0].match == "classifier.3"


def test_what_the_readme_names_exists() -> None:
    for path in re.findall(r"`((?:bp_convert|benchmarks|tests)/[\w/.]+)`", README):
        assert (ROOT / path).exists(), path
    make = (ROOT / "Makefile").read_text()
    for target in re.findall(r"\$ make (\w+)", README):
        assert f"\n{target}:" in make


def test_ci_calls_the_readme_s_test_command() -> None:
    assert "make test" in commands()
    assert "make test" in (ROOT / ".ci" / "run").read_text()
