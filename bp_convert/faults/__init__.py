"""What to say of a fault that nobody foresaw: the stage and the layer in work, and a report that a
user can attach. It holds no weights, no data, no environment variables.
"""

from __future__ import annotations

import errno
import os
import platform
import re
import shlex
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bp_convert.errors import BpConvertError
from bp_convert.faults.where import layer_of, model_of, stage_of
from bp_convert.provenance import devices, versions
from bp_convert.values.progress import Progress

PACKAGES = (
    *("torch", "torchvision", "timm", "transformers", "datasets"),
    *("numpy", "pydantic", "safetensors", "accelerate", "typer"),
)
LINES, LENGTH = 8, 300  # of a message, at most


@dataclass(frozen=True)
class Fault:
    """A fault that nobody foresaw.

    Attributes:
        problem: the exception.
        stage: what was being done; empty where that is not known.
        layer: the layer in work, with its type; empty where there is none.
        model: class of the model; empty where there is none.
        step: what progress told last.
    """

    problem: BaseException
    stage: str
    layer: str
    model: str
    step: str = ""

    @property
    def where(self) -> str:
        """Stage and layer, in words."""
        return ", layer ".join(filter(None, (self.stage or "working", self.layer)))

    @property
    def place(self) -> str:
        """The function that raised, with its file and line."""
        trace = traceback.extract_tb(self.problem.__traceback__)
        if not trace:
            return ""
        return f"{Path(trace[-1].filename).name}, line {trace[-1].lineno}, in {trace[-1].name}"

    @property
    def words(self) -> str:
        """The exception in one line."""
        lines = _without_numbers(str(self.problem).strip()).splitlines()
        return f"{type(self.problem).__name__}: {lines[0][:LENGTH] if lines else 'no more words'}"

    def report(self, command: Sequence[str]) -> str:
        """Return a text that can be attached to an issue."""
        heads = {
            "command": shlex.join(command),
            "stage": self.stage,
            "layer": self.layer,
            "last step": self.step,
            "model": self.model,
            "fault": self.words,
            "at": self.place,
            "versions": ", ".join(
                f"{name} {number}" for name, number in versions(PACKAGES).items()
            ),
            "platform": ", ".join((platform.platform(), f"{os.cpu_count()} cores", *devices())),
        }
        lines = [f"{name:<10} {words or 'not known'}" for name, words in heads.items()]
        return (
            "bp-convert: report of a fault that it did not foresee\n"
            "(no weights, no data and no environment variables are in it; read it before you pass "
            "it on)\n\n" + "\n".join(lines) + "\n\n" + _trace(self.problem)
        )


def looked_into(problem: BaseException, *, stage: str = "", step: str = "") -> Fault:
    """Find out where a fault came about.

    Args:
        stage: what was being done, as far as the caller knows; the traceback knows better.
        step: what progress told last.
    """
    try:
        frames = [one for one, _ in traceback.walk_tb(problem.__traceback__)]
        return Fault(problem, stage_of(frames) or stage, layer_of(frames), model_of(frames), step)
    except Exception:  # a second fault must not hide the first
        return Fault(problem, stage, "", "", step)


def of_the_machine(problem: BaseException) -> BpConvertError | None:
    """Return the error for what the machine has too little of; None for another fault."""
    text = str(problem)
    memory = isinstance(problem, MemoryError) or type(problem).__name__ == "OutOfMemoryError"
    if memory or "can't allocate memory" in text or "not enough memory" in text:
        return BpConvertError(
            where="this machine's memory",
            found=text.strip().splitlines()[0][:LENGTH] if text.strip() else "it is used up",
            allowed="a model, and what is made of it, that fit into memory",
            fix="take fewer --examples or a smaller batch, convert fewer layers at a time with "
            "--include, or use a machine with more memory",
        )
    if isinstance(problem, OSError) and problem.errno in (errno.ENOSPC, errno.EDQUOT):
        return BpConvertError(
            where=str(problem.filename or "the disk"),
            found=f"no room to write: {problem.strerror}",
            allowed="a disk with room for the result",
            fix="free some room, or write elsewhere with -o (and TMPDIR)",
        )
    return None


def written(text: str) -> Path | None:
    """Write a report into the current folder, else the temporary one; return where."""
    name = time.strftime("bp-convert-fault-%Y%m%d-%H%M%S")
    for folder in (Path(), Path(tempfile.gettempdir())):
        for again in ("", "-2", "-3", "-4"):
            path = folder / f"{name}{again}.txt"
            try:
                with path.open("x", encoding="utf-8", errors="replace") as opened:
                    opened.write(text)
            except FileExistsError:
                continue
            except OSError:
                break
            return path
    return None


def _trace(problem: BaseException) -> str:
    """Return the traceback, without what tensors or long values a message may quote."""
    lines: list[str] = []
    for part in traceback.TracebackException.from_exception(problem).format():
        found = part.rstrip().splitlines()
        if not part.startswith("  File"):  # a message, not a frame
            found = _without_numbers(part.rstrip()).splitlines()[:LINES]
        lines += [one[:LENGTH] for one in found]
    return "\n".join(lines) + "\n"


def _without_numbers(message: str) -> str:
    """Cut off the tensors that a message quotes."""
    return re.sub(r"(?s)(tensor|array)\(.*", r"\1(...)", message)


class Trail:
    """Remembers what progress told last.

    Attributes:
        step: the last words, with the count.
    """

    def __init__(self) -> None:
        self.step = ""

    def told(self, progress: Progress) -> Progress:
        """Return a callback that remembers and passes on."""

        def tell(words: str, done: int, total: int) -> None:
            self.step = f"{words} ({done} of {total})"
            progress(words, done, total)

        return tell

    def looked_into(self, problem: BaseException) -> Fault:
        """Find out where a fault came about."""
        return looked_into(problem, step=self.step)
