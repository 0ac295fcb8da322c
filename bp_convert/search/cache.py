"""Curves kept on disk by what they were computed from, so that a second target takes seconds."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from bp_convert.search.curves import Curve
from bp_convert.tuning.machine_table import cache_base
from bp_convert.values.factors import FactorSpec

LIMIT = 1 << 30  # bytes of curves that are kept; a large model has some megabytes of them
FORM = 17  # of what is kept and how it is computed: a change makes old files unused


def cache_folder() -> Path:
    """Return where curves are kept: ``BP_CONVERT_CACHE``, else the user's cache folder."""
    return cache_base() / "curves"


def key_of(tensors: Sequence[Tensor], *words: str) -> str:
    """Return a hash of the contents of tensors, and of words that say what is computed."""
    digest = hashlib.blake2b(f"{FORM}|{'|'.join(words)}".encode(), digest_size=20)
    for tensor in tensors:
        digest.update(f"|{tuple(tensor.shape)}{tensor.dtype}".encode())
        digest.update(_bytes(tensor))
    return digest.hexdigest()


def words_of(model: nn.Module) -> str:
    """Return a model's ``repr``: another activation or stride gives other numbers on the same
    weights."""
    return re.sub(r"\b0x[0-9a-f]+", "", repr(model))  # addresses are new in each process


def _bytes(tensor: Tensor) -> Any:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def read(key: str) -> tuple[list[Curve], float] | None:
    """Return the curves kept under a key, and the sensitivity beside them; None for neither."""
    path = cache_folder() / f"{key}.npz"
    try:
        with path.open("rb") as opened, np.load(opened, allow_pickle=False) as held:
            head = json.loads(str(held["head"]))
            curves = [
                Curve(FactorSpec.model_validate(spec), held[f"errors{i}"])
                for i, spec in enumerate(head["specs"])
            ]
            found = curves, float(head["sensitivity"])
    except Exception:  # not there, or damaged in whatever way: it is computed again
        return None
    with contextlib.suppress(OSError):
        os.utime(path)  # what was used last is kept longest
    return found


def write(key: str, curves: Sequence[Curve], sensitivity: float) -> None:
    """Keep curves under a key; a folder that cannot be written to is no error."""
    folder = cache_folder()
    head = {
        "specs": [curve.spec.model_dump(by_alias=True) for curve in curves],
        "sensitivity": sensitivity,
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _trim(folder)
        with tempfile.TemporaryDirectory(dir=folder) as work:
            path = Path(work) / "curves.npz"
            arrays = {f"errors{i}": curve.errors for i, curve in enumerate(curves)}
            np.savez(path, head=np.array(json.dumps(head)), **arrays)  # type: ignore[arg-type]
            path.replace(folder / f"{key}.npz")
    except OSError:
        return


def read_names(key: str) -> list[tuple[str, ...]] | None:
    """Return the lists of names kept under a key; None where there are none."""
    try:
        held = json.loads((cache_folder() / f"{key}.json").read_text(encoding="utf-8"))
        return [tuple(map(str, one)) for one in held]
    except Exception:  # not there, or damaged in whatever way: they are found again
        return None


def write_names(key: str, names: Sequence[Sequence[str]]) -> None:
    """Keep lists of names under a key; a folder that cannot be written to is no error."""
    folder = cache_folder()
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as work:
            path = Path(work) / "names.json"
            path.write_text(json.dumps(names), encoding="utf-8")
            path.replace(folder / f"{key}.json")


@functools.cache  # once a process: what one process writes is little beside the limit
def _trim(folder: Path) -> None:
    """Remove what was not used for longest, where a folder holds more than ``LIMIT``."""
    held = 0
    found = [(entry.stat(), entry.path) for entry in os.scandir(folder) if entry.is_file()]
    for facts, path in sorted(found, key=lambda one: one[0].st_mtime, reverse=True):
        held += facts.st_size
        if held > LIMIT:
            Path(path).unlink(missing_ok=True)
