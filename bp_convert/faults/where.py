"""Where a fault came about, read from the frames of its traceback, outermost first."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).parents[1]
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
    "fitting": "fitting",
    "calibration": "fitting",
    "verify": "verifying",
    "costs": "timing",
    "evaluation": "scoring",
    "training": "training",
    "render": "writing the report",
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
