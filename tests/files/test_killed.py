"""A writer that is killed at random moments leaves what stood there before, or what it wrote."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import time
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from bp_convert.files.converted import read_converted, save_converted
from bp_convert.files.read_model import load_model
from bp_convert.files.reread import read_back
from bp_convert.storage import save_dense

KILLS = int(os.environ.get("BP_CONVERT_TEST_KILLS", "12"))
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["tests.files.test_killed"])


def model_of(version: int) -> nn.Module:
    model = nn.Sequential(nn.Linear(300, 300), nn.Linear(300, 300))
    model.append(model[0])  # tied
    with torch.no_grad():
        for one in model.parameters():
            one.fill_(version)
    return model


def write(folder: Path, version: int) -> None:
    """Write the three forms of a version."""
    model = model_of(version)
    plan = json.dumps({"version": version})
    for name, arch in (("whole.pt", None), ("state.pt", "a:b"), ("pair.safetensors", None)):
        save_converted(
            folder / name,
            model=model,
            plan_json=plan,
            settings_json="{}",
            arch=arch,
            force=True,
            prove=read_back(model, folder / name),
        )
    save_dense(model, folder / "dense.pt", force=True)


def work(folder: Path, version: int) -> None:
    """Write one version after the other, until killed."""
    torch.set_num_threads(1)
    (folder / "started").touch()
    while True:
        write(folder, version)
        version += 1


def spawn(folder: Path, version: int) -> BaseProcess:
    process = CONTEXT.Process(target=work, args=(folder, version), daemon=True)
    process.start()
    while process.is_alive() and not (folder / "started").exists():
        time.sleep(0.001)
    (folder / "started").unlink()
    return process


def version_in(path: Path) -> int:
    """Read a file, of one version as a whole."""
    if path.name == "dense.pt":
        state: dict[str, Tensor] = dict(load_model(path).model.state_dict())
        planned = None
    else:
        read = read_converted(path)
        state, planned = read.state, json.loads(read.plan_json)["version"]
    assert len(state) == 6
    versions = {float(value) for one in state.values() for value in one.detach().aminmax()}
    assert len(versions) == 1, versions
    version = int(versions.pop())
    assert planned in (None, version)
    return version


@pytest.mark.slow
@pytest.mark.parametrize("before", [True, False])
def test_killed_at_random_moments(before: bool, tmp_path: Path) -> None:
    rng = random.Random(7)
    names = ("whole.pt", "state.pt", "pair.safetensors", "dense.pt")
    seen: set[str] = set()
    start = time.perf_counter()
    write(tmp_path, 0)
    span = 1.5 * (time.perf_counter() - start)  # into the second round, if all goes on like this
    for kill in range(KILLS):
        if not before:
            for one in tmp_path.iterdir():
                one.unlink()
        process = spawn(tmp_path, 2 + 1000 * kill)
        time.sleep(rng.random() * span)
        assert process.is_alive()
        process.kill()
        process.join()
        for name in names:
            path = tmp_path / name
            if path.exists():
                version_in(path)
                seen.add(name)
            else:
                assert not before
    assert seen


def test_a_plan_that_did_not_take_its_name_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The moment between the two names of one result, with and without an older result."""

    class Killed(BaseException):
        pass

    replace = Path.replace
    for old in (None, 1):
        path = tmp_path / f"{old}" / "pair.safetensors"
        path.parent.mkdir()
        if old is not None:
            save_converted(
                path, model=model_of(1), plan_json='{"version": 1}', settings_json="{}", arch=None
            )

        def dies(self: Path, target: Path) -> Path:
            if target.name.endswith(".json"):
                raise Killed
            return replace(self, target)

        with monkeypatch.context() as patch:
            patch.setattr(Path, "replace", dies)
            with pytest.raises(Killed):
                save_converted(
                    path, model=model_of(2), plan_json='{"version": 2}', settings_json="{}",
                    arch=None, force=True,
                )  # fmt: skip
        assert version_in(path) == 2
        # Written again, all is in its place.
        save_converted(
            path, model=model_of(3), plan_json='{"version": 3}', settings_json="{}", arch=None,
            force=True,
        )  # fmt: skip
        assert version_in(path) == 3
        assert json.loads((path.parent / "pair.plan.json").read_text())["plan"]["version"] == 3
