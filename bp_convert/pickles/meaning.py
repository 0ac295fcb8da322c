"""What the names in a pickle that is being written will stand for when it is read elsewhere."""

from __future__ import annotations

import ast
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from bp_convert.pickles.admit import admit, is_weapon
from bp_convert.pickles.user_code import MAIN, counts, covers, is_private

MOVE = "move it to the top level of a module that can be imported"
PLAIN_FILE = (
    "give --arch (arch= in Python), or write NAME.safetensors, so that weights and plan alone are "
    "written"
)


class Unreadable(Exception):  # noqa: N818 - a finding, which becomes an error with a place
    """Something that would not be read back, and what can be done."""

    def __init__(self, found: str, fix: str = MOVE) -> None:
        super().__init__(found)
        self.fix = f"{fix}; or {PLAIN_FILE}"


def meanings(
    names: Sequence[str], trust: Sequence[str]
) -> tuple[dict[str, object], tuple[str, ...]]:
    """Return what names stand for in this process, and what trust another one needs for them.

    Args:
        trust: packages and Python files that will be trusted.

    Raises:
        Unreadable: a name cannot be read elsewhere, with whatever trust.
    """
    known: dict[str, object] = {}
    needed: dict[str, None] = {}
    for name in names:
        own = admit(name)
        if own is not None:
            known[name] = own
            continue
        if is_weapon(name) or name.partition(".")[0] in sys.stdlib_module_names - {MAIN}:
            raise Unreadable(f"names {name}, which no model file may", "take it out of the model")
        found = vars(sys.modules.get(name.rpartition(".")[0], ast)).get(name.rpartition(".")[2])
        needed[_trust_for(name, found, trust)] = None
        known[name] = found
    return known, tuple(needed)


def _trust_for(name: str, found: object, trust: Sequence[str]) -> str:
    """Return what must be trusted so that a name is read back."""
    home = name.rpartition(".")[0]
    for one in trust:
        script = one.endswith(".py")
        if covers([one], name) and counts(found, name, home if script else one, script=script):
            if home == MAIN and not _defines(Path(one), name.rpartition(".")[2]):
                continue
            return str(Path(one).resolve()) if script else one
    if home == MAIN:
        raise _of_main(name)
    file = _script_of(home)
    if file is not None and isinstance(found, type):
        return str(file)
    top = name.partition(".")[0]
    domain = home if top in {"torch", "torchvision", "bp_convert"} or is_private(home) else top
    if not is_private(home) and counts(found, name, domain, script=False):
        return domain
    what = "a function" if callable(found) and not isinstance(found, type) else "something"
    raise Unreadable(f"names {name}, {what} that is not taken from {domain}, whatever is trusted")


def _of_main(name: str) -> Unreadable:
    script = getattr(sys.modules[MAIN], "__file__", None)
    file = Path(script).name if script else "FILE.py"
    return Unreadable(
        f"names {name}, which stands in the program that runs: no other process finds it",
        f"move {name.rpartition('.')[2]} to a module that can be imported, or say that loading "
        f"will trust the script that defines it (trust=[{file!r}]; what the script does belongs "
        "under `if __name__ == '__main__':`)",
    )


def _defines(script: Path, attribute: str) -> bool:
    """Tell whether a script defines a class at its top level; it is not run."""
    try:
        body = ast.parse(script.read_text(encoding="utf-8")).body
    except (OSError, SyntaxError, ValueError):
        return False
    return any(isinstance(one, ast.ClassDef) and one.name == attribute for one in body)


def _script_of(home: str) -> Path | None:
    """Return the file of a module that is no part of an installed package."""
    module = sys.modules.get(home)
    file = getattr(module, "__file__", None)
    if not isinstance(module, ModuleType) or "." in home or not file or hasattr(module, "__path__"):
        return None
    path = Path(file).resolve()
    installed = {Path(sysconfig.get_path(key)).resolve() for key in ("purelib", "platlib")}
    return None if path.suffix != ".py" or installed & {*path.parents} else path
