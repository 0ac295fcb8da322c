"""The safe loader: torch's own weights-only unpickler, with a list of names that we choose."""

from __future__ import annotations

import contextlib
import io
import re
import sys
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from bp_convert.errors import CheckpointError
from bp_convert.files.sniff import ASK, FileKind, refusal
from bp_convert.pickles.admit import admit, is_weapon
from bp_convert.pickles.inert import InertReach, inert_class, module_class, too_deep
from bp_convert.pickles.libraries import settle
from bp_convert.pickles.reach import Reach
from bp_convert.pickles.user_code import MAIN, covers, is_private
from bp_convert.torch_private import Unpickler, fills_lists_of_classes

_SHOWN = 8  # names listed in a message
_LOCK = threading.Lock()  # torch keeps the names it admits in one global list
LAZY = "torch.nn.parameter.Uninitialized"  # parameters and buffers without a shape
REACH = "builtins.getattr"
# Reading an array, torch's unpickler wants to know the classes of numpy's dtypes.
_DTYPES = {type(np.dtype(char)) for char in np.typecodes["All"]}


def names_in(path: Path) -> list[str]:
    """List the names that a torch.save file uses beyond plain tensors; import nothing.

    Raises:
        CheckpointError: the file cannot be read.
    """
    try:
        with _LOCK:  # names that another load has admitted would be passed over
            return sorted(get_unsafe_globals_in_checkpoint(path))
    except Exception as problem:
        raise _damaged(path, problem) from None


def load_admitted(path: Path, kind: FileKind, *, trust: Sequence[str] = ()) -> object:
    """Load a torch.save file onto the CPU if every name in it is admitted.

    Raises:
        CheckpointError: a name is refused, or the file is damaged.
    """
    if kind is FileKind.LEGACY:
        return load_known(path, {})
    names = names_in(path)
    if any(one.startswith(LAZY) for one in names) and not any(map(is_weapon, names)):
        raise refusal(
            path,
            "a model with a lazy layer that has not seen an input; nothing was run",
            "run it once on an example where it was made, and save it again",
        )
    admitted = {name: admit(name, trust) for name in names}
    refused = [name for name, found in admitted.items() if found is None]
    if refused:
        if all(covers(trust, name) and not is_weapon(name) for name in refused):
            raise CheckpointError(
                where=str(path),
                found=f"it names {listed(refused)}, which {listed(trust)} does not define; "
                "nothing was run",
                allowed="classes that the trusted code defines itself",
                fix="trust the package or file that defines them, or take the weights only, with "
                "--arch",
            )
        whole = False
        with contextlib.suppress(CheckpointError):
            whole = module_class(load_inert(path, kind)) is not None
        raise _refused(path, refused, whole)
    content = load_known(path, admitted, trust)
    with contextlib.suppress(Exception):  # an incomplete model, of which others say more
        settle(content)
    return content


@contextlib.contextmanager
def known(names: Mapping[str, object], trust: Sequence[str] = ()) -> Iterator[None]:
    """Let torch's unpickler know names, what they stand for, and classes inside classes."""
    entries: list[Any] = [(found, name) for name, found in names.items() if name != REACH]
    if any(name.startswith("numpy.") for name in names):
        entries += [(kind, f"numpy.dtypes.{kind.__name__}") for kind in _DTYPES]
    if isinstance(names.get(REACH), InertReach):
        entries.append((InertReach(entries), REACH))
    elif REACH in names:
        reach = Reach(lambda kind: covers(trust, f"{kind.__module__}.{_top(kind)}"), entries)
        entries.append((reach, REACH))
    with _LOCK, safe_globals(entries):
        yield


def revive(
    content: bytes, parts: Sequence[object], names: Mapping[str, object], trust: Sequence[str]
) -> object:
    """Unpickle in this process, as the safe loader would from a file.

    Args:
        parts: what the pickle's persistent ids ("storage", index) stand for.
        names: what its names stand for.

    Raises:
        Exception: it cannot be unpickled so.
    """

    class Reader(Unpickler):
        def persistent_load(self, pid: tuple[str, int]) -> object:
            return parts[pid[1]]

    with known(names, trust), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return Reader(io.BytesIO(content), encoding="utf-8").load()  # type: ignore[no-untyped-call]


def load_inert(path: Path, kind: FileKind) -> object:
    """Load the data of a torch.save file onto the CPU; what it names becomes ``Inert``.

    Raises:
        CheckpointError: a name can only be meant to do harm, or the file is damaged.
    """
    if kind is FileKind.LEGACY:
        return load_known(path, {})
    names = names_in(path)
    harmful = [name for name in names if is_weapon(name)]
    if harmful:
        raise _refused(path, harmful, whole=False)

    def stand_ins(*, as_dict: bool) -> dict[str, object]:
        found: dict[str, object] = {one: inert_class(one, as_dict=as_dict) for one in names}
        return {**found, REACH: InertReach()} if REACH in names else found

    try:
        return load_known(path, stand_ins(as_dict=False))
    except CheckpointError:
        # An unknown class may be a dictionary; torch's unpickler wants to know before.
        return load_known(path, stand_ins(as_dict=True))


def listed(names: Sequence[str]) -> str:
    """Join names for a message, the first few in full."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def load_known(
    path: Path, names: Mapping[str, object], trust: Sequence[str] = (), *, mmap: bool = False
) -> object:
    """Load a torch.save file onto the CPU, in which some names are known.

    Args:
        names: what they stand for.
        mmap: read what is looked at only.

    Raises:
        CheckpointError: it cannot be read.
    """
    with known(names, trust), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about pickle protocols, in torch's words
        try:
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
        except Exception as problem:
            raise _damaged(path, problem) from None
    if too_deep(content):
        raise refusal(path, "parts in parts in parts, deeper than any model", ASK)
    return content


def _top(kind: type) -> str:
    return kind.__qualname__.partition(".")[0]


def _refused(path: Path, names: Sequence[str], whole: bool) -> CheckpointError:
    harmful = [name for name in names if is_weapon(name)]
    if harmful:
        return CheckpointError(
            where=str(path),
            found=f"it names {listed(harmful)}, which no model needs and an attack would; "
            "nothing was run",
            allowed="names of torch.nn, torchvision and bp_convert modules",
            fix="do not load this file anywhere; ask its author for the weights as .safetensors",
        )
    weights = "--arch takes its weights only, such as --arch torchvision:resnet18"
    if MAIN in {name.partition(".")[0] for name in names}:
        mine = next(name for name in names if name.startswith(f"{MAIN}."))
        weights = f"--arch FILE.py:{mine.rpartition('.')[2]} takes its weights only"
    never = [name for name in names if name.partition(".")[0] in sys.stdlib_module_names]
    listing = [*dict.fromkeys(map(_trustable, names))]
    flags = " ".join(f"--trust {one}" for one in listing)
    trusting = (
        f"{flags}, in Python trust={listing} (their code runs; trust only what you would run "
        "yourself" + (", FILE.py being the script that defines it)" if "FILE.py" in flags else ")")
    )
    if never:  # the standard library cannot be trusted as a whole
        trusting = f"save the model again without what is {listed(never)} in it"
    return CheckpointError(
        where=str(path),
        found=f"it names {listed(names)}; nothing was run",
        allowed="names of torch.nn, torchvision and bp_convert modules",
        fix=f"{trusting}; or {weights}" if whole else f"{weights}; or {trusting}",
    )


def _trustable(name: str) -> str:
    """Return what to trust for a name to be admitted: as little of torch as will do."""
    top = name.partition(".")[0]
    if top == MAIN or is_private(top):
        return "FILE.py"
    return name.rpartition(".")[0] if top in {"torch", "torchvision", "bp_convert"} else top


def _damaged(path: Path, problem: Exception) -> CheckpointError:
    """Say in our words why torch could not read a file; torch's advice is to drop the safety."""
    text = str(problem)
    if "Unsupported operand" in text:
        found = "a pickle of a protocol that the safe loader does not read"
        fix = "save it again with torch.save and its default pickle protocol"
    elif "persistent_load" in text or "persistent id" in text:
        found = "a whole model in the format of torch 1.5 or older, which cannot be loaded safely"
        fix = "load it where it was made and save it again, or its state dict for --arch"
    elif "has no attribute '_" in text:
        found = f"a model that is incomplete: {text.splitlines()[-1].strip()[:200]}"
        fix = "write it again with torch.save(model), or give its state dict with --arch"
    elif "GLOBAL" in text:
        name = text.partition("GLOBAL ")[2].split(" ")[0]
        found = f"a file in the format of torch 1.5 or older that names {name}; nothing was run"
        fix = "load it where you trust it and save only the state dict"
    elif re.search("only (append to|extend) lists", text) and not fills_lists_of_classes():
        found = f"a list of an unknown class, which torch {torch.__version__} does not read safely"
        fix = "load it with a newer torch, or save its state dict alone"
    else:
        if "weights_only" in text.partition("\n")[0]:
            text = text.partition("WeightsUnpickler error:")[2]
        line = next(filter(None, map(str.strip, text.splitlines())), "")
        reason = line[:200] if line and "weights_only" not in line else type(problem).__name__
        found = f"a damaged file, or a pickle that does more than hold a model ({reason})"
        fix = ASK
    return refusal(path, found, fix)
