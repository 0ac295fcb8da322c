"""What a fresh process does with a file: load it as a user would, and hash its state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bp_convert.errors import BpConvertError
from bp_convert.files import is_converted, load_model, read_converted
from bp_convert.files.reread import bits_of, digests
from bp_convert.storage import restored


def load_and_hash(task: dict[str, Any]) -> dict[str, str]:
    """Load a file as a user would, and hash its state.

    Raises:
        BpConvertError: it cannot be loaded.
    """
    weights, *beside = (Path(one) for one in task["places"])
    trust = task["trust"]
    if not is_converted(weights):
        return bits_of(load_model(weights, trust=trust).model)
    read = read_converted(weights, trust=trust, beside=beside[0] if beside else None)
    source: Any = None
    if read.skeleton is None and read.arch is None:
        if task["source"] is None:
            return digests(read.state)  # whoever loads it brings the model
        source = load_model(task["source"], trust=trust).model
    return bits_of(restored(read, str(weights), model=source, trust=trust))


def answer(task: dict[str, Any]) -> dict[str, Any]:
    """Return the hashes of a file's state, or the four parts of the error.

    Raises:
        MemoryError: there is too little; that says nothing about the file.
    """
    try:
        return {"bits": load_and_hash(task)}
    except BpConvertError as problem:
        return {"error": [problem.where, problem.found, problem.allowed, problem.fix]}
    except MemoryError:
        raise
    except Exception as problem:
        text = f"{type(problem).__name__}: {problem}"
        return {"error": ["loading", text, "a file that loads", "please report this model"]}
