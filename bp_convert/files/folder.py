"""A model of transformers written to a folder: weights, config, what lies beside them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from torch import nn

from bp_convert.errors import CheckpointError
from bp_convert.files.atomic import Prove, write_folder
from bp_convert.files.read_model import load_model
from bp_convert.files.reread import bits_of, compare
from bp_convert.graph.running import evaluating
from bp_convert.hub.layout import copy_companions, holds_plan
from bp_convert.hub.marked import METHOD, check_class, quiet
from bp_convert.hub.rebuild import from_pretrained


def save_folder(
    model: nn.Module,
    path: Path,
    *,
    force: bool = False,
    check: bool = True,
    prove: Prove | None = None,
) -> Path:
    """Write a model to a folder, with the tokenizer and the like of where it came from.

    Args:
        check: read the folder back, and compare every bit, before it takes its name.
        prove: does so in the place of ``check``.

    Raises:
        CheckpointError: it is no model of transformers, or the folder cannot be written.
        VerificationError: the folder does not hold what the model does; then it is removed.
    """
    check_foldable(model)
    made: Any = model

    def write(place: Path) -> None:
        source = _source(made)
        if source is not None:
            copy_companions(source, place)
        with quiet():
            getattr(made, METHOD)(place)

    if prove is None and check:
        prove = folder_read_back(model, path)
    return write_folder(path, write, force=force, prove=prove)


def check_foldable(model: nn.Module) -> None:
    """Refuse a model that no folder can hold.

    Raises:
        CheckpointError: it is no model of transformers.
    """
    if not callable(getattr(type(model), METHOD, None)) or not hasattr(model, "config"):
        raise CheckpointError(
            where=type(model).__name__,
            found="a folder to write to, and a model that is not one of transformers",
            allowed="a folder for a model of transformers; for others NAME.pt or NAME.safetensors",
            fix="give the result's name an ending, such as -o small.pt",
        )
    check_class(model)


def loaded_folder(folder: Path) -> nn.Module:
    """Load what ``save_folder`` wrote, converted or in plain layers."""
    if holds_plan(folder):
        return from_pretrained(folder)
    return evaluating(load_model(folder).model)


def bits_in_folder(model: nn.Module) -> dict[str, str]:
    """Return a hash of each entry of a model's state that a folder holds: transformers computes
    buffers anew that are no part of the state."""
    held = model.state_dict()
    return {name: one for name, one in bits_of(model).items() if name in held}


def folder_read_back(model: nn.Module, path: Path) -> Prove:
    """Return what reads a folder of ``model`` before it takes its name ``path``."""

    def prove(places: Sequence[Path]) -> None:
        compare(path, bits_in_folder(model), bits_in_folder(loaded_folder(places[0])))

    return prove


def _source(model: Any) -> Path | None:
    """Return the folder that a model came from: its own, or that of the Hub's name in the cache."""
    name = str(getattr(model.config, "name_or_path", "") or "")
    if not name or Path(name).is_dir():
        return Path(name) if name else None
    find: Callable[..., Any] = import_module("huggingface_hub").try_to_load_from_cache
    try:
        found = find(name, "config.json")
    except ValueError:  # no name that the Hub could have
        return None
    return Path(found).parent if isinstance(found, str) else None
