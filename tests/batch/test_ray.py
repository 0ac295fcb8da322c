"""The same jobs on a real local Ray cluster of two workers, one of which is killed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.batch.crafted import finished, write

pytest.importorskip("ray", reason="Ray is not installed: pip install 'bp-convert[ray]'")

TEXT = """
trust: models.py
settings: {convert_anyway: true}
report: json
jobs:
  - name: small
    arch: models.py:small
    matrix:
      seed: [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20,
             21, 22, 23, 24, 25, 26, 27, 28, 29]
      rank: [1, 2]
  - {name: deadly, arch: "models.py:deadly"}
  - {name: broken, arch: "models.py:broken"}
"""


def test_a_killed_worker_s_job_is_tried_again_and_lands_once(tmp_path: Path) -> None:
    write(tmp_path, TEXT)
    words = ("run", "study.yaml", "-o", "out", "--jobs", 2, "--executor", "ray", "--keep-going")
    done = finished(tmp_path, *words)
    assert (tmp_path / "died").exists(), f"no worker was killed\n{done.stdout}"
    assert done.returncode == 1, done.stdout  # for the broken job
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    states = {one["name"]: one["state"] for one in summary["jobs"]}
    assert states.pop("broken") == "failed"
    small = [f"small-seed={seed}-rank={rank}" for seed in range(1, 30) for rank in (1, 2)]
    assert states == dict.fromkeys([*small, "deadly"], "done")
    assert (
        "this model is broken" in (tmp_path / "out" / "failed" / "broken" / "log.txt").read_text()
    )
    homes = sorted(one.name for one in (tmp_path / "out" / "jobs").iterdir())
    assert homes == sorted(states)
    lines = [one for one in done.stdout.splitlines() if one.startswith("[")]
    assert len(lines) == len({one.split()[1] for one in lines}) == 60, done.stdout
    pids = (tmp_path / "starts.txt").read_text().split()
    assert len(pids) == 59  # the killed call did not get so far; its second try did
    assert len(set(pids)) >= 2, "one worker did everything"
    assert not list((tmp_path / "out" / ".work").glob("*.*.*"))
