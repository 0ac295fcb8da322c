"""What to say of a fault that nobody foresaw: the stage and the layer in work, read from the frames
of its traceback, and a report that a user can attach. It holds no weights, no data, no environment
variables.
"""

from __future__ import annotations

import errno
import os
import platform
import re
import shlex
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from bp_convert.errors import BpConvertError
from bp_convert.provenance import devices, versions
from bp_convert.values.progress import Progress

ROOT = Path(__file__).parent
# The stage that a room of the package, a file of it, or a function in one stands for.
STAGES = {
    "run/written": "writing the report",
    "proof": "writing",
    "cli/reading": "reading the settings",
    "storage.load": "reading the model",
    "storage.plan_of": "reading the plan",
    "storage.read_plan": "reading the plan",
    "storage": "writing",
    "files/atomic": "writing",
    "files": "reading the model",
    "data": "reading the examples",
    "planner": "planning",
    "search": "planning",
    "counting": "planning",
    "pruning": "pruning",
    "surgery": "converting",
    "mixing": "converting",
    "fitting": "fitting",
    "calibration": "fitting",
    "verify": "verifying",
    "costs": "timing",
    "evaluation": "scoring",
    "training": "training",
    "render": "writing the report",
    "pages": "writing the report",
    "reporting": "writing the report",
}
# Where the traceback reaches none of these.
STEPS = {
    "pipeline._apply": "converting",
    "run/opening": "reading the model",
    "run/learning.split_of": "reading the examples",
    "run/making.planned": "planning",
    "run/making": "converting",
    "run/learning": "training",
}


def stage_of(frames: Sequence[FrameType]) -> str:
    """Return the stage of the outermost frame that stands for one."""
    places: list[tuple[str, ...]] = []
    for frame in frames:
        try:
            path = Path(frame.f_code.co_filename).relative_to(ROOT).with_suffix("")
        except ValueError:
            continue
        whole = path.as_posix()
        places.append((f"{whole}.{frame.f_code.co_name}", whole, path.parts[0]))
    found = (
        known[key] for known in (STAGES, STEPS) for keys in places for key in keys if key in known
    )
    return next(found, "")


def _given(frame: FrameType) -> Iterator[Any]:
    """Yield the arguments of a frame: what a loop has left behind there says nothing."""
    code = frame.f_code
    count = code.co_argcount + code.co_kwonlyargcount
    for name in code.co_varnames[:count]:
        if name in frame.f_locals:
            yield frame.f_locals[name]


def layer_of(frames: Sequence[FrameType]) -> str:
    """Return the innermost layer that a function was given, or module that was called."""
    for frame in reversed(frames):
        for value in _given(frame):
            found = value.site if _is_ours(value, "FreeLayer") else value
            if _is_ours(found, "Site", "LayerPlan", "Unit"):
                kind = getattr(found, "kind", "")
                kind = kind if isinstance(kind, str) else getattr(kind, "name", "")
                return f"{found.name or 'the model itself'}{f' ({kind})' if kind else ''}"
    return _module(frames)


def _is_ours(value: object, *names: str) -> bool:
    kind = type(value)
    return kind.__module__.startswith("bp_convert.") and kind.__name__ in names


def _modules(frames: Sequence[FrameType]) -> Iterator[Any]:
    torch: Any = sys.modules.get("torch")
    if torch is not None:
        for frame in frames:
            yield from (one for one in _given(frame) if isinstance(one, torch.nn.Module))


def _module(frames: Sequence[FrameType]) -> str:
    """Return the innermost part of a model that a function was given."""
    given = list(_modules(frames))
    if not given:
        return ""
    inner = given[-1]
    for outer in given:
        for name, module in outer.named_modules():
            if module is inner and name:
                return f"{name} ({type(inner).__name__})"
    return ""


def model_of(frames: Sequence[FrameType]) -> str:
    for frame in frames:
        for value in _given(frame):
            if _is_ours(value, "Plan"):
                return str(value.model)
    kind = next((type(one) for one in _modules(frames)), None)
    return "" if kind is None else f"{kind.__module__}.{kind.__qualname__}"


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
