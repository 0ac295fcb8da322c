"""A run that is cut off and goes on ends as one that was not: to the bit."""

from __future__ import annotations

import errno
import json
import random
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import bp_convert
from bp_convert.errors import CheckpointError, TrainingError
from bp_convert.training.checkpoints import Checkpoints
from tests.training import runs
from tests.training.apart import spawn


def same(one: dict[str, Any], two: dict[str, Any]) -> bool:
    return one.keys() == two.keys() and all(torch.equal(one[key], two[key]) for key in one)


@pytest.fixture(scope="module")
def whole() -> tuple[dict[str, Any], Any]:
    torch.set_num_threads(1)
    model, report = runs.long_run(None)
    return model.state_dict(), report


def cut(folder: Path, step: int, **more: Any) -> None:
    """Run until a step, and stop there as an interruption would."""

    class _Stop(Exception):  # noqa: N818 - a signal, not an error
        pass

    def stop(words: str, done: int, total: int) -> None:
        if done >= step:
            raise _Stop

    torch.manual_seed(0)
    with pytest.raises(_Stop):
        bp_convert.finetune(
            runs.Digest(), runs.data(), folder=folder, progress=stop, **{**runs.LONG, **more}
        )


@pytest.mark.slow
@pytest.mark.parametrize("step", [3, 6, 7, 25])
def test_weights_and_curve_equal_the_uninterrupted_run_s(
    tmp_path: Path, whole: Any, step: int
) -> None:
    cut(tmp_path, step)
    model, report = runs.long_run(tmp_path, resume=True)
    assert 0 < report.resumed_from < step
    assert same(model.state_dict(), whole[0])
    assert report.curve == whole[1].curve
    assert report.after == whole[1].after
    assert report.best_step == whole[1].best_step
    entries = [json.loads(one) for one in (tmp_path / "log.jsonl").read_text().splitlines()]
    logged = [(one["step"], one["loss"]) for one in entries if "loss" in one]
    assert logged == list(report.curve)


@pytest.mark.slow
def test_workers_do_not_change_what_is_learnt(tmp_path: Path, whole: Any) -> None:
    cut(tmp_path, 7)
    model, _ = runs.long_run(tmp_path, resume=True, workers=2)
    assert same(model.state_dict(), whole[0])


@pytest.mark.slow
def test_another_seed_is_another_run(whole: Any) -> None:
    model, _ = runs.long_run(None, seed=4)
    assert not same(model.state_dict(), whole[0])


@pytest.mark.slow
def test_killed_at_random_moments(tmp_path: Path, whole: Any) -> None:
    rng = random.Random(5)
    kills = 0
    while True:
        first = newest(tmp_path)
        process = spawn("long", tmp_path)
        if kills < runs.KILLS:
            while process.is_alive() and newest(tmp_path) == first:
                time.sleep(0.002)  # until it runs
            time.sleep(rng.random() * 0.15)
            if process.is_alive():
                kills += 1
                process.kill()
                process.join()
                continue
        process.join(60)
        break
    assert process.exitcode == 0, [one.read_text() for one in tmp_path.glob("error-*.txt")]
    assert kills == runs.KILLS
    assert same(torch.load(tmp_path / "final.pt"), whole[0])
    assert not list(tmp_path.glob(".bp-convert-*"))


def newest(folder: Path) -> str:
    return max((one.name for one in folder.glob("step-*.pt")), default="")


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["cut off", "one bit", "empty"])
def test_a_damaged_newest_checkpoint_is_passed_over(
    tmp_path: Path, whole: Any, damage: str
) -> None:
    cut(tmp_path, 9)
    newest, before = Checkpoints(tmp_path).paths()
    content = bytearray(newest.read_bytes())
    if damage == "one bit":
        content[len(content) // 2] ^= 1
    newest.write_bytes(bytes(content[: {"cut off": len(content) // 2, "empty": 0}.get(damage)]))
    model, report = runs.long_run(tmp_path, resume=True)
    assert report.resumed_from == int(before.name.split("-")[1])
    assert any(newest.name in note and "passed over" in note for note in report.notes)
    assert same(model.state_dict(), whole[0])


def test_two_checkpoints_are_kept(tmp_path: Path) -> None:
    cut(tmp_path, 9)
    assert [one.name.split("-")[1] for one in Checkpoints(tmp_path).paths()] == [
        "000000008",
        "000000006",
    ]


@pytest.mark.slow
def test_a_full_disk_is_an_error_and_older_checkpoints_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save, count = torch.save, iter(range(100))

    def full(content: Any, path: Path) -> None:
        if next(count) == 2:
            path.write_bytes(b"half")
            raise OSError(errno.ENOSPC, "No space left on device")
        save(content, path)

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(CheckpointError) as caught:
        runs.long_run(tmp_path)
    assert "No space left" in caught.value.found
    assert "--resume" in caught.value.fix
    names = [one.name for one in Checkpoints(tmp_path).paths()]
    assert len(names) == 2
    assert names[0] in caught.value.found
    assert not list(tmp_path.glob(".bp-convert-*"))


@pytest.mark.slow
def test_a_folder_with_another_run_is_refused(tmp_path: Path) -> None:
    cut(tmp_path, 5)
    with pytest.raises(TrainingError, match="another run"):
        runs.long_run(tmp_path)
    with pytest.raises(TrainingError, match=r"resuming from .*: lr"):
        runs.long_run(tmp_path, resume=True, lr=0.5)


@pytest.mark.slow
def test_resuming_a_finished_run_gives_it_again(tmp_path: Path, whole: Any) -> None:
    runs.long_run(tmp_path)
    model, report = runs.long_run(tmp_path, resume=True)
    assert report.resumed_from == report.steps
    assert same(model.state_dict(), whole[0])


@pytest.mark.slow
def test_resuming_without_a_checkpoint_starts_and_says_so(tmp_path: Path, whole: Any) -> None:
    model, report = runs.long_run(tmp_path, resume=True)
    assert any("nothing to resume" in note for note in report.notes)
    assert same(model.state_dict(), whole[0])


@pytest.mark.slow
def test_checkpoints_come_by_the_minute(tmp_path: Path) -> None:
    runs.long_run(tmp_path, checkpoint_every=None, checkpoint_minutes=1e-6, epochs=1)
    assert len(Checkpoints(tmp_path).paths()) == 2
    other = tmp_path / "other"
    runs.long_run(other, checkpoint_every=None, checkpoint_minutes=1e6, epochs=1)
    assert len(Checkpoints(other).paths()) == 1  # the last step's
