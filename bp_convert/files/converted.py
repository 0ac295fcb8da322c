"""Converted models in files: plan and weights, read back without running anything in them.

``NAME.pt`` is what torch.save makes of ``{"format", "plan", "settings", "arch", "state",
"skeleton"}``. With an ``arch`` there is a state and no skeleton: the user's class is made by
``arch``, and the file needs no trust. Without, the skeleton is the whole model, whose classes the
safe loader must admit, and the state is None.

``NAME.safetensors`` holds each tensor once; ``NAME.plan.json`` beside it holds the rest, and which
names are tied to which.

Format 2 differs from 1 by entries that are neither parameters nor buffers: extra state; 3 by
tensors in few bits, as ``bits.filed`` has them.
"""

from __future__ import annotations

import itertools
import pickletools
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bp_convert.bits.filed import packed_writer, whole_content
from bp_convert.bits.grid import Form
from bp_convert.files.arch import absolute
from bp_convert.files.atomic import OUTPUT_SUFFIXES, Prove, Write, check_output, write_all
from bp_convert.files.entries import further_state, split_ties, whole_state
from bp_convert.files.sidecar import (
    STAMP,
    read_header,
    read_pair,
    tensors_in,
    weights_writer,
    write_pair,
    wrong,
)
from bp_convert.files.sniff import FileKind, file_kind
from bp_convert.files.unpickle import load_admitted, names_in
from bp_convert.files.writable import check_writable, is_plain
from bp_convert.hub.layout import holds_plan
from bp_convert.pickles import pickler
from bp_convert.pickles.admit import admit

FORMAT = 3
_KEYS = ("format", "plan", "settings", "arch", "state", "skeleton")


@dataclass(frozen=True)
class ConvertedFile:
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
    forms: Mapping[str, Form] | None = None,
) -> list[Path]:
    """Write a converted model whole or not at all; the other arguments are ``storage.save``'s.

    Args:
        plan_json: the plan.
        settings_json: the settings that it was made from.
        prove: called with the files before they take their names; what it raises stops that.
        forms: of tensors that are stored in few bits, by their names.
    """
    path = Path(path)
    check_output(path, force=force, suffixes=OUTPUT_SUFFIXES)
    check_writable(model, path, arch=arch, trust=trust)
    about = {
        "format": FORMAT if forms else 2 if further_state(model) else 1,
        "plan": plan_json,
        "settings": settings_json,
        "arch": None if arch is None else absolute(arch),
    }
    if path.suffix == ".safetensors":
        return write_pair(path, model, about, forms or {}, force, prove)
    if arch is None:
        content = {**about, "format": 1, "state": None, "skeleton": model}
    else:
        state = whole_state(model)
        plain = {
            key: one.detach() if isinstance(one, Tensor) else one for key, one in state.items()
        }
        content = {**about, "state": plain, "skeleton": None}
    write = packed_writer(content, forms, torch_writer) if forms else torch_writer(content)
    return write_all([(path, write)], force=force, prove=prove)


def save_weights(path: str | Path, model: nn.Module, *, force: bool = False) -> Path:
    """Write the weights of a model, and its extra state, as safetensors; tied ones once.

    Raises:
        CheckpointError: an entry of its state is no tensor, or the file exists or cannot be
            written.
    """
    path = Path(path)
    check_writable(model, path)
    kept, _ = split_ties(tensors_in(whole_state(model)))
    return write_all([(path, weights_writer(kept, {"format": "pt"}))], force=force)[0]


def is_converted(path: str | Path) -> bool:
    """Tell whether a file or folder holds a converted model; run and load nothing.

    Raises:
        CheckpointError: the file is no model file at all.
    """
    path = Path(path)
    if path.is_dir():
        return holds_plan(path)
    kind = file_kind(path)
    if kind is FileKind.SAFETENSORS:
        return STAMP in read_header(path)
    return kind is FileKind.TORCH and _first_keys(path) == ["format", "plan"]


def read_converted(
    path: str | Path, *, trust: Sequence[str] = (), beside: Path | None = None
) -> ConvertedFile:
    """Read a converted model onto the CPU without running anything from the file.

    Args:
        trust: packages whose classes the file may hold; their code runs.
        beside: the plan of a safetensors file, where it has another name than its own.

    Raises:
        CheckpointError: the file is not a converted model, is damaged or newer than this package,
            or holds classes that are not trusted.
    """
    path = Path(path)
    if path.is_dir():
        raise wrong(path, "a folder", "bp_convert.load(path) loads a converted one")
    kind = file_kind(path)
    if not is_converted(path):
        raise wrong(
            path,
            f"{kind.value} that bp-convert did not write",
            f"convert it first: bp-convert {path} -o OUT.pt",
        )
    if kind is FileKind.SAFETENSORS:
        about, weights = read_pair(path, beside)
        return ConvertedFile(*_about(about, path), state=weights, skeleton=None)
    content = load_admitted(path, kind, trust=trust)
    if not isinstance(content, dict) or tuple(content)[: len(_KEYS)] != _KEYS:
        raise wrong(path, "other contents than bp-convert writes", "convert the model again")
    skeleton, state = whole_content(content, str(path))
    if isinstance(skeleton, nn.Module):
        try:
            state = whole_state(skeleton)
        except Exception as problem:
            what = f"a {type(skeleton).__name__} that is incomplete"
            said = f"{type(problem).__name__}: {problem}"
            raise wrong(path, f"{what}: {said}", "convert the model again") from None
    elif skeleton is not None or not _is_state(state):
        raise wrong(path, "no weights where they should be", "convert the model again")
    return ConvertedFile(*_about(content, path), state=state, skeleton=skeleton)


def needs_trust(path: str | Path) -> list[str]:
    """List the names in a converted file that must be trusted when it is loaded."""
    path = Path(path)
    names = names_in(path) if file_kind(path) is FileKind.TORCH else []
    return [name for name in names if admit(name) is None]


def _about(content: dict[str, Any], path: Path) -> tuple[int, str, str, str | None]:
    number, plan, settings, arch = (content.get(key) for key in _KEYS[:4])
    if not isinstance(number, int) or not isinstance(plan, str) or not isinstance(settings, str):
        raise wrong(path, "other contents than bp-convert writes", "convert the model again")
    if number > FORMAT:
        raise wrong(path, f"format {number}", "update bp-convert: a newer one wrote this file")
    if arch is not None and not isinstance(arch, str):
        raise wrong(path, f"an arch that is a {type(arch).__name__}", "convert the model again")
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


def torch_writer(content: object) -> Write:
    """Return what writes a file with torch.save, in a form that the safe loader reads."""

    def write(temporary: Path) -> None:
        with temporary.open("xb") as file:  # given a path, torch would write the path into the file
            torch.save(content, file, pickle_module=pickler)

    return write


def _is_state(state: object) -> bool:
    return isinstance(state, dict) and all(
        isinstance(name, str) and is_plain(one) for name, one in state.items()
    )
