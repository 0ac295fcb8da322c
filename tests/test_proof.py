"""A result is proven by loading it in a fresh process; what does not load is not left behind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

import bp_convert
from bp_convert.cli.app import app
from bp_convert.errors import VerificationError
from bp_convert.files import atomic
from bp_convert.files.reread import read_back
from bp_convert.proof import Proof
from bp_convert.storage import save_dense

NETS = """
import os, sys
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, width), nn.ReLU(), nn.Linear(width, 4))
        self.register_buffer("seen", torch.arange(3), persistent=False)
    def forward(self, x):
        return self.body(x)

class Noisy(Net):
    def __setstate__(self, state):
        super().__setstate__(state)
        with torch.no_grad():
            self.body[0].bias += torch.randint(1, 2**20, ())

class Shy(Net):
    def __setstate__(self, state):
        if "proof" in sys.argv[0]:
            raise RuntimeError("not here")
        super().__setstate__(state)

class Once(Net):
    def __setstate__(self, state):
        if "proof" in sys.argv[0]:
            if hasattr(sys, "seen_before"):
                raise RuntimeError("not twice")
            sys.seen_before = True
        super().__setstate__(state)

class Fatal(Net):
    def __setstate__(self, state):
        if "proof" in sys.argv[0]:
            os._exit(7)
        super().__setstate__(state)
"""
FLAGS = ["--input", "16", "--convert-anyway", "--exclude", "body.2", "-q"]


@pytest.fixture
def nets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module of the current folder, as a user's project has it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    monkeypatch.delitem(sys.modules, "proof_nets", raising=False)
    (tmp_path / "proof_nets.py").write_text(NETS)
    import importlib

    importlib.invalidate_caches()
    yield importlib.import_module("proof_nets")
    sys.modules.pop("proof_nets", None)


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, [*map(str, arguments)])


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
@pytest.mark.parametrize("arch", [[], ["--arch", "proof_nets.py:Net"]])
def test_results_of_every_form_are_proven(
    nets: Any, arch: list[str], suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    answer = Proof._answer

    def watched(self: Proof) -> Any:
        asked.append(answer(self))
        return asked[-1]

    monkeypatch.setattr(Proof, "_answer", watched)
    source = nets.Net()
    torch.save(source.state_dict() if arch else source, "net.pt")
    done = run("net.pt", *arch, "--trust", "proof_nets", *FLAGS, "-o", f"out{suffix}")
    assert done.exit_code == 0, done.output
    assert len(asked) == 1
    assert {"body.0.w1", "body.2.weight", "seen"} <= asked[0]["bits"].keys()
    monkeypatch.chdir("/")  # a result is found from anywhere, with all that it needs
    given = {} if arch or suffix == ".pt" else {"model": source}
    trust = ["proof_nets", str(tmp_path / "proof_nets.py")]
    small = bp_convert.load(tmp_path / f"out{suffix}", trust=trust, **given)
    assert small(torch.zeros(1, 16)).shape == (1, 4)


@pytest.mark.parametrize("kind", ["Noisy", "Shy"])
def test_what_does_not_come_back_is_not_left(nets: Any, kind: str, tmp_path: Path) -> None:
    torch.save(getattr(nets, kind)(), "net.pt")
    Path("out.pt").write_text("precious")
    before = sorted(tmp_path.iterdir())
    done = run("net.pt", "--trust", "proof_nets", *FLAGS, "--force", "-o", "out.pt")
    assert done.exit_code == 4, done.output
    words = {"Noisy": "in body.0.", "Shy": "not here"}[kind]
    assert words in done.stderr
    assert "was removed" in done.stderr.replace("\n", " ")
    assert Path("out.pt").read_text() == "precious"
    assert sorted(tmp_path.iterdir()) == before


def test_a_process_that_dies_is_no_verdict(nets: Any) -> None:
    torch.save(nets.Fatal(), "net.pt")
    done = run("net.pt", "--trust", "proof_nets", *FLAGS[:-1], "-o", "out.pt")
    assert done.exit_code == 0, done.output
    assert "exit code 7" in " ".join(done.stdout.split())
    assert Path("out.pt").is_file()


@pytest.mark.slow
def test_a_helper_serves_many_files_and_ends_with_the_process(tmp_path: Path) -> None:
    code = f"""
import os
import torch
from pathlib import Path
from torch import nn
from bp_convert.proof import Proof
from bp_convert.storage import save_dense
helpers = []
for name in ("a.pt", "b.pt"):
    model, path = nn.Linear(2, 2), Path({str(tmp_path)!r}) / name
    with Proof() as proof:
        helpers.append(proof._helper.process.pid)
        save_dense(model, path, prove=proof.of(model, path))
    assert not proof.notes, proof.notes
assert len(set(helpers)) == 1
print(helpers[0])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    with pytest.raises(ProcessLookupError):
        os.kill(int(done.stdout), 0)
    assert {one.name for one in tmp_path.iterdir()} == {"a.pt", "b.pt"}


def test_nothing_of_one_question_reaches_the_next(nets: Any) -> None:
    torch.save(nets.Once(), "net.pt")
    for _ in range(2):
        done = run("net.pt", "--trust", "proof_nets", *FLAGS, "--force", "-o", "out.pt")
        assert done.exit_code == 0, done.output


def test_one_that_takes_too_long_is_no_verdict(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    with Proof(timeout=0.001) as proof:
        save_dense(model, tmp_path / "a.pt", prove=proof.of(model, tmp_path / "a.pt"))
    assert "longer than 0.001 seconds" in proof.notes[0]


@pytest.mark.slow
def test_dense_and_trained_models_are_proven(
    nets: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[Any] = []
    answer = Proof._answer

    def watched(self: Proof) -> Any:
        asked.append(answer(self))
        return asked[-1]

    torch.save(nets.Net(), "net.pt")
    assert run("net.pt", "--trust", "proof_nets", *FLAGS, "-o", "out.pt").exit_code == 0
    monkeypatch.setattr(Proof, "_answer", watched)
    done = run("dense", "out.pt", "--trust", "proof_nets", "-o", "dense.pt")
    assert done.exit_code == 0, done.output
    x, y = torch.randn(32, 16), torch.randint(4, (32,))
    np.savez("data.npz", x=x.numpy(), y=y.numpy())
    flags = ["--data", "data.npz", "--steps", "2", "--trust", "proof_nets", "-q"]
    for name in ("out.pt", "net.pt"):
        done = run("finetune", name, *flags, "-o", f"trained-{name}")
        assert done.exit_code == 0, done.output
    assert len(asked) == 3
    for name in ("dense.pt", "trained-out.pt", "trained-net.pt"):
        model = bp_convert.load(name, trust=["proof_nets"])
        assert not model.training
        assert model(x).shape == (32, 4)


def test_python_reads_back_before_the_file_takes_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small, _ = bp_convert.convert(
        nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)),
        inputs=["16"],
        convert_anyway=True,
    )
    sync = atomic.sync

    def flip(path: Path) -> None:
        """Change one bit of a weight, as a faulty disk would."""
        if path.is_file() and path.suffix == ".tmp":
            content = bytearray(path.read_bytes())
            needle = next(iter(small.parameters())).detach().numpy().tobytes()[:16]
            if needle in content:
                content[content.index(needle)] ^= 1
                path.write_bytes(bytes(content))
        sync(path)

    monkeypatch.setattr(atomic, "sync", flip)
    for name in ("a.pt", "b.safetensors"):
        with pytest.raises(VerificationError, match="reads otherwise"):
            bp_convert.save(small, tmp_path / name)
    assert list(tmp_path.iterdir()) == []
    bp_convert.save(small, tmp_path / "a.pt", check=False)


def test_files_have_the_permissions_of_any_file(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
    small, _ = bp_convert.convert(model, inputs=["16"], convert_anyway=True)
    before = os.umask(0o027)
    try:
        for name in ("a.pt", "b.safetensors"):
            bp_convert.save(small, tmp_path / name)
        assert {one.stat().st_mode & 0o777 for one in tmp_path.iterdir()} == {0o640}
        (tmp_path / "b.safetensors").chmod(0o600)
        bp_convert.save(small, tmp_path / "b.safetensors", force=True)
    finally:
        os.umask(before)
    assert (tmp_path / "b.safetensors").stat().st_mode & 0o777 == 0o600


@pytest.mark.slow
def test_reading_back_needs_no_second_copy_of_a_large_model(tmp_path: Path) -> None:
    """The weights are looked at where they lie in the file."""
    code = f"""
import resource
import torch
from torch import nn
from bp_convert.files.reread import read_back
from bp_convert.storage import save_dense
model = nn.Linear(5000, 5000)
path = {str(tmp_path / "big.pt")!r}
from pathlib import Path
prove = read_back(model, Path(path))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
save_dense(model, path, prove=prove)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    # Pages of a mapped file count, though they are the system's to drop; a copy would come on top.
    assert int(done.stdout) < 1.5 * 5000 * 5000 * 4 / 1024


class Plain(nn.Module):
    """For the check above: nothing unusual."""

    def forward(self, x: Tensor) -> Tensor:
        return x


def test_nothing_to_compare_is_no_fault(tmp_path: Path) -> None:
    save_dense(Plain(), tmp_path / "a.pt", prove=read_back(Plain(), tmp_path / "a.pt"))
    assert type(bp_convert.load(tmp_path / "a.pt", trust=["tests"])) is Plain
