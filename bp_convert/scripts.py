"""The user's own Python files, run as modules."""

from __future__ import annotations

import hashlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

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
