"""Checkpoints of a run: whole or absent, the two newest kept, each with its hash in its name."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from bp_convert.errors import CheckpointError
from bp_convert.files.atomic import digest_of_file, sweep_temporaries, write_hashed

FORM = 1
KEPT = 2


class Checkpoints:
    """The checkpoints in a run's folder.

    Args:
        folder: made where it is not there; nothing else may write to it.
        tidy: remove what a killed process left half written; only one process may.

    Raises:
        CheckpointError: it cannot be made or written to.
    """

    def __init__(self, folder: Path, *, tidy: bool = True) -> None:
        self.folder = folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as problem:
            raise CheckpointError(
                where=str(folder),
                found=f"the folder cannot be made: {problem.strerror or problem}",
                allowed="a folder that can be written",
                fix="name another folder",
            ) from None
        if tidy:
            sweep_temporaries(folder)

    def paths(self) -> list[Path]:
        """Return the checkpoints, the newest first."""
        return sorted(self.folder.glob("step-*.pt"), reverse=True)

    def write(self, step: int, state: Mapping[str, Any]) -> Path:
        """Write a checkpoint, then remove those before the last one.

        Raises:
            CheckpointError: it cannot be written; the older ones stay as they are.
        """

        def save(path: Path) -> None:
            torch.save({"form": FORM, **state}, path)

        try:
            path = write_hashed(self.folder, f"step-{step:09d}", ".pt", save)
        except CheckpointError as problem:
            older = self.paths()
            kept = f"; {older[0].name} stays, and resuming goes on from it" if older else ""
            raise CheckpointError(
                where=problem.where,
                found=problem.found + kept,
                allowed=problem.allowed,
                fix="free some space, then run the same command with --resume",
            ) from problem
        others = [one for one in self.paths() if one.name.split("-")[1] != f"{step:09d}"]
        for old in {*self.paths()} - {path, *others[: KEPT - 1]}:
            with contextlib.suppress(OSError):
                old.unlink()
        return path

    def newest(self) -> tuple[dict[str, Any] | None, list[str]]:
        """Read the newest checkpoint that is sound.

        Returns:
            Its state, or None where there is none; and a note for each that was passed over.
        """
        notes: list[str] = []
        for path in self.paths():
            problem = _damage(path)
            if problem is None:
                try:
                    state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
                except Exception as error:  # torch, pickle and zipfile raise their own
                    problem = f"it cannot be read ({type(error).__name__})"
                else:
                    if state.get("form") == FORM:
                        return state, notes
                    problem = f"its form is {state.get('form')}, not {FORM}"
            notes.append(f"the checkpoint {path.name} was passed over: {problem}")
        return None, notes


def _damage(path: Path) -> str | None:
    try:
        found = digest_of_file(path)
    except OSError as problem:
        return f"it cannot be read ({problem.strerror})"
    wanted = path.stem.rpartition("-")[2]
    return None if found == wanted else "its contents do not have the hash in its name"
