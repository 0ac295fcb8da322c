"""``FILE.py:NAME``: an object that the user's own Python file defines."""

from __future__ import annotations

from pathlib import Path

from bp_convert.errors import DataError
from bp_convert.scripts import MEND, private_name, run_script


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
