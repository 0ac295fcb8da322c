"""Runs that are killed and resumed: every job done exactly once, nothing half written."""

from __future__ import annotations

import csv
import json
import os
import random
import signal
import time
from pathlib import Path

import pytest

import bp_convert
from bp_convert.values.outcome import Outcome
from tests.batch.crafted import finished, small, started, write

COUNT = 9 * 2 * 2
MANY = """
arch: models.py:small
trust: models.py
settings: {convert_anyway: true}
report: json
matrix:
  seed: [1, 2, 3, 4, 5, 6, 7, 8, 9]
  rank: [1, 2]
  init: [warm, random]
"""


def landed(folder: Path) -> dict[str, int]:
    """Return the finished jobs with the time of their marker; each is whole."""
    home = folder / "out" / "jobs"
    found = {}
    for one in home.iterdir() if home.is_dir() else ():
        names = {path.name for path in one.iterdir()}
        assert {"done.json", "result.json", "model.pt", "plan.json", "recipe.yaml"} <= names, one
        assert not any(name.endswith(".tmp") for name in names)
        outcome = Outcome.model_validate_json((one / "result.json").read_text())
        marker = json.loads((one / "done.json").read_text())
        assert (outcome.name, outcome.identity) == (one.name, marker["identity"])
        found[one.name] = (one / "done.json").stat().st_mtime_ns
    return found


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def workers(folder: Path) -> set[int]:
    """Return the processes that jobs were started in."""
    path = folder / "starts.txt"
    return {int(one) for one in path.read_text().split()} if path.is_file() else set()


@pytest.mark.long
def test_many_jobs_killed_three_times(tmp_path: Path) -> None:
    write(tmp_path, MANY)
    drawn = random.Random(os.environ.get("BP_CONVERT_TEST_SEED", "20"))
    before: dict[str, int] = {}
    for _ in range(3):
        goal = len(before) + drawn.randint(1, 9)
        process = started(
            tmp_path, "run", "study.yaml", "-o", "out", "--jobs", 2, "--resume", "--quiet"
        )
        end = time.monotonic() + 120
        home = tmp_path / "out" / "jobs"
        while process.poll() is None and time.monotonic() < end:
            if home.is_dir() and len(list(home.iterdir())) >= goal:
                break
            time.sleep(0.01)
        time.sleep(drawn.random() * 0.1)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        end = time.monotonic() + 20
        while any(map(alive, workers(tmp_path))) and time.monotonic() < end:
            time.sleep(0.05)
        assert not any(map(alive, workers(tmp_path))), "a worker outlived its parent"
        now = landed(tmp_path)
        assert len(now) >= goal
        assert before.items() <= now.items(), "a finished job was done again"
        before = now
    assert len(before) < COUNT, "it was never killed in the middle"
    done = finished(tmp_path, "run", "study.yaml", "-o", "out", "--jobs", 2, "--resume")
    assert done.returncode == 0, done.stdout
    now = landed(tmp_path)
    assert len(now) == COUNT
    assert before.items() <= now.items()
    # Two jobs at most were under way at each kill; no other was started twice.
    assert len((tmp_path / "starts.txt").read_text().split()) <= COUNT + 3 * 2
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert {one["name"] for one in summary["jobs"]} == set(now)
    assert {one["state"] for one in summary["jobs"]} == {"done"}
    with (tmp_path / "out" / "summary.csv").open() as opened:
        rows = list(csv.DictReader(opened))
    assert len(rows) == COUNT
    assert not list((tmp_path / "out").rglob("*.tmp"))
    model = bp_convert.load(
        tmp_path / "out" / "jobs" / rows[0]["name"] / "model.pt",
        trust=[str(tmp_path / "models.py")],
        model=small,
    )
    assert sum(p.numel() for p in model.parameters()) == int(rows[0]["params"])


FAILING = """
trust: models.py
settings: {convert_anyway: true}
jobs:
  - {name: first, arch: "models.py:small"}
  - {name: broken, arch: "models.py:broken"}
  - {name: deadly, arch: "models.py:always_deadly"}
  - {name: last, arch: "models.py:small", seed: 1}
"""


@pytest.mark.slow
def test_failing_jobs_harm_no_others(tmp_path: Path) -> None:
    write(tmp_path, FAILING)
    done = finished(tmp_path, "run", "study.yaml", "-o", "out", "--jobs", 2, "--keep-going")
    assert done.returncode == 1, done.stdout
    out = tmp_path / "out"
    summary = json.loads((out / "summary.json").read_text())
    states = {one["name"]: one["state"] for one in summary["jobs"]}
    assert states == {"first": "done", "broken": "failed", "deadly": "failed", "last": "done"}
    log = (out / "failed" / "broken" / "log.txt").read_text()
    assert "this model is broken" in log
    assert "Traceback" in log
    assert "SIGKILL" in (out / "failed" / "deadly" / "log.txt").read_text()
    assert "this model is broken" in done.stdout
    # Mended, only what failed runs again.
    recipe = tmp_path / "study.yaml"
    recipe.write_text(FAILING.replace('broken"', 'small"').replace("always_deadly", "small"))
    before = (out / "jobs" / "first" / "done.json").stat().st_mtime_ns
    again = finished(tmp_path, "run", "study.yaml", "-o", "out", "--resume", "--quiet")
    assert again.returncode == 0, again.stdout
    assert "4 of 4 jobs done" in again.stdout
    assert (out / "jobs" / "first" / "done.json").stat().st_mtime_ns == before
    assert not (out / "failed" / "broken").exists()


@pytest.mark.long
def test_without_keep_going_nothing_starts_after_a_failure(tmp_path: Path) -> None:
    text = FAILING.replace('{name: first, arch: "models.py:small"}', "")
    write(
        tmp_path,
        text.replace("  - \n", "").replace('"models.py:always_deadly"', '"models.py:small"'),
    )
    done = finished(tmp_path, "run", "study.yaml", "-o", "out")
    assert done.returncode == 1
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert [one["state"] for one in summary["jobs"]] == ["failed", "waiting", "waiting"]
    refused = finished(tmp_path, "run", "study.yaml", "-o", "out", "--only", "last")
    assert refused.returncode == 0, refused.stdout
    refused = finished(tmp_path, "run", "study.yaml", "-o", "out", "--only", "last")
    assert refused.returncode == 1
    assert "--resume" in refused.stdout


@pytest.mark.slow
def test_ctrl_c_ends_cleanly(tmp_path: Path) -> None:
    slow = "import time\n" + "def slow():\n    time.sleep(60)\n"
    write(
        tmp_path,
        "trust: models.py\nsettings: {convert_anyway: true}\njobs:\n"
        '  - {name: one, arch: "models.py:small"}\n  - {name: two, arch: "models.py:slow"}\n',
    )
    with (tmp_path / "models.py").open("a") as opened:
        opened.write(slow)
    process = started(tmp_path, "run", "study.yaml", "-o", "out", "--jobs", 1)
    end = time.monotonic() + 90
    while time.monotonic() < end and not list((tmp_path / "out").glob(".work/two.*/log.txt")):
        time.sleep(0.05)
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=30)
    assert process.returncode == 130, out
    assert "--resume goes on" in out
    assert "Traceback" not in out
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert [one["state"] for one in summary["jobs"]] == ["done", "waiting"]
    assert not any(map(alive, workers(tmp_path)))


def test_one_run_at_a_time_in_a_folder(tmp_path: Path) -> None:
    from bp_convert.batch.folders import Results
    from bp_convert.errors import RecipeError

    with (
        Results(tmp_path).held(),
        pytest.raises(RecipeError, match="another run"),
        Results(tmp_path).held(),
    ):
        pass
    with Results(tmp_path).held():
        pass
