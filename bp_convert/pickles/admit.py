"""Which names a model file may use: decided by the name itself, before anything is imported.

A pickle is a small program whose only way to act is to call what it names. So safety is the list
of names. Admitted without asking are:

* the nn.Module classes that torch.nn, torchvision and bp_convert define themselves, the twins of
  its kinds among them, and their enumerations. Unpickling makes modules empty and fills in
  attributes; at worst it calls their constructors, which allocate;
* the entries of ``harmless.HARMLESS`` and ``harmless.OF_TORCHVISION``, each a plain value or a
  function of tensors.

Everything else needs ``--trust``. A name is admitted only if the module file exists inside the
installed package, the class stands in that module, was defined there, and is named so: an
attribute path such as ``torchvision.os.system`` leads nowhere.
"""

from __future__ import annotations

import enum
import importlib
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path

from torch import nn
from torch.fx import GraphModule
from torch.jit import ScriptModule

from bp_convert.kinds import KINDS
from bp_convert.pickles.harmless import HARMLESS, OF_TORCHVISION
from bp_convert.pickles.user_code import covers, trusted_object

# Modules, and what lies below them, whose nn.Module classes are admitted.
_HOMES = (
    "torch.nn.modules",
    "torch.nn.parallel.data_parallel",
    "torchvision.models",
    "torchvision.ops",
    "torchvision.transforms",
    "bp_convert.models",
    "bp_convert.groups.tied_linear",
)
# nn.Modules that carry code of their own in the file.
_CARRY_CODE = (GraphModule, ScriptModule)

# Only words: every name not admitted is refused anyway, these with another advice.
_WEAPONS = """__builtin__ _io _pickle _posixsubprocess asyncio bdb builtins code codeop cProfile
ctypes doctest ftplib http imp importlib io linecache marshal multiprocessing nt operator os pdb
pickle pickletools pip posix profile pty runpy shutil signal site smtplib socket subprocess sys
tempfile timeit trace urllib webbrowser"""
_TORCH_WEAPONS = (
    "torch.hub.",
    "torch.jit.load",
    "torch.load",
    "torch.package.",
    "torch.serialization.",
    "torch.utils.cpp_extension.",
)


def admit(name: str, trust: Sequence[str] = ()) -> object | None:
    """Return what ``name`` may stand for in a model file, or None if it is refused.

    Args:
        name: module and attribute joined by a dot, as torch's unpickler looks it up.
        trust: packages, dotted prefixes or Python files whose names are admitted; their code runs.

    Raises:
        CheckpointError: a trusted package or file cannot be imported.
    """
    if name in HARMLESS:
        return HARMLESS[name]
    if name in OF_TORCHVISION:
        home, _, attribute = name.rpartition(".")
        return vars(importlib.import_module(home)).get(attribute)
    if is_weapon(name):
        return None
    own = _own_class(name)
    if own is not None:
        return own
    return trusted_object(name, trust) if covers(trust, name) else None


def is_weapon(name: str) -> bool:
    """Tell whether a name has no place in any model: it starts programs, or reads and runs code."""
    if name in HARMLESS:
        return False
    return name.partition(".")[0] in _WEAPONS.split() or name.startswith(_TORCH_WEAPONS)


def _own_class(name: str) -> type | None:
    home, _, attribute = name.rpartition(".")
    if not all(part.isidentifier() for part in name.split(".")):
        return None
    twins: dict[str, type] = {
        f"{one.twin.__module__}.{one.twin.__qualname__}": one.twin for one in KINDS
    }
    if name in twins and name.startswith("bp_convert."):  # a user's own needs trust as any code
        return twins[name]
    if not any(home == one or home.startswith(f"{one}.") for one in _HOMES):
        return None
    if not _is_file_of_package(home):
        return None
    try:
        found = vars(importlib.import_module(home)).get(attribute)
    except ImportError:  # a part of torchvision that needs a package which is not there
        return None
    if not isinstance(found, type) or not issubclass(found, nn.Module | enum.Enum):
        return None
    if issubclass(found, _CARRY_CODE):
        return None
    return found if (found.__module__, found.__qualname__) == (home, attribute) else None


def _is_file_of_package(module: str) -> bool:
    """Tell whether a dotted module name is a source file below its installed top package."""
    top, *parts = module.split(".")
    spec = sys.modules[top].__spec__ if top in sys.modules else importlib.util.find_spec(top)
    if spec is None or not spec.submodule_search_locations:
        return False
    return any(
        Path(root, *parts).with_suffix(".py").is_file()
        or Path(root, *parts, "__init__.py").is_file()
        for root in spec.submodule_search_locations
    )
