"""Files are written whole or not at all."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from bp_convert.errors import CheckpointError
from bp_convert.files.atomic import check_output, write_all, write_text
from bp_convert.files.converted import save_converted
from bp_convert.storage import save_dense


def save(path: Path, force: bool = False, width: int = 2) -> None:
    model = nn.Linear(width, width)
    save_converted(path, model=model, plan_json="{}", settings_json="{}", arch=None, force=force)


def test_an_existing_file_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "out.pt"
    path.write_text("precious")
    for write in (save, lambda p: write_text(p, "x"), lambda p: save_dense(nn.Linear(1, 1), p)):
        with pytest.raises(CheckpointError, match="--force"):
            write(path)
    assert path.read_text() == "precious"
    save(path, force=True)
    assert path.read_bytes()[:2] == b"PK"
    assert [one.name for one in tmp_path.iterdir()] == ["out.pt"]


def test_the_plan_beside_is_kept_too(tmp_path: Path) -> None:
    (tmp_path / "out.plan.json").write_text("precious")
    with pytest.raises(CheckpointError, match=r"out\.plan\.json"):
        save(tmp_path / "out.safetensors")
    assert [one.name for one in tmp_path.iterdir()] == ["out.plan.json"]


@pytest.mark.parametrize("name", ["out.onnx", "out", "out.pt.bak", ".pt"])
def test_other_endings(name: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"\.safetensors"):
        save(tmp_path / name)


def test_where_nothing_can_be_written(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no folder"):
        save(tmp_path / "nowhere" / "out.pt")
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError):
        save(tmp_path / "file" / "out.pt")
    (tmp_path / "folder.pt").mkdir()
    with pytest.raises(CheckpointError, match="a folder"):
        save(tmp_path / "folder.pt", force=True)
    with pytest.raises(CheckpointError, match="a device"):
        write_text(Path("/dev/null"), "x", force=True)
    with pytest.raises(CheckpointError, match="cannot be written"):
        write_text(Path("/proc/out.txt"), "x")
    with pytest.raises(CheckpointError, match="cannot be written"):
        write_text(tmp_path / ("long" * 100), "x")


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "real.txt").write_text("old")
    (tmp_path / "link.txt").symlink_to(tmp_path / "real.txt")
    write_text(tmp_path / "link.txt", "new", force=True)
    assert (tmp_path / "link.txt").is_symlink()
    assert (tmp_path / "real.txt").read_text() == "new"


def test_if_one_file_fails_none_is_written(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    first.write_text("precious")

    def fails(path: Path) -> None:
        path.write_text("half")
        raise OSError(28, "No space left on device")

    with pytest.raises(CheckpointError, match="No space left"):
        write_all([(first, lambda p: p.touch()), (second, fails)], force=True)
    assert first.read_text() == "precious"
    assert [one.name for one in tmp_path.iterdir()] == ["first"]


@pytest.mark.slow
def test_a_full_disk(tmp_path: Path) -> None:
    """A file size limit stands for the full disk; torch's own writer must survive it."""
    code = f"""
import resource, signal
from pathlib import Path
from torch import nn
from bp_convert.errors import CheckpointError
from bp_convert.files.converted import save_converted
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
for name in ("out.pt", "out.safetensors"):
    try:
        save_converted(Path({str(tmp_path)!r}) / name, model=nn.Linear(300, 300),
                       plan_json="{{}}", settings_json="{{}}", arch=None)
    except CheckpointError as problem:
        print("refused:", problem.found)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    said = done.stdout.splitlines()
    assert len(said) == 2, done.stdout + done.stderr
    assert all(one.startswith("refused: it cannot be written") for one in said)
    assert list(tmp_path.iterdir()) == []


def test_the_same_model_makes_the_same_file(tmp_path: Path) -> None:
    torch.manual_seed(0)
    save(tmp_path / "a.pt")
    torch.manual_seed(0)
    save(tmp_path / "b.pt")
    assert (tmp_path / "a.pt").read_bytes() == (tmp_path / "b.pt").read_bytes()


def test_the_check_leaves_no_trace(tmp_path: Path) -> None:
    assert check_output(tmp_path / "out.pt", suffixes=(".pt",)) == tmp_path / "out.pt"
    assert list(tmp_path.iterdir()) == []
