"""Converted models in files: plan and weights, read back without running anything in them.

``NAME.pt`` is what torch.save makes of ``{"format", "plan", "settings", "arch", "state",
"skeleton"}``. With an ``arch`` there is a state and no skeleton: the user's class is made by
``arch``, and the file needs no trust. Without, the skeleton is the whole model, whose classes the
safe loader must admit, and the state is None.

``NAME.safetensors`` holds each tensor once; ``NAME.plan.json`` beside it holds the rest, and which
names are tied to which.
"""

from __future__ import annotations

import hashlib
import itertools
import json
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
from bp_convert.files.atomic import Write, check_output, write_all
from bp_convert.files.picklable import check_picklable
from bp_convert.files.safe import read_header, read_safetensors
from bp_convert.files.sniff import Kind, kind_of
from bp_convert.files.tensors import all_weights, compacted, join_ties, split_ties
from bp_convert.files.unpickle import load_admitted, refused_names

FORMAT = 1
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
        state: every tensor of the converted model, by each of its names.
        skeleton: the converted model itself, if the file holds it.
    """

    format: int
    plan_json: str
    settings_json: str
    arch: str | None
    state: dict[str, Tensor]
    skeleton: nn.Module | None


def save_converted(
    path: str | Path,
    *,
    model: nn.Module,
    plan_json: str,
    settings_json: str,
    arch: str | None,
    force: bool = False,
) -> list[Path]:
    """Write a converted model whole or not at all.

    Args:
        path: ``NAME.pt``, or ``NAME.safetensors`` to have ``NAME.plan.json`` written beside it.
        arch: how to make the source model; then a ``.pt`` file holds no class of the user.
        force: replace existing files.

    Returns:
        The files written.

    Raises:
        CheckpointError: the model cannot be pickled, or the file exists or cannot be written.
    """
    path = Path(path)
    check_output(path, force=force, suffixes=OUTPUT_SUFFIXES)
    about = {"format": FORMAT, "plan": plan_json, "settings": settings_json, "arch": arch}
    if path.suffix == ".safetensors":
        return _save_safetensors(path, model, about, force)
    if arch is None:
        check_picklable(model)
        content = {**about, "state": None, "skeleton": compacted(model)}
    else:
        _refuse_extra_state(model, path)
        content = {**about, "state": _plain(all_weights(compacted(model))), "skeleton": None}
    return write_all([(path, _torch_writer(content))], force=force)


def save_dense(path: str | Path, model: nn.Module, *, force: bool = False) -> Path:
    """Write a plain torch model with torch.save, whole or not at all.

    Raises:
        CheckpointError: the model cannot be pickled, or the file exists or cannot be written.
    """
    path = Path(path)
    check_output(path, force=force, suffixes=(".pt", ".pth"))
    check_picklable(model)
    return write_all([(path, _torch_writer(compacted(model)))], force=force)[0]


def is_converted(path: str | Path) -> bool:
    """Tell whether a file was written by ``save_converted``; run and load nothing.

    Raises:
        CheckpointError: the file is no model file at all.
    """
    path = Path(path)
    kind = kind_of(path)
    if kind is Kind.SAFETENSORS:
        return _STAMP in read_header(path)
    return kind is Kind.TORCH and _first_keys(path) == ["format", "plan"]


def read_converted(path: str | Path, *, trust: Sequence[str] = ()) -> Converted:
    """Read a converted model onto the CPU without running anything from the file.

    Args:
        trust: packages whose classes the file may hold; their code runs.

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
        return _read_safetensors(path)
    content = load_admitted(path, kind, trust=trust)
    if not isinstance(content, dict) or tuple(content) != _KEYS:
        raise _wrong(path, "other contents than bp-convert writes", "convert the model again")
    skeleton, state = content["skeleton"], content["state"]
    if isinstance(skeleton, nn.Module):
        state = all_weights(skeleton)
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
    path: Path, model: nn.Module, about: dict[str, Any], force: bool
) -> list[Path]:
    _refuse_extra_state(model, path)
    kept, ties = split_ties(all_weights(model))
    sidecar = {
        **about,
        "plan": json.loads(about["plan"]),
        "settings": json.loads(about["settings"]),
        "ties": ties,
    }
    text = json.dumps(sidecar, indent=1)
    # safetensors takes neither slices nor tensors that overlap.
    plain = {name: one.detach().contiguous().clone() for name, one in kept.items()}
    header = {"format": "pt", _STAMP: _digest(sidecar)}

    def write_weights(temporary: Path) -> None:
        safetensors.torch.save_file(plain, temporary, metadata=header)

    def write_plan(temporary: Path) -> None:
        temporary.write_text(text + "\n", encoding="utf-8")

    return write_all([(path, write_weights), (plan_path(path), write_plan)], force=force)


def _read_safetensors(path: Path) -> Converted:
    beside = plan_path(path)
    try:
        content = json.loads(beside.read_text(encoding="utf-8"))
    except (OSError, ValueError) as problem:
        raise _wrong(
            beside, f"no plan that can be read: {problem}", "keep it beside the weights"
        ) from None
    if not isinstance(content, dict) or not isinstance(content.get("ties"), dict):
        raise _wrong(beside, "other contents than bp-convert writes", "convert the model again")
    if read_header(path).get(_STAMP) != _digest(content):
        raise _wrong(
            beside,
            f"another plan than the one that {path.name} was written with",
            "copy both files again, from one conversion; to change a plan, convert with --plan",
        )
    content["plan"] = json.dumps(content.get("plan"))
    content["settings"] = json.dumps(content.get("settings"))
    state = join_ties(read_safetensors(path), content["ties"], str(path))
    return Converted(*_about(content, beside), state=state, skeleton=None)


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
            torch.save(content, file)

    return write


def _plain(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: one.detach() for name, one in weights.items()}


def _is_state(state: object) -> bool:
    return isinstance(state, dict) and all(
        isinstance(name, str) and isinstance(one, Tensor) for name, one in state.items()
    )


def _refuse_extra_state(model: nn.Module, path: Path) -> None:
    extra = [name for name in model.state_dict() if name.endswith("_extra_state")]
    if extra:
        raise _wrong(
            path,
            f"state that is not a tensor, in {extra[0].rpartition('.')[0] or 'the model'}",
            "write a .pt file without --arch, which holds the whole model",
        )


def _wrong(path: Path, found: str, fix: str) -> CheckpointError:
    return CheckpointError(
        where=str(path),
        found=found,
        allowed="a model that bp-convert wrote: NAME.pt, or NAME.safetensors beside NAME.plan.json",
        fix=fix,
    )
