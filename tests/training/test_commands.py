"""The commands that train, on real files."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner, Result

import bp_convert
from bp_convert.cli.app import app
from bp_convert.cli.reading import training_from
from bp_convert.cli.session import TRACEBACK
from bp_convert.data import Split
from bp_convert.errors import TrainingError
from bp_convert.run.written import Outputs
from tests.training import runs
from tests.training.test_feed import names


def run(*words: object) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words])


def ok(*words: object) -> Result:
    done = run(*words)
    assert done.exit_code == 0, done.output + done.stderr
    return done


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a model and data, which is the current one."""
    monkeypatch.setenv(TRACEBACK, "1")
    monkeypatch.chdir(tmp_path)
    torch.save(nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4)), "model.pt")
    points, labels = runs.data(400)
    np.savez("data.npz", x=points.numpy(), y=labels.numpy())
    np.savez("other.npz", x=points[:50].flip(0).numpy(), y=labels[:50].flip(0).numpy())
    return tmp_path


@pytest.mark.slow
def test_from_a_model_through_training_conversion_and_training_again() -> None:
    done = ok("finetune", "model.pt", "--data", "data.npz", "--epochs", 6, "--lr", 0.01,
              "-o", "full.pt")  # fmt: skip
    assert "validation accuracy:" in done.stdout
    assert "wrote full.pt" in done.stdout
    done = ok("full.pt", "--rank", 2, "--convert-anyway", "-o", "small.pt",
              "--finetune", "data=data.npz epochs=3", "--finetune", "lr=0.01",
              "--finetune", "folder=run", "--report", "r.json", "--report", "r.html")  # fmt: skip
    assert "teacher" in done.stdout
    assert "trained" in done.stdout
    report = json.loads(Path("r.json").read_text())["training"]
    assert report["after"]["loss"] < report["before"]["loss"]
    assert report["teacher"]["accuracy"] > 0.5
    assert "Training" in Path("r.html").read_text()
    # What the conversion alone gave is not the result.
    verdict = json.loads(Path("r.json").read_text())["verdict"]
    assert "before use" not in verdict
    assert "Trained for" in verdict
    assert list(Path("run").glob("step-*.pt"))
    small = bp_convert.load("small.pt")
    assert isinstance(small[0], bp_convert.BPLinear)
    done = ok("finetune", "small.pt", "--teacher", "full.pt", "--data", "data.npz",
              "--steps", 4, "--validation", "other.npz", "--json", "-o", "again.pt")  # fmt: skip
    printed = json.loads(done.stdout)
    assert printed["steps"] == 4
    again = bp_convert.load("again.pt")
    assert type(again) is nn.Sequential
    assert not torch.equal(again[0].w1, small[0].w1)


@pytest.mark.slow
def test_a_run_is_resumed() -> None:
    words = ["finetune", "model.pt", "--data", "data.npz", "--folder", "run", "-q"]
    ok(*words, "-o", "one.pt")
    done = run(*words, "-o", "two.pt")
    assert done.exit_code == 1
    assert "--resume" in done.stderr
    assert not Path("two.pt").exists()
    ok(*words, "--resume", "-o", "two.pt")
    one, two = (torch.load(f"{n}.pt", weights_only=False).state_dict() for n in ("one", "two"))
    assert all(torch.equal(one[key], two[key]) for key in one)


@pytest.mark.slow
def test_an_untrained_architecture_is_trained() -> None:
    points = np.random.default_rng(0).normal(size=(8, 1, 28, 28)).astype("float32")
    np.savez("images.npz", x=points, y=np.arange(8) % 10)
    ok("finetune", "bp:svgg?in_channels=1&image_size=28", "--data", "images.npz", "--steps", 1,
       "--preset", "paper", "--set", "batch=4", "-o", "svgg.pt")  # fmt: skip
    assert type(bp_convert.open_model("svgg.pt").model).__name__ == "SVGG"


@pytest.mark.slow
def test_data_that_is_calibrated_on_is_trained_on_where_no_other_is_named() -> None:
    ok("model.pt", "--rank", 2, "--convert-anyway", "--calibrate", "data.npz",
       "--finetune", "steps=40 lr=0.01", "--evaluate", "other.npz", "-o", "small.pt",
       "--report", "r.json")  # fmt: skip
    report = json.loads(Path("r.json").read_text())
    after = f"{100 * report['scores'][0]['after']:.2f} % after"
    assert after in report["verdict"]
    (note,) = (one for one in report["notes"] if "before training" in one)
    untrained = note.split()[-2]
    assert after != f"{untrained} % after"
    small = bp_convert.load("small.pt")
    with np.load("other.npz") as opened, torch.no_grad():
        points, labels = (torch.from_numpy(opened[key]) for key in opened.files)
        share = (small(points).argmax(1) == labels).float().mean()
    assert report["scores"][0]["after"] == pytest.approx(float(share), abs=1e-6)


@pytest.mark.parametrize(
    ("words", "said", "code"),
    [
        (["finetune", "model.pt", "--data", "data.npz", "--set", "epoch=1"], "epochs", 1),
        (["finetune", "model.pt", "--data", "data.npz", "--set", "epochs"], "KEY=VALUE", 1),
        (["finetune", "model.pt", "--data", "data.npz", "--set", "lr=fast"], "lr", 1),
        (["finetune", "model.pt", "--data", "data.npz", "--set", "distill=1",
          "--set", "distill.logits=1"], "distill", 1),
        (["finetune", "model.pt", "--data", "nothing.npz"], "nothing with that path", 1),
        (["finetune", "model.pt"], "no data", 1),
        (["finetune", "model.pt", "--data", "data.npz", "--resume"], "folder", 1),
        (["finetune", "nowhere.pt", "--data", "data.npz"], "nowhere.pt", 1),
        (["finetune", "bp:svgh", "--data", "data.npz"], "svgg", 1),
        (["model.pt", "--convert-anyway", "--finetune", "epochs=1"], "no data", 1),
        (["model.pt", "--dry-run", "--finetune", "data=data.npz"], "dry run", 2),
        (["model.pt", "--convert-anyway", "--finetune", "data=nothing.npz"], "nothing", 1),
    ],
)  # fmt: skip
def test_faults_are_named_and_nothing_is_written(
    words: list[str], said: str, code: int, files: Path
) -> None:
    before = sorted(files.iterdir())
    done = run(*words, *([] if "--dry-run" in words else ["-o", "out.pt"]))
    assert done.exit_code == code, done.output + done.stderr
    assert said in " ".join(done.stderr.split())
    assert sorted(files.iterdir()) == before


@pytest.mark.slow
@pytest.mark.parametrize("count", [120, 400])
def test_one_file_for_everything_is_kept_apart(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    points = np.random.default_rng(0).normal(size=(count, 16)).astype("float32")
    points[:, 0] = range(count)  # the name of each
    np.savez("one.npz", x=points, y=np.arange(count) % 4)
    seen: list[tuple[set[int], set[int], set[int], set[int]]] = []
    module = sys.modules["bp_convert.training.finetuning"]
    feeds = module.feeds

    def spy(split: Split, *args: Any, **asked: Any) -> Any:
        found = feeds(split, *args, **asked)
        learnt, held = (set(names(feed)) for feed in found[:2])
        assert split.calibrate is not None
        assert split.evaluate is not None
        seen.append((set(split.calibrate.rows or ()), set(split.evaluate.rows or ()), learnt, held))
        return found

    monkeypatch.setattr(module, "feeds", spy)
    ok("model.pt", "--rank", 2, "--convert-anyway", "--calibrate", "one.npz", "--evaluate",
       "one.npz", "--finetune", "steps=2", "-o", "small.pt", "--report", "r.json")  # fmt: skip
    ((fitted, scored, learnt, held),) = seen
    assert fitted < learnt
    assert len(held) == round(0.1 * (count - len(scored)))
    for one, other in ((fitted, scored), (fitted, held), (learnt, held), (learnt | held, scored)):
        assert not one & other
    assert learnt | held | scored == set(range(count))
    report = json.loads(Path("r.json").read_text())
    assert report["scores"][0]["examples"] == len(scored) >= 0.05 * count


def test_what_cannot_be_kept_apart_is_not_scored() -> None:
    Path("data.py").write_text(
        "import torch\n"
        "def loader():\n"
        "    for _ in range(40):\n"
        "        yield torch.randn(8, 16), torch.arange(8) % 4\n"
    )
    done = run("model.pt", "--rank", 2, "--convert-anyway", "--evaluate", "data.py:loader",
               "--finetune", "steps=2 data=data.py:loader", "-o", "small.pt")  # fmt: skip
    assert done.exit_code == 1
    assert "learnt from" in done.stderr
    assert "name another source to evaluate on" in done.stderr
    assert not Path("small.pt").exists()


def test_values_are_read_as_what_they_are() -> None:
    settings, beside = training_from(
        ["lr=1e-2 compile=true", "optimizer_options.betas=[0.5,0.9]",
         "distill.layers=0.5", "folder=run", "resume=true", "clip=null", "workers=2"],
        "--set",
        lr=0.5,
    )  # fmt: skip
    assert settings.lr == 0.5
    assert settings.compile is True
    assert settings.optimizer_options == {"betas": [0.5, 0.9]}
    assert settings.distill.layers == 0.5
    assert settings.clip is None
    assert settings.workers == 2
    assert beside == Outputs(checkpoints=Path("run"), resume=True)


def test_the_validation_may_be_a_share(files: Path) -> None:
    done = ok("finetune", "model.pt", "--data", "data.npz", "--validation", 0.5, "--json")
    assert json.loads(done.stdout)["examples"] == 200
    assert (files / "model-trained.pt").exists()


def test_only_the_first_process_writes(monkeypatch: pytest.MonkeyPatch, files: Path) -> None:
    import bp_convert.training

    made: dict[str, Any] = {}

    def fake(model: nn.Module, **asked: Any) -> Any:
        made.update(asked)
        return model, None

    monkeypatch.setattr(bp_convert.training, "finetune", fake)
    monkeypatch.setenv("RANK", "1")
    done = ok("finetune", "model.pt", "--data", "data.npz", "-o", "out.pt")
    assert done.stdout == ""
    assert not (files / "out.pt").exists()
    assert made["settings"].data == "data.npz"


def test_settings_from_python_are_explained_too() -> None:
    with pytest.raises(TrainingError, match="greater than 0"):
        bp_convert.finetune(runs.plain(), runs.data(), lr=-1.0)
