"""Faults that nobody foresaw: stage and layer are named, and a report can be attached."""

from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner, Result

import bp_convert.kinds.linear_kind
import bp_convert.pipeline
import bp_convert.proof
import bp_convert.run.learning
import bp_convert.run.written
from bp_convert import faults
from bp_convert.batch.attempt import failure, told
from bp_convert.cli.app import app
from bp_convert.cli.session import TRACEBACK
from bp_convert.errors import BpConvertError
from bp_convert.values.recipe import Job

MARK = "only faults that bp-convert foresees"


def run(*words: object) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words])


@pytest.fixture
def mlp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv(TRACEBACK, raising=False)
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "mlp.pt"
    torch.save(nn.Sequential(nn.Linear(768, 768), nn.ReLU(), nn.Linear(768, 10)), path)
    np.save(tmp_path / "x.npy", np.ones((64, 768), "float32"))
    return path


def _broken(*_: Any, **__: Any) -> Any:
    raise ZeroDivisionError("by [red]nought")


BREAKS = {
    "reading the model": (bp_convert.pipeline, "open_model"),
    "reading the examples": (bp_convert.run.learning, "split_for"),
    "planning": (bp_convert.pipeline, "prepared"),
    "converting": (bp_convert.pipeline, "convert"),
    "writing": (bp_convert.proof, "save"),
    "writing the report": (bp_convert.run.written, "document"),
}


@pytest.mark.parametrize("stage", BREAKS)
def test_the_stage_is_named(stage: str, mlp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home, name = BREAKS[stage]
    monkeypatch.setattr(home, name, _broken)
    asked = ("--rank", 8, "--convert-anyway", "--calibrate", "x.npy", "--report", "r.md")
    done = run(mlp, *asked)
    assert done.exit_code == 1
    assert done.stderr.startswith(f"bp-convert: {stage}")
    assert "ZeroDivisionError: by [red]nought (test_faults.py, line" in done.stderr
    assert MARK in done.stderr
    assert "Traceback" not in done.stderr
    (report,) = Path().glob("bp-convert-fault-*.txt")
    assert str(report) in done.stderr
    text = report.read_text()
    assert re.search(rf"^stage +{stage}$", text, re.MULTILINE)
    assert "Traceback (most recent call last)" in text
    for words in ("bp-convert", "torch 2", "python 3", "numpy", "platform"):
        assert words in text


@pytest.mark.parametrize(
    ("files", "stage"),
    [
        (("cli/app", "pipeline", "planner/planning", "counting", "surgery"), "planning"),
        (("cli/app", "pipeline", "surgery", "kinds/linear_kind", "kron/nearest"), "converting"),
        (("cli/app", "pipeline", "fitting/sequence", "calibration/tap"), "fitting"),
        (("cli/app", "pipeline", "verify", "graph/observe"), "verifying"),
        (("cli/app", "pipeline", "costs"), "timing"),
        (("run/job", "pipeline", "storage", "files/converted"), "writing"),
        (("run/job", "training/finetuning", "data/factory"), "training"),
        (("pipeline", "files/read_model", "files/state"), "reading the model"),
        (("pipeline", "elsewhere"), "until then"),
    ],
)
def test_rooms_stand_for_stages(files: tuple[str, ...], stage: str) -> None:
    """Functions of these files call each other, and the last one fails."""
    call: Any = _broken
    for name in reversed(files):
        space = {"call": call}
        path = Path(bp_convert.__file__).parent / f"{name}.py"
        exec(compile("def one():\n    call()", path, "exec"), space)
        call = space["one"]
    with pytest.raises(ZeroDivisionError) as caught:
        call()
    assert faults.looked_into(caught.value, stage="until then").stage == stage


def test_the_layer_in_work_is_named(mlp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill = bp_convert.kinds.linear_kind.LinearKind.fill

    def fails_late(self: Any, module: Any, twin: Any, spread: Any) -> float:
        if module.out_features == 10:
            raise RuntimeError("no such weight")
        return fill(self, module, twin, spread)

    monkeypatch.setattr(bp_convert.kinds.linear_kind.LinearKind, "fill", fails_late)
    done = run(mlp, "--rank", 2, "--convert-anyway", "--convert-head")
    assert done.stderr.startswith("bp-convert: converting, layer 2 (Linear)\n")
    (report,) = Path().glob("bp-convert-fault-*.txt")
    assert re.search(r"^layer +2 \(Linear\)$", report.read_text(), re.MULTILINE)
    assert re.search(r"^last step +2 \(1 of 2\)$", report.read_text(), re.MULTILINE)
    assert re.search(
        r"^model +torch.nn.modules.container.Sequential$", report.read_text(), re.MULTILINE
    )


class _Inner(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise ValueError(f"odd {x * 123}")


def test_the_part_of_a_model_that_failed_is_named() -> None:
    model = nn.Sequential(nn.Identity(), _Inner())
    with pytest.raises(ValueError, match="odd") as caught:
        model(torch.ones(1, 3))
    fault = faults.looked_into(caught.value, stage="verifying", step="so far")
    assert (fault.where, fault.model) == (
        "verifying, layer 1 (_Inner)",
        "torch.nn.modules.container.Sequential",
    )
    text = fault.report(["bp-convert", "a b.pt"])
    assert "bp-convert 'a b.pt'" in text
    assert "odd tensor(...)" in text
    assert "123." not in text  # no numbers of tensors


def test_a_report_holds_no_environment(mlp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_SECRET", "hunter2")
    monkeypatch.setattr(bp_convert.pipeline, "prepared", _broken)
    run(mlp)
    (report,) = Path().glob("bp-convert-fault-*.txt")
    assert "hunter2" not in report.read_text()
    assert len(report.read_text()) < 20_000


def test_where_the_folder_cannot_be_written_the_report_goes_elsewhere(
    mlp: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    other = tmp_path / "temporary"
    other.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(other))
    monkeypatch.setattr(bp_convert.pipeline, "prepared", _broken)
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    done = run(mlp)
    (report,) = other.glob("bp-convert-fault-*.txt")
    assert str(report) in done.stderr


def test_two_reports_of_one_second_are_two_files(mlp: Path) -> None:
    names = {faults.written("one") for _ in range(3)}
    assert len(names) == 3
    assert None not in names


@pytest.mark.slow
def test_the_whole_way_is_shown_when_asked(mlp: Path) -> None:
    (mlp.parent / "broken.py").write_text(
        "import bp_convert.pipeline as p\n"
        "def plan(*a, **k): raise ZeroDivisionError('by nought')\n"
        "p.prepared = plan\n"
        "from bp_convert.cli import main\nmain()\n"
    )
    words = [sys.executable, "broken.py", str(mlp)]
    environment = {**os.environ, "PYTHONPATH": str(Path(bp_convert.__file__).parents[1])}
    done = subprocess.run(words, capture_output=True, text=True, env=environment)
    assert done.stderr.startswith("bp-convert: planning\n")
    assert len(list(Path().glob("bp-convert-fault-*.txt"))) == 1
    done = subprocess.run(
        words, capture_output=True, text=True, env={**environment, TRACEBACK: "1"}
    )
    assert "Traceback (most recent call last)" in done.stderr
    assert MARK not in done.stderr
    assert len(list(Path().glob("bp-convert-fault-*.txt"))) == 1


@pytest.mark.parametrize(
    ("fault", "where"),
    [
        (MemoryError(), "memory"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), "memory"),
        (torch.OutOfMemoryError("CUDA out of memory."), "memory"),
        (OSError(errno.ENOSPC, "No space left on device", "a.pt"), "a.pt"),
    ],
)
def test_a_machine_that_is_too_small_is_no_fault_of_ours(
    fault: Exception, where: str, mlp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise fault

    monkeypatch.setattr(bp_convert.pipeline, "prepared", fails)
    done = run(mlp)
    assert done.exit_code == 1
    assert where in done.stderr.splitlines()[0]
    assert MARK not in done.stderr
    assert not list(Path().glob("bp-convert-fault-*.txt"))


def test_a_fault_of_the_finder_hides_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults, "layer_of", _broken)
    found = faults.looked_into(ValueError("first"), stage="planning")
    assert (found.words, found.where) == ("ValueError: first", "planning")


def test_a_job_s_fault_says_where(tmp_path: Path) -> None:
    job = Job(name="one", arch="bp:svgg")
    fault = faults.looked_into(ValueError("odd"), stage="fitting")
    words = "fitting: ValueError: odd; a fault that bp-convert did not foresee"
    assert failure(job, "id", fault).problem == words
    error = BpConvertError(where="a", found="b", allowed="c", fix="d")
    assert told(error) == "a: b. To do: d"
