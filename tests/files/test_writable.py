"""What is written loads in another process with the trust that was named, or is refused before."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import bp_convert
from bp_convert.errors import CheckpointError
from bp_convert.files.converted import save_converted
from bp_convert.files.reread import read_back
from bp_convert.files.writable import check_writable
from tests.files import odd_models
from tests.files.odd_models import MODELS, Calls, Holds, Outer

ROOT = Path(__file__).parents[2]


def write(path: Path, model: nn.Module, trust: Any = ()) -> None:
    save_converted(
        path,
        model=model,
        plan_json="{}",
        settings_json="{}",
        arch=None,
        trust=trust,
        prove=read_back(model, path, trust=trust),
    )


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Write all models, and load them in one other process."""
    folder = tmp_path_factory.mktemp("odd")
    index, expected = {}, {}
    for number, (name, make) in enumerate(MODELS.items()):
        torch.manual_seed(0)
        model = make().eval()
        needed = check_writable(model, "x.pt")
        write(folder / f"{number}.pt", model)
        index[name] = (f"{number}.pt", needed)
        expected[name] = odd_models.outcome(name, model)
    (folder / "index.json").write_text(json.dumps(index))
    subprocess.run(
        [sys.executable, "-m", "tests.files.odd_models", str(folder)], check=True, cwd=ROOT
    )
    seen = json.loads((folder / "seen.json").read_text())
    return {name: (expected[name], seen[name], index[name][1]) for name in MODELS}


@pytest.mark.parametrize("name", MODELS)
def test_loads_in_another_process(name: str, elsewhere: dict[str, Any]) -> None:
    expected, seen, needed = elsewhere[name]
    assert seen == expected
    assert set(needed) <= {"tests"}


def test_trust_is_asked_only_where_it_is_needed(elsewhere: dict[str, Any]) -> None:
    free = [name for name, one in elsewhere.items() if not one[2]]
    assert {"old weight norm", "weight norm", "pruned", "compiled", "shared"} <= {*free}
    assert check_writable(Holds(3), "x.safetensors") == ()
    assert check_writable(Holds(3), "x.pt", arch="a:b") == ()
    assert check_writable(Outer(), "x.pt", trust=["elsewhere", "tests.files"]) == ("tests.files",)


def local() -> Any:
    class Local:
        pass

    return Local()


def hooked() -> nn.Module:
    model = nn.Linear(2, 2)
    model.register_forward_hook(lambda *args: None)
    return model


REFUSED: dict[str, tuple[Any, str]] = {
    "lambda": (lambda: Holds(lambda x: x), "1.value"),
    "local": (lambda: Holds(local()), "1.value"),
    "lock": (lambda: Holds([threading.Lock()]), "1.value"),
    "file": (lambda: Holds(sys.__stdout__), "1.value"),
    "builtin": (lambda: Calls(print), "1.value"),
    "evil": (lambda: Holds(subprocess.run), "1.value"),
    "torch's loader": (lambda: Calls(torch.load), "1.value"),
    "init": (lambda: Calls(nn.init.zeros_), "1.value"),
    "long": (lambda: Holds(10**700), "1.value"),
    "hook": (hooked, "1._forward_hooks"),
    "traced": (lambda: torch.fx.symbolic_trace(nn.Sequential(nn.Linear(2, 2))), "1 "),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_the_attribute_and_a_way_out(name: str, tmp_path: Path) -> None:
    make, where = REFUSED[name]
    model = nn.Sequential(nn.Linear(2, 2), make())
    for call in (
        lambda: check_writable(model, tmp_path / "out.pt"),
        lambda: write(tmp_path / "out.pt", model),
    ):
        with pytest.raises(CheckpointError) as caught:
            call()
        assert caught.value.where.startswith(where), caught.value
        assert "--arch" in caught.value.fix
    assert list(tmp_path.iterdir()) == []
    for name in ("out.safetensors", "out.pt"):  # the ways out exist
        save_converted(
            tmp_path / name, model=model, plan_json="{}", settings_json="{}", arch="net.py:make"
        )


def test_the_state_must_come_back(tmp_path: Path) -> None:
    class_of = odd_models.Forgetful
    with pytest.raises(CheckpointError, match="does not come back") as caught:
        check_writable(nn.Sequential(class_of()), tmp_path / "out.pt")
    assert caught.value.where == "0"


SCRIPT = """
import sys
import torch
from torch import nn
import bp_convert

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(16, 16)
    def forward(self, x):
        return self.fc(x)

if __name__ == "__main__":
    small, _ = bp_convert.convert(Net(), inputs=["16"], convert_anyway=True, convert_head=True)
    try:
        bp_convert.save(small, "a.pt")
    except bp_convert.BpConvertError as problem:
        print(problem)
    bp_convert.save(small, "b.pt", trust=[__file__])
    again = bp_convert.load("b.pt", trust=[__file__])
    print(type(again) is Net)
    bp_convert.save(small, "c.pt", arch=f"{__file__}:Net")
"""


@pytest.mark.slow
def test_a_class_of_the_program_that_runs(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "names __main__.Net" in done.stdout
    assert "trust=['program.py']" in done.stdout
    assert done.stdout.rstrip().endswith("True")
    assert sorted(one.name for one in tmp_path.glob("*.pt")) == ["b.pt", "c.pt"]
    for name in ("b.pt", "c.pt"):  # as the error advises, from another process and folder
        assert type(bp_convert.load(tmp_path / name, trust=[str(script)])).__name__ == "Net"


@pytest.mark.slow
def test_a_class_of_a_trusted_script_is_told_by_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    script = tmp_path / "own-net.py"  # no module's name
    script.write_text(SCRIPT)
    source = tmp_path / "source.pt"
    kind = runpy.run_path(str(script), run_name="unguarded")["Net"]
    kind.__module__ = "__main__"
    monkeypatch.setattr(sys.modules["__main__"], "Net", kind, raising=False)
    torch.save(kind(), source)
    loaded = bp_convert.open_model(source, trust=[str(script)]).model
    needed = check_writable(loaded, "x.pt")
    assert needed == (str(script),)
    write(tmp_path / "out.pt", loaded)
    code = (
        "import sys; from bp_convert.files.converted import read_converted\n"
        "print(type(read_converted('out.pt', trust=sys.argv[1:]).skeleton).__name__)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *needed], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.stdout == "Net\n", done.stderr


@pytest.mark.slow
def test_hooks_of_a_loaded_model_are_not_overwritten(tmp_path: Path) -> None:
    """torch numbers hooks from 0 in every process."""
    write(tmp_path / "out.pt", odd_models.two_hooked())
    code = (
        "import torch; from bp_convert.files.converted import read_converted\n"
        "model = read_converted('out.pt', trust=['tests']).skeleton\n"
        "model[0].register_forward_pre_hook(lambda m, a: None)\n"
        "print(len(model[0]._forward_pre_hooks))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.stdout == "3\n", done.stderr
