"""A run watched: a JSON-lines log, TensorBoard's event files, and words for a progress bar."""

from __future__ import annotations

import contextlib
import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bp_convert.errors import CheckpointError
from bp_convert.files.atomic import write_text
from bp_convert.values.base import as_json
from bp_convert.values.progress import Progress

LOG = "log.jsonl"
BOARD = "tensorboard"


class RunLog:
    """Writes what happens into a run's folder.

    Args:
        folder: where they go; None writes nothing.
        progress: called with words, steps done and their number.
        resumed: step that the run goes on from; what the log says of later ones is dropped.
    """

    def __init__(
        self, folder: Path | None, progress: Progress, *, resumed: int | None = None
    ) -> None:
        self._progress = progress
        self._log: Any = None
        self._board: Any = None
        self._metric = ""
        if folder is None:
            return
        path = folder / LOG
        try:
            kept = _kept(path, resumed) if resumed is not None else ""
            write_text(path, kept, force=True)
            self._log = path.open("a", encoding="utf-8", buffering=1)
        except OSError as problem:
            raise _full(path, problem) from None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(
                str(folder / BOARD), purge_step=None if resumed is None else resumed + 1
            )

    def step(self, number: int, total: int, about: Mapping[str, float]) -> None:
        """Note a step: ``loss``, ``lr``, ``norm``, ``rate`` (examples a second)."""
        self._write({"step": number, **about})
        self._plot("train", about, number)
        words = f"loss {about['loss']:.4g}{self._metric}, {about['rate']:,.0f}/s"
        self.say(words, number, total)

    def validation(self, number: int, found: Mapping[str, float]) -> None:
        """Note a validation."""
        self._write({"step": number, "validation": dict(found)})
        self._plot("validation", found, number)
        self._metric = "".join(f", {key} {one:.4g}" for key, one in found.items() if key != "loss")

    def event(self, number: int, words: str) -> None:
        """Note something that happened."""
        self._write({"step": number, "event": words})

    def say(self, words: str, done: int, total: int) -> None:
        """Tell whoever looks."""
        self._progress(words, done, total)

    def close(self) -> None:
        """Finish the files."""
        for one in (self._log, self._board):
            if one is not None:
                with contextlib.suppress(OSError):
                    one.close()
        self._log = self._board = None

    def _plot(self, what: str, values: Mapping[str, float], number: int) -> None:
        for key, value in values.items() if self._board is not None else ():
            self._board.add_scalar(f"{what}/{key}", value, number)

    def _write(self, entry: Mapping[str, Any]) -> None:
        if self._log is None:
            return
        try:
            self._log.write(as_json(entry, indent=None) + "\n")
        except OSError as problem:
            raise _full(Path(self._log.name), problem) from None


def _kept(path: Path, step: int) -> str:
    """Return the lines of a log up to a step; a line that was cut off is dropped."""
    if not path.exists():
        return ""
    kept = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if isinstance(entry, dict) and entry.get("step", 0) <= step:
            kept.append(line)
    return "".join(f"{line}\n" for line in kept)


def _full(path: Path, problem: OSError) -> CheckpointError:
    return CheckpointError(
        where=str(path),
        found=f"it cannot be written: {problem.strerror or problem}",
        allowed="a folder that can be written, with enough free space",
        fix="free some space, then run the same command with --resume",
    )
