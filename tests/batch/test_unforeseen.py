"""A fault in a job that nobody foresaw: the log says all of it, the outcome where."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import bp_convert
from bp_convert import proof
from bp_convert.batch import estimate
from bp_convert.batch.attempt import run_job
from bp_convert.batch.book import read_recipe
from bp_convert.batch.folders import LOG, Results
from bp_convert.batch.identity import Identities
from bp_convert.values.outcome import Outcome
from tests.batch.crafted import write

TEXT = "arch: models.py:small\ntrust: models.py\nsettings: {convert_anyway: true}\nname: one\n"


def _run(folder: Path, text: str = TEXT) -> tuple[Outcome, str]:
    (stated,) = read_recipe(write(folder, text)).jobs
    ids, results = Identities(), Results(folder / "out")
    outcome, _ = run_job(ids.task(stated.job), results, lambda *_: None)
    return outcome, (results.failed("one") / LOG).read_text()


def _broken(*_: Any, **__: Any) -> Any:
    raise ZeroDivisionError("by nought")


def test_the_log_holds_the_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(proof, "save", _broken)
    outcome, log = _run(tmp_path)
    assert outcome.state == "failed"
    assert "ZeroDivisionError: by nought" in (outcome.problem or "")
    assert "did not foresee" in (outcome.problem or "")
    for words in ("report of a fault", "last step  writing (0 of 1)", "Traceback", "torch 2"):
        assert words in log
    assert not list(tmp_path.glob("bp-convert-fault-*"))


def test_a_result_that_a_fresh_process_does_not_load_is_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    outcome, _ = _run(tmp_path, TEXT.replace("models.py:small", "models.py:shy"))
    assert outcome.state == "failed"
    assert "a fresh process cannot load the file" in (outcome.problem or "")
    assert "not here" in (outcome.problem or "")
    assert not list((tmp_path / "out").rglob("model.pt"))


def test_too_little_memory_is_told_as_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise MemoryError

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(proof, "save", fails)
    outcome, _ = _run(tmp_path)
    assert (outcome.problem or "").startswith("this machine's memory")


def test_a_dry_run_goes_on_after_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = TEXT.replace("name: one", "jobs: [{name: one, rank: 2}, {name: two, rank: 3}]")
    book = read_recipe(write(tmp_path, text))
    planned = estimate.planned

    def fails_first(job: Any, *more: Any) -> Any:
        return _broken() if job.name == "one" else planned(job, *more)

    monkeypatch.setattr(estimate, "planned", fails_first)
    one, two = estimate.estimates(book.jobs, lambda *_: None)
    assert "ZeroDivisionError: by nought" in (one.problem or "")
    assert not two.problem


SCRIPT = """
from pathlib import Path
from bp_convert.batch.book import read_recipe
from bp_convert.batch.execute import run_recipe
from bp_convert.values.progress import Onlooker

book = read_recipe(Path("study.yaml"))
done = run_recipe(book, book.jobs, Path("out"), Onlooker())
print([one.state for one in done.jobs])
"""


@pytest.mark.slow
def test_a_script_that_guards_nothing_runs_a_recipe(tmp_path: Path) -> None:
    write(tmp_path, TEXT)
    (tmp_path / "script.py").write_text(SCRIPT)
    environment = {**os.environ, "PYTHONPATH": str(Path(bp_convert.__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, "script.py"],
        capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=300,
    )  # fmt: skip
    assert done.stdout == "['done']\n", done.stderr
