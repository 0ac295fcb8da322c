"""Converted models in files: plan and weights, read back without running anything in them.

``NAME.pt`` is what torch.save makes of ``{"format", "plan", "settings", "arch", "state",
"skeleton"}``. With an ``arch`` there is a state and no skeleton: the user's class is made by
``arch``, and the file needs no trust. Without, the skeleton is the whole model, whose classes the
safe loader must admit, and the state is None.

``NAME.safetensors`` holds each tensor once; ``NAME.plan.json`` beside it holds the rest, and which
names are tied to which.

Format 2 differs from 1 by entries that are neither parameters nor buffers: extra state.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import pickletools
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn

from bp_convert.errors import CheckpointError
from bp_convert.files import forms
from bp_convert.files.arch import absolute
from bp_convert.files.atomic import Prove, Write, check_output, temporary, write_all
from bp_convert.files.safe import read_header, read_safetensors
from bp_convert.files.sniff import Kind, kind_of
from bp_convert.files.storable import is_plain
from bp_convert.files.tensors import further_state, join_ties, split_ties, whole_state
from bp_convert.files.unpickle import load_admitted, refused_names
from bp_convert.files.writable import check_whole, check_writable

FORMAT = 2
OUTPUT_SUFFIXES = (".pt", ".pth", ".safetensors")
_KEYS = ("format", "plan", "settings", "arch", "state", "skeleton")
_STAMP = "bp_convert_plan"  # in a safetensors header: the digest of the plan beside it


@dataclass(frozen=True)
class Converted:
    """What a converted file holds.

    Attributes:
        format: of the file.
        plan_json: the plan, as JSON.
        settings_json: the settings that the plan was made from, as JSON.
        arch: how to make the source model, if the file says so.
        state: every entry of the converted model's state, by each of its names.
        skeleton: the converted model itself, if the file holds it.
    """

    format: int
    plan_json: str
    settings_json: str
    arch: str | None
    state: dict[str, Any]
    skeleton: nn.Module | None


def save_converted(
    path: str | Path,
    *,
    model: nn.Module,
    plan_json: str,
    settings_json: str,
    arch: str | None,
    force: bool = False,
    trust: Sequence[str] = (),
    prove: Prove | None = None,
) -> list[Path]:
    """Write a converted model whole or not at all.

    Args:
        path: ``NAME.pt``, or ``NAME.safetensors`` to have ``NAME.plan.json`` written beside it.
        arch: how to make the source model; then a ``.pt`` file holds no class of the user.
        force: replace existing files.
        trust: packages and Python files that will be trusted when the file is loaded.
        prove: called with the files before they take their names; what it raises stops that.

    Returns:
        The files written.

    Raises:
        CheckpointError: the model could not be read back, or the file exists or cannot be
            written.
    """
    path = Path(path)
    check_output(path, force=force, suffixes=OUTPUT_SUFFIXES)
    check_writable(model, path, arch=arch, trust=trust)
    about = {
        "format": FORMAT if further_state(model) else 1,
        "plan": plan_json,
        "settings": settings_json,
        "arch": None if arch is None else absolute(arch),
    }
    if path.suffix == ".safetensors":
        return _save_safetensors(path, model, about, force, prove)
    if arch is None:
        content = {**about, "format": 1, "state": None, "skeleton": model}
    else:
        content = {**about, "state": _plain(whole_state(model)), "skeleton": None}
    return write_all([(path, _torch_writer(content))], force=force, prove=prove)


def save_dense(
    path: str | Path,
    model: nn.Module,
    *,
    force: bool = False,
    trust: Sequence[str] = (),
    prove: Prove | None = None,
) -> Path:
    """Write a plain torch model with torch.save, whole or not at all.

    Raises:
        CheckpointError: the model could not be read back, or the file exists or cannot be
            written.
    """
    path = Path(path)
    check_output(path, force=force, suffixes=(".pt", ".pth"))
    check_whole(model, trust)
    return write_all([(path, _torch_writer(model))], force=force, prove=prove)[0]


def is_converted(path: str | Path) -> bool:
    """Tell whether a file was written by ``save_converted``; run and load nothing.

    Raises:
        CheckpointError: the file is no model file at all.
    """
    path = Path(path)
    if path.is_dir():  # of weights, which load_model knows
        return False
    kind = kind_of(path)
    if kind is Kind.SAFETENSORS:
        return _STAMP in read_header(path)
    return kind is Kind.TORCH and _first_keys(path) == ["format", "plan"]


def read_converted(
    path: str | Path, *, trust: Sequence[str] = (), beside: Path | None = None
) -> Converted:
    """Read a converted model onto the CPU without running anything from the file.

    Args:
        trust: packages whose classes the file may hold; their code runs.
        beside: the plan of a safetensors file, where it has another name than its own.

    Raises:
        CheckpointError: the file is not a converted model, is damaged or newer than this package,
            or holds classes that are not trusted.
    """
    path = Path(path)
    kind = kind_of(path)
    if not is_converted(path):
        raise _wrong(
            path,
            f"{kind.value} that bp-convert did not write",
            f"convert it first: bp-convert {path} -o OUT.pt",
        )
    if kind is Kind.SAFETENSORS:
        return _read_safetensors(path, beside)
    content = load_admitted(path, kind, trust=trust)
    if not isinstance(content, dict) or tuple(content) != _KEYS:
        raise _wrong(path, "other contents than bp-convert writes", "convert the model again")
    skeleton, state = content["skeleton"], content["state"]
    if isinstance(skeleton, nn.Module):
        state = _state_of(skeleton, path)
    elif skeleton is not None or not _is_state(state):
        raise _wrong(path, "no weights where they should be", "convert the model again")
    return Converted(*_about(content, path), state=state, skeleton=skeleton)


def needs_trust(path: str | Path) -> list[str]:
    """List the names in a converted file that must be trusted when it is loaded."""
    path = Path(path)
    return refused_names(path) if kind_of(path) is Kind.TORCH else []


def plan_path(path: Path) -> Path:
    """Return where the plan of a ``.safetensors`` file stands."""
    return path.with_suffix(".plan.json")


def _save_safetensors(
    path: Path, model: nn.Module, about: dict[str, Any], force: bool, prove: Prove | None
) -> list[Path]:
    kept, ties = split_ties(_tensors(whole_state(model)))
    sidecar = {
        **about,
        "plan": json.loads(about["plan"]),
        "settings": json.loads(about["settings"]),
        "ties": ties,
    }
    text = json.dumps(sidecar, indent=1)
    # safetensors takes neither slices nor tensors that overlap.
    plain = {
        name: one.detach().resolve_conj().resolve_neg().contiguous().clone()
        for name, one in kept.items()
    }
    stamp = _digest(sidecar)
    header = {"format": "pt", _STAMP: stamp}

    def write_weights(place: Path) -> None:
        safetensors.torch.save_file(plain, place, metadata=header)

    def write_plan(place: Path) -> None:
        place.write_text(text + "\n", encoding="utf-8")

    # Where the process dies between the two names, the reader finds the plan by its label.
    writes = [(path, write_weights), (plan_path(path), write_plan)]
    labels = ["", _label(path, stamp)]
    return write_all(writes, force=force, prove=prove, labels=labels)


def _label(path: Path, stamp: str) -> str:
    name = Path(os.path.realpath(path)).name
    return hashlib.sha256(f"{name} {stamp}".encode()).hexdigest()[:16]


def _read_safetensors(path: Path, beside: Path | None) -> Converted:
    stamp = read_header(path).get(_STAMP, "")
    waiting = temporary(Path(os.path.realpath(path)), _label(path, stamp))
    if beside is None and waiting.is_file() and _sidecar_of(waiting, stamp) is not None:
        beside = waiting
    beside = beside or plan_path(path)
    content = _sidecar_of(beside, stamp)
    if content is None:
        raise _wrong(
            beside,
            f"another plan than the one that {path.name} was written with",
            "copy both files again, from one conversion; to change a plan, convert with --plan",
        )
    content["plan"] = json.dumps(content.get("plan"))
    content["settings"] = json.dumps(content.get("settings"))
    state = join_ties(read_safetensors(path), content["ties"], str(path))
    return Converted(*_about(content, beside), state=state, skeleton=None)


def _sidecar_of(beside: Path, stamp: str) -> dict[str, Any] | None:
    """Return what stands beside weights, or None if it belongs to others."""
    try:
        content = json.loads(beside.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as problem:
        raise _wrong(
            beside, f"no plan that can be read: {problem}", "keep it beside the weights"
        ) from None
    if (
        not isinstance(content, dict)
        or not isinstance(content.get("ties"), dict)
        or not all(isinstance(one, str) for one in content["ties"].values())
    ):
        raise _wrong(beside, "other contents than bp-convert writes", "convert the model again")
    return content if _digest(content) == stamp else None


def _about(content: dict[str, Any], path: Path) -> tuple[int, str, str, str | None]:
    number, plan, settings, arch = (content.get(key) for key in _KEYS[:4])
    if not isinstance(number, int) or not isinstance(plan, str) or not isinstance(settings, str):
        raise _wrong(path, "other contents than bp-convert writes", "convert the model again")
    if number > FORMAT:
        raise _wrong(path, f"format {number}", "update bp-convert: a newer one wrote this file")
    if arch is not None and not isinstance(arch, str):
        raise _wrong(path, f"an arch that is a {type(arch).__name__}", "convert the model again")
    return number, plan, settings, arch


def _first_keys(path: Path) -> list[str]:
    """Return the first two keys of the dictionary in a torch.save file, without unpickling it."""
    try:
        with zipfile.ZipFile(path) as archive:
            name = next(one for one in archive.namelist() if one.endswith("/data.pkl"))
            with archive.open(name) as file:
                head = file.read(256)
        strings = (
            argument
            for _, argument, _ in itertools.islice(pickletools.genops(head), 12)
            if isinstance(argument, str)
        )
        return list(itertools.islice(strings, 2))
    except (StopIteration, ValueError, zipfile.BadZipFile, OSError, NotImplementedError):
        return []


def _digest(sidecar: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(sidecar, sort_keys=True).encode()).hexdigest()


def _torch_writer(content: object) -> Write:
    def write(temporary: Path) -> None:
        with temporary.open("xb") as file:  # given a path, torch would write the path into the file
            torch.save(content, file, pickle_module=forms)

    return write


def _state_of(skeleton: nn.Module, path: Path) -> dict[str, object]:
    try:
        return whole_state(skeleton)
    except Exception as problem:
        raise _wrong(
            path,
            f"a {type(skeleton).__name__} that is incomplete: {type(problem).__name__}: {problem}",
            "convert the model again",
        ) from None


def _tensors(state: dict[str, object]) -> dict[str, Tensor]:
    return {name: one for name, one in state.items() if isinstance(one, Tensor)}


def _plain(state: dict[str, object]) -> dict[str, object]:
    return {name: one.detach() if isinstance(one, Tensor) else one for name, one in state.items()}


def _is_state(state: object) -> bool:
    return isinstance(state, dict) and all(
        isinstance(name, str) and is_plain(one) for name, one in state.items()
    )


def _wrong(path: Path, found: str, fix: str) -> CheckpointError:
    return CheckpointError(
        where=str(path),
        found=found,
        allowed="a model that bp-convert wrote: NAME.pt, or NAME.safetensors beside NAME.plan.json",
        fix=fix,
    )
