"""Jobs that train: the full model once for all of them, the converted ones after it."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import torch

import bp_convert
from bp_convert.batch.attempt import run_job
from bp_convert.batch.book import read_recipe
from bp_convert.batch.folders import Results
from bp_convert.batch.identity import Identities
from tests.batch.crafted import finished, small, started, write

TEXT = """
arch: models.py:small
trust: models.py
settings: {convert_anyway: true}
train: {data: train.npz, steps: 4, batch: 8, lr: 0.01}
finetune: {data: train.npz, steps: 3, batch: 8}
evaluate: test.npz
jobs:
  - {name: full, counterpart: full}
  - {name: warm, rank: 2}
  - {name: scratch, init: random}
  - {name: low, counterpart: low-rank, rank: 2}
  - {name: pruned, counterpart: pruned, rank: 2}
"""


def data(folder: Path) -> None:
    drawn = np.random.default_rng(0)
    mixed = drawn.standard_normal((16, 4))
    for name, count in (("train", 120), ("test", 60)):
        inputs = drawn.standard_normal((count, 16)).astype("float32")
        np.savez(folder / f"{name}.npz", inputs=inputs, labels=(inputs @ mixed).argmax(1))


@pytest.mark.slow
def test_the_full_model_is_trained_once_and_all_jobs_start_from_it(tmp_path: Path) -> None:
    write(tmp_path, TEXT)
    data(tmp_path)
    done = finished(tmp_path, "run", "study.yaml", "-o", "out", "--jobs", 2)
    assert done.returncode == 0, done.stdout
    out = tmp_path / "out"
    assert len([one for one in (out / "full").iterdir() if one.is_dir()]) == 1
    jobs = {one["name"]: one for one in json.loads((out / "summary.json").read_text())["jobs"]}
    assert len({json.dumps(one["full"]) for one in jobs.values()}) == 1
    assert jobs["full"]["full"]["steps"] == 4
    assert len({one["score"]["before"] for one in jobs.values()}) == 1
    assert jobs["full"]["trained"] is None
    assert jobs["full"]["score"]["after"] == jobs["full"]["score"]["before"]
    for name in ("warm", "scratch", "low", "pruned"):
        assert jobs[name]["trained"]["steps"] == 3, name
        log = (out / "jobs" / name / "log.txt").read_text()
        assert "Traceback" not in log
        assert (out / "jobs" / name / "training.json").is_file()
    sizes = {name: one["params"]["after"] for name, one in jobs.items()}
    assert sizes["low"] <= sizes["warm"]
    assert sizes["pruned"] <= sizes["warm"]
    # From the source where it is worth learning from, and from labels alone from scratch.
    assert jobs["warm"]["trained"]["teacher"]
    assert not jobs["scratch"]["trained"]["teacher"]
    assert not list((out / ".work").glob("training-*"))


@pytest.mark.long
def test_a_full_model_whose_weights_are_gone_is_trained_again(tmp_path: Path) -> None:
    write(tmp_path, TEXT)
    data(tmp_path)
    words = ("run", "study.yaml", "-o", "out", "--resume", "--only")
    assert finished(tmp_path, *words, "full").returncode == 0
    (weights,) = (tmp_path / "out" / "full").glob("*/weights.pt")
    first = torch.load(weights, weights_only=True)
    weights.unlink()
    done = finished(tmp_path, *words, "warm")
    assert done.returncode == 0, done.stdout
    again = torch.load(weights, weights_only=True)
    assert all(torch.equal(first[key], again[key]) for key in first)


LONG = """
arch: models.py:small
trust: models.py
settings: {convert_anyway: true}
name: long
rank: 2
finetune: {data: train.npz, steps: 400, batch: 8, checkpoint_every: 10}
"""


@pytest.mark.long
def test_training_that_is_killed_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    write(tmp_path, LONG)
    data(tmp_path)
    process = started(tmp_path, "run", "study.yaml", "-o", "cut", "--quiet")
    end = time.monotonic() + 120
    while not list((tmp_path / "cut").glob(".work/training-*/step-*.pt")):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert not (tmp_path / "cut" / "jobs" / "long").exists()
    for folder in ("cut", "whole"):
        done = finished(tmp_path, "run", "study.yaml", "-o", folder, "--resume", "--quiet")
        assert done.returncode == 0, done.stdout
    one, two = (tmp_path / folder / "jobs" / "long" for folder in ("cut", "whole"))
    trained = [json.loads((home / "training.json").read_text()) for home in (one, two)]
    assert trained[0]["resumed_from"] >= 10
    assert trained[1]["resumed_from"] is None
    assert trained[0]["curve"] == trained[1]["curve"]
    weights = [
        bp_convert.load(home / "model.pt", trust=[str(tmp_path / "models.py")], model=small)
        for home in (one, two)
    ]
    states = [model.state_dict() for model in weights]
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])


@pytest.mark.slow
def test_a_job_s_own_recipe_gives_the_same_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = write(tmp_path, TEXT)
    data(tmp_path)
    outputs = []
    for folder in ("first", "second"):
        results = Results(tmp_path / folder)
        (stated,) = [one for one in read_recipe(path).jobs if one.job.name == "warm"]
        ids = Identities()
        outcome, fresh = run_job(ids.task(stated.job), results, lambda *_: None)
        assert fresh, outcome.problem
        home = results.home("warm")
        path = home / "recipe.yaml"
        model = bp_convert.load(home / "model.pt", trust=["models.py"])
        outputs.append(model(torch.ones(2, 16)))
    assert torch.equal(*outputs)


REPORTED = """
arch: models.py:small
trust: models.py
settings: {convert_anyway: true}
rank: 1
train: {data: train.npz, steps: 4, batch: 8}
report: [json, md, html]
jobs:
  - {name: trained, finetune: {data: train.npz, steps: 3, batch: 8}, evaluate: test.npz}
  - {name: unscored, finetune: {data: train.npz, steps: 3, batch: 8}}
  - {name: untrained, evaluate: test.npz}
  - {name: neither}
"""


@pytest.mark.slow
def test_a_job_s_report_tells_its_training_and_its_scores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = write(tmp_path, REPORTED)
    data(tmp_path)
    results = Results(tmp_path / "out")
    ids = Identities()
    found, pages = {}, {}
    for one in read_recipe(path).jobs:
        outcome, _ = run_job(ids.task(one.job), results, lambda *_: None)
        assert outcome.state == "done", outcome.problem
        home = results.home(one.job.name)
        found[one.job.name] = json.loads((home / "report.json").read_text())
        pages[one.job.name] = [(home / f"report.{form}").read_text() for form in ("md", "html")]
    for name, report in found.items():
        trained = name in ("trained", "unscored")
        scored = name in ("trained", "untrained")
        assert (report["training"] is not None) == trained
        assert bool(report["scores"]) == scored
        assert ("Trained for 3 steps" in report["verdict"]) == trained
        assert ("Accuracy" in report["verdict"]) == scored
        assert all(("Training" in page) == trained for page in pages[name])
        assert all(report["verdict"].split(";")[0] in page for page in pages[name])
    assert "train it before use" not in found["trained"]["verdict"]
    assert "train it before use" not in found["unscored"]["verdict"]
    (note,) = [one for one in found["trained"]["notes"] if "before training" in one]
    assert note.startswith("accuracy after the conversion")
    outcome = json.loads((results.home("trained") / "result.json").read_text())
    assert found["trained"]["scores"] == [outcome["score"]]
    assert found["trained"]["training"]["steps"] == outcome["trained"]["steps"] == 3
