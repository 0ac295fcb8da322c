"""The user's own code: imported only where the user named it, by --trust or by --arch."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from bp_convert.errors import CheckpointError
from bp_convert.scripts import MEND, make_importable, private_name, run_script

MAIN = "__main__"  # where a training script's own classes live when they are pickled
_PREFIX = "file"  # of the modules of scripts whose stem is another module's name


def covers(trust: Sequence[str], name: str) -> bool:
    """Tell whether a dotted name falls under one of the trusted packages, prefixes or files."""
    return any(_covers(one, name) for one in trust)


def trusted_object(name: str, trust: Sequence[str]) -> object | None:
    """Import the module of a trusted name and return what it defines, or None.

    Only what the trusted code defines itself counts, so that a file cannot reach through it to
    the modules it imports. Of a script and of torch only classes count: a model file has no
    business calling their functions.

    Raises:
        CheckpointError: the code cannot be imported.
    """
    one = next(one for one in trust if _covers(one, name))
    home, _, attribute = name.rpartition(".")
    if _is_file(one):
        module = run_file(Path(one), asked_by="--trust")
        domain = module.__name__
    else:
        module, domain = run_module(home, asked_by=f"--trust {one}"), one
    found = vars(module).get(attribute)
    return found if counts(found, name, domain, script=_is_file(one)) else None


def counts(found: object, name: str, domain: str, *, script: bool) -> bool:
    """Tell whether trust in a package, or in the module of a script, reaches what a name means."""
    defined = str(getattr(found, "__module__", ""))
    inside = defined == domain or (defined.startswith(f"{domain}.") and not script)
    classes_only = script or name.partition(".")[0] in {"torch", MAIN}
    return inside and callable(found) and (isinstance(found, type) or not classes_only)


def is_private(home: str) -> bool:
    """Tell whether a module's name is one that a script was given, here or in another process."""
    return home.startswith(f"_{_PREFIX}_") and "." not in home


def run_file(path: Path, *, asked_by: str) -> ModuleType:
    """Run a Python file as a module, once a process, with its folder importable.

    Raises:
        CheckpointError: there is no such file, or it fails.
    """
    path = path.resolve()
    if not path.is_file():
        raise CheckpointError(
            where=f"{asked_by} {path}",
            found="no Python file there",
            allowed="the path of a .py file",
            fix="check the path; relative paths start at the current folder",
        )
    main = sys.modules[MAIN]
    if Path(str(getattr(main, "__file__", None) or "")).resolve() == path:
        return main  # the program that runs
    name = _module_name(path)
    if name in sys.modules:
        return sys.modules[name]
    try:
        return run_script(path, name)
    except KeyboardInterrupt:
        raise
    except BaseException as problem:
        raise _failed(f"{asked_by} {path}", problem) from problem


def run_module(name: str, *, asked_by: str) -> ModuleType:
    """Import an installed module, or one of the current folder.

    Raises:
        CheckpointError: it cannot be imported.
    """
    make_importable(Path.cwd())
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as problem:
        raise CheckpointError(
            where=asked_by,
            found=f"{name} cannot be imported: {problem}",
            allowed="a package that is installed or stands in the current folder",
            fix="install it, or run this in the folder that holds it",
        ) from problem
    except (Exception, SystemExit) as problem:
        raise _failed(f"{asked_by}, importing {name}", problem) from problem


def _covers(one: str, name: str) -> bool:
    top = name.partition(".")[0]
    if _is_file(one):
        # A script's module has the name that it was given where it was pickled.
        home = name.rpartition(".")[0]
        return is_private(home) or home in {MAIN, Path(one).stem}
    # The standard library is no user's package: what models need of it is admitted anyway.
    return name.startswith(f"{one}.") and top not in sys.stdlib_module_names


def _is_file(one: str) -> bool:
    return one.endswith(".py")


def _module_name(path: Path) -> str:
    """Name the module of a file by its stem, or one of its own where that is another module's."""
    stem = path.stem
    if stem.isidentifier():
        spec = sys.modules[stem].__spec__ if stem in sys.modules else importlib.util.find_spec(stem)
        if spec is None and stem not in sys.modules:
            return stem
        if spec is not None and spec.origin and Path(spec.origin).resolve() == path:
            return stem
    return private_name(_PREFIX, path)


def _failed(where: str, problem: BaseException) -> CheckpointError:
    return CheckpointError(
        where=where,
        found=f"it fails with {type(problem).__name__}: {problem}",
        allowed="code that can be imported",
        fix=MEND,
    )
