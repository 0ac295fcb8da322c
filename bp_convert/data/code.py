"""``FILE.py:NAME``: an object that the user's own Python file defines."""

from __future__ import annotations

import hashlib
import importlib.util
import sys
from pathlib import Path

from bp_convert.errors import DataError


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
    key = f"_data_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(key, path)
    if spec is None or spec.loader is None:  # not for a .py file
        raise ImportError(path)
    module = importlib.util.module_from_spec(spec)
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))  # last, so that it cannot hide an installed package
    sys.modules[key] = module  # so that workers can be sent what it defines
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as problem:
        raise _bad(
            where,
            f"it fails with {type(problem).__name__}: {problem}",
            "mend it; a script's training part belongs under `if __name__ == '__main__':`",
        ) from problem
    if not hasattr(module, name):
        made = [one for one in vars(module) if not one.startswith("_")]
        raise _bad(where, f"no {name!r} in {file}", f"it defines {', '.join(made) or 'nothing'}")
    found: object = getattr(module, name)
    return found


def _bad(where: str, found: str, fix: str) -> DataError:
    return DataError(where=where, found=found, allowed="FILE.py:NAME, defined in the file", fix=fix)
