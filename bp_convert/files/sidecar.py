"""Safetensors files: tensors and strings, with nothing in them that could run; and the plan beside.

``NAME.safetensors`` and ``NAME.plan.json`` belong together.

The header of the weights holds a digest of the plan. Two files cannot take their names at once;
where a process dies between the two, the reader finds the new plan by its temporary name, which is
made of that digest.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import safetensors.torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from bp_convert.bits.filed import PACKED, Forms, joined, parted
from bp_convert.errors import CheckpointError
from bp_convert.files.atomic import Prove, Write, plan_path, temporary, write_all
from bp_convert.files.entries import join_ties, split_ties, whole_state
from bp_convert.files.sniff import refusal

STAMP = "bp_convert_plan"  # in a safetensors header: the digest of the plan beside it


def write_pair(
    path: Path,
    model: nn.Module,
    about: dict[str, Any],
    forms: Forms,
    force: bool,
    prove: Prove | None,
) -> list[Path]:
    """Write weights, and beside them the plan, the settings and which names are tied.

    Args:
        about: format, plan, settings and arch; plan and settings as JSON.
        forms: of tensors that are stored in few bits.

    Raises:
        CheckpointError: a file exists or cannot be written.
    """
    whole, ties = split_ties(tensors_in(whole_state(model)))
    kept, packed = parted(whole, forms)
    sidecar = {
        **about,
        "plan": json.loads(about["plan"]),
        "settings": json.loads(about["settings"]),
        "ties": ties,
        **({PACKED: packed} if packed else {}),
    }
    text = json.dumps(sidecar, indent=1) + "\n"
    stamp = _digest(sidecar)
    writes: list[tuple[Path, Write]] = [
        (path, weights_writer(kept, {"format": "pt", STAMP: stamp})),
        (plan_path(path), partial(Path.write_text, data=text, encoding="utf-8")),
    ]
    labels = ["", _label(path, stamp)]
    return write_all(writes, force=force, prove=prove, labels=labels)


def read_pair(path: Path, beside: Path | None = None) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read weights and what stands beside them; plan and settings as JSON.

    Args:
        beside: the plan's file, where it has another name than its own.

    Raises:
        CheckpointError: the plan is absent, damaged, or another's; or the weights are damaged.
    """
    stamp = read_header(path).get(STAMP, "")
    waiting = temporary(Path(os.path.realpath(path)), _label(path, stamp))
    try:
        content = _sidecar_of(beside or plan_path(path), stamp)
    except CheckpointError:
        if beside is not None or not waiting.is_file():
            raise
        content = _sidecar_of(waiting, stamp)
    content["plan"] = json.dumps(content.get("plan"))
    content["settings"] = json.dumps(content.get("settings"))
    kept = joined(read_safetensors(path), content.pop(PACKED, {}), str(path))
    state = join_ties(kept, content["ties"], str(path))
    return content, state


def weights_writer(kept: dict[str, Tensor], header: dict[str, str]) -> Write:
    """Return what writes tensors as safetensors, with words in the header."""

    def write(place: Path) -> None:
        # safetensors takes neither slices nor tensors that overlap.
        plain = {
            name: one.detach().resolve_conj().resolve_neg().contiguous().clone()
            for name, one in kept.items()
        }
        safetensors.torch.save_file(plain, place, metadata=header)

    return write


def tensors_in(state: dict[str, object]) -> dict[str, Tensor]:
    """Return the entries of a state that are tensors."""
    return {name: one for name, one in state.items() if isinstance(one, Tensor)}


def _label(path: Path, stamp: str) -> str:
    name = Path(os.path.realpath(path)).name
    return hashlib.sha256(f"{name} {stamp}".encode()).hexdigest()[:16]


def _sidecar_of(beside: Path, stamp: str) -> dict[str, Any]:
    """Read what stands beside weights whose header holds ``stamp``."""
    try:
        content = json.loads(beside.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as problem:
        raise wrong(
            beside, f"no plan that can be read: {problem}", "keep it beside the weights"
        ) from None
    if (
        not isinstance(content, dict)
        or not isinstance(content.get("ties"), dict)
        or not all(isinstance(one, str) for one in content["ties"].values())
    ):
        raise wrong(beside, "other contents than bp-convert writes", "convert the model again")
    if _digest(content) != stamp:
        raise wrong(
            beside,
            "another plan than the one that the weights were written with",
            "copy both files again, from one conversion; to change a plan, convert with --plan",
        )
    return content


def _digest(sidecar: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(sidecar, sort_keys=True).encode()).hexdigest()


def wrong(path: Path, found: str, fix: str) -> CheckpointError:
    """Return the error for a file that is not what bp-convert writes."""
    return CheckpointError(
        where=str(path),
        found=found,
        allowed="a model that bp-convert wrote: NAME.pt, or NAME.safetensors beside NAME.plan.json",
        fix=fix,
    )


def read_safetensors(path: Path) -> dict[str, Tensor]:
    """Read the tensors of a safetensors file onto the CPU.

    Raises:
        CheckpointError: the file is damaged.
    """
    with _errors_named(path):
        return dict(safetensors.torch.load_file(path, device="cpu"))


def read_header(path: Path) -> dict[str, str]:
    """Read the free text in the header of a safetensors file, and nothing else of it.

    Raises:
        CheckpointError: the file is damaged.
    """
    with _errors_named(path), safe_open(path, framework="pt") as file:
        return dict(file.metadata() or {})


@contextmanager
def _errors_named(path: Path) -> Iterator[None]:
    try:
        yield
    except (SafetensorError, OSError, ValueError, KeyError) as problem:
        raise refusal(
            path, f"a damaged safetensors file: {problem}", "copy or download it again"
        ) from None
