"""Imports go down only, and importing the package or asking for help loads no torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "bp_convert"
# Each room may import those before it, and itself.
FLOORS = (
    "_version",
    "errors",
    "provenance",
    "values",
    "faults",
    "scripts",
    "free_memory",
    "torch_private",
    "kron",
    "bits",
    "recurrence",
    "fields",
    "ways",
    "layers",
    "experts",
    "attention",
    "seen",
    "models",
    "prices",
    "kinds",
    "ready",
    "graph",
    "fakes",
    "widths",
    "randomness",
    "tuning",
    "data",
    "calibration",
    "groups",
    "programmes",
    "search",
    "spending",
    "mixing",
    "surgery",
    "counting",
    "planner",
    "pruning",
    "fitting",
    "reconstruction",
    "costs",
    "evaluation",
    "verify",
    "hub",
    "linears",
    "pickles",
    "files",
    "storage",
    "running_as",
    "proof",
    "feeding",
    "training",
    "render",
    "pages",
    "reporting",
    "exporting",
    "pipeline",
    "large",
    "run",
    "studies",
    "batch",
    "demo",
    "cli",
    "__main__",
)


def _room(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def _imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("bp_convert."):
            found.add((node.module or "").split(".")[1])
        elif isinstance(node, ast.Import):
            found |= {n.name.split(".")[1] for n in node.names if n.name.startswith("bp_convert.")}
    return found


FILES = sorted(path for path in ROOT.rglob("*.py") if path != ROOT / "__init__.py")


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_down_only(path: Path) -> None:
    floor = FLOORS.index(_room(path))
    above = {room for room in _imports(path) if FLOORS.index(room) > floor}
    assert not above


def test_every_room_has_a_floor() -> None:
    assert {_room(path) for path in FILES} <= set(FLOORS)


def test_a_room_can_be_held_by_one_person() -> None:
    sizes: dict[str, int] = {}
    for path in FILES:
        if len(path.relative_to(ROOT).parts) > 1:
            lines = len(path.read_text(encoding="utf-8").splitlines())
            sizes[_room(path)] = sizes.get(_room(path), 0) + lines
    assert {room: size for room, size in sizes.items() if size > 2600} == {}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_file_says_what_stands_in_it(path: Path) -> None:
    if path.name not in ("__init__.py", "_version.py"):
        assert ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))


def test_modules_and_classes_have_names_of_their_own() -> None:
    modules = Counter(path.stem for path in FILES if not path.stem.startswith("__"))
    classes = Counter(
        node.name
        for path in FILES
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef)
    )
    assert [name for names in (modules, classes) for name, n in names.items() if n > 1] == []


def test_values_and_errors_know_no_torch() -> None:
    for room in ("errors.py", "values"):
        for path in [ROOT / room] if room.endswith(".py") else (ROOT / room).glob("*.py"):
            assert "import torch" not in path.read_text(encoding="utf-8"), path


@pytest.mark.parametrize(
    "work",
    [
        "import bp_convert; bp_convert.Settings; bp_convert.__version__",
        "from typer.testing import CliRunner; from bp_convert.cli.app import app; "
        "assert CliRunner().invoke(app, ['--help']).exit_code == 0",
        "from typer.testing import CliRunner; from bp_convert.cli.app import app; "
        "assert CliRunner().invoke(app, ['m.pt', '--alpha', '0']).exit_code == 2",
        *(
            "from typer.testing import CliRunner; from bp_convert.cli.app import app; "
            f"assert CliRunner().invoke(app, {words}).exit_code == 1"
            for words in (
                ["absent.pt"],
                ["inspect", "absent.pt"],
                ["export", "absent.pt", "--to", "onnx", "-o", "x.onnx"],
                ["finetune", "absent.pt", "--data", "x.npy"],
                [__file__, "--target", "25%"],
                ["recipe", "run", "absent.yaml"],
            )
        ),
    ],
)
def test_torch_is_loaded_only_for_work(work: str) -> None:
    code = f"{work}; import sys; assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("work", "left"),
    [
        ("import bp_convert", "torch numpy pydantic yaml typer rich"),
        *(
            (
                f"import sys; sys.argv[1:] = {words}\nfrom bp_convert.cli import main\n"
                "try: main()\nexcept SystemExit as done: assert not done.code",
                "torch numpy pydantic yaml",  # of which typer loads pydantic to read a value
            )
            for words in (["--help"], ["sweep", "--help"], ["export", "--help"])
        ),
    ],
)
def test_help_is_quick(work: str, left: str) -> None:
    look = f"import sys; found = {{*'{left}'.split()}} & {{*sys.modules}}; assert not found, found"
    code = f"{work}\n{look}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_all_public_names_exist() -> None:
    import bp_convert

    for name in bp_convert.__all__:
        assert getattr(bp_convert, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = bp_convert.nonsense


def test_every_error_is_public() -> None:
    import bp_convert
    from bp_convert import errors

    found = {
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, errors.BpConvertError)
    }
    assert len(found) > 8
    assert found <= set(bp_convert.__all__)
    # And none is defined elsewhere.
    homes = {path.name for path in FILES if any(f"({name})" in _classes(path) for name in found)}
    assert homes == {"errors.py"}


def _classes(path: Path) -> str:
    lines = path.read_text(encoding="utf-8").splitlines()
    return "\n".join(line for line in lines if line.startswith("class "))
