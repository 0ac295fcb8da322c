"""The user's own Python files, run as modules, and what ``FILE.py:NAME`` names in one."""

from __future__ import annotations

import hashlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from bp_convert.errors import DataError

MEND = "mend it; a script's training part belongs under `if __name__ == '__main__':`"


def run_script(path: Path, name: str) -> ModuleType:
    """Run a Python file as the module ``name``, with its folder importable.

    Raises:
        BaseException: whatever the file raises; the module is then forgotten.
    """
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:  # not for a .py file
        raise ImportError(path)
    module = importlib.util.module_from_spec(spec)
    make_importable(path.parent)
    sys.modules[name] = module  # so that what it defines can be pickled, and sent to workers
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def make_importable(folder: Path) -> None:
    """Append a folder to the import path: last, so that it cannot hide an installed package."""
    if str(folder) not in sys.path:
        sys.path.append(str(folder))


def private_name(prefix: str, path: Path) -> str:
    """Return a module name that no other file has."""
    return f"_{prefix}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"


def is_code(text: str) -> bool:
    """Tell whether a text has the form FILE.py:NAME."""
    file, _, name = text.rpartition(":")
    return file.endswith(".py") and name.isidentifier()


def load_object(text: str, where: str) -> object:
    """Run a Python file and return what it calls ``NAME``; it runs anew at each call.

    Raises:
        DataError: there is no such file, it fails, or it does not define the name.
    """
    file, _, name = text.rpartition(":")
    path = Path(file).expanduser().resolve()
    if not path.is_file():
        raise _bad(where, f"no file {file}", "check the path")
    try:
        module = run_script(path, private_name("data", path))
    except (Exception, SystemExit) as problem:
        raise _bad(where, f"it fails with {type(problem).__name__}: {problem}", MEND) from problem
    if not hasattr(module, name):
        made = [one for one in vars(module) if not one.startswith("_")]
        raise _bad(where, f"no {name!r} in {file}", f"it defines {', '.join(made) or 'nothing'}")
    found: object = getattr(module, name)
    return found


def _bad(where: str, found: str, fix: str) -> DataError:
    return DataError(where=where, found=found, allowed="FILE.py:NAME, defined in the file", fix=fix)
