"""A model without weights, made from its config, and where each of its tensors lies on the disk."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from bp_convert.errors import CheckpointError
from bp_convert.files.arch import arch_factory, arch_of_folder
from bp_convert.files.state import match_names, untied
from bp_convert.files.unpickle import listed
from bp_convert.large.shards import Checkpoint, Stored


@dataclass(frozen=True)
class Skeleton:
    """A model on the meta device.

    Attributes:
        model: in eval mode, with the types that its tensors have on the disk.
        checkpoint: where they are.
        names: of each entry of the model's state, its name there.
        notes: remarks.
    """

    model: nn.Module
    checkpoint: Checkpoint
    names: dict[str, str]
    notes: tuple[str, ...]

    def stored(self, name: str) -> Stored:
        """Return where an entry of the model's state lies."""
        return self.checkpoint.entries[self.names[name]]


def skeleton_of(folder: Path) -> Skeleton:
    """Make the model of a folder of transformers without reading any of its weights.

    Raises:
        CheckpointError: it is no such folder, or its weights are not the model's.
    """
    checkpoint = Checkpoint(folder)
    arch = arch_of_folder(folder)
    if arch is None or not arch.startswith("transformers:"):
        raise _wrong(folder, "no config.json of transformers", "give its folder")
    with torch.device("meta"):
        model = arch_factory(arch)().eval()
    state = model.state_dict(keep_vars=True)
    there = list(checkpoint.entries)
    matched, steps = match_names(there, frozenset(state))
    found = dict(zip(matched, there, strict=True))
    names = {name: found[name] for name in state if name in found}
    missing = untied(model, [name for name in state if name not in names], names)
    if missing:
        raise _wrong(
            folder,
            f"{len(missing)} of {len(state)} weights are missing, or have other names than in the "
            f"model: {listed(missing)}",
            "convert it in memory, where transformers renames them: --in-memory",
        )
    for name, key in names.items():
        stored = checkpoint.entries[key]
        if stored.shape != tuple(state[name].shape):
            raise _wrong(
                folder,
                f"{name}: {stored.shape} in the file, {tuple(state[name].shape)} in the model",
                "give the config.json that belongs to these weights",
            )
        state[name].data = torch.empty(stored.shape, dtype=stored.dtype, device="meta")
    left = sorted(found.keys() - state.keys())
    notes = (*steps, *([f"not in the model, left out: {listed(left)}"] if left else []))
    return Skeleton(model, checkpoint, names, notes)


def _wrong(folder: Path, found: str, fix: str) -> CheckpointError:
    return CheckpointError(
        where=str(folder),
        found=found,
        allowed="a folder of transformers with the weights that its config.json tells",
        fix=fix,
    )
