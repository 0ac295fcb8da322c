"""The helper's side: one line of JSON in, one line out, each answered by a process of its own.

A fork of this process, which has imported torch and nothing of a user's, is as good as a new one
and ready at once. Where forking is not safe, the process answers one question and ends.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any, TextIO

from bp_convert.errors import BpConvertError
from bp_convert.files.converted import is_converted, read_converted
from bp_convert.files.folder import bits_in_folder, loaded_folder
from bp_convert.files.read_model import load_model
from bp_convert.files.reread import bits_of, digests
from bp_convert.storage import restored

FORKS = sys.platform == "linux"


def main() -> None:
    """Answer until nobody asks; what a model's own code prints goes nowhere."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in iter(sys.stdin.readline, ""):
        task = json.loads(line)
        if not FORKS:
            _reply(task, answers)
            return
        child = os.fork()
        if not child:
            code = 1
            try:
                _reply(task, answers)
                code = 0
            finally:
                os._exit(code)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if code:
            print(json.dumps({"died": code}), file=answers, flush=True)


def _reply(task: dict[str, Any], answers: TextIO) -> None:
    """Load in an empty folder, with what the asking process can import."""
    os.environ.clear()
    os.environ.update(task["environment"])
    sys.path[:] = task["path"]
    with tempfile.TemporaryDirectory(prefix="bp-convert-") as folder:
        os.chdir(folder)
        try:
            text = json.dumps(_answer(task))
        finally:
            os.chdir(Path(folder).parent)
    print(text, file=answers, flush=True)


def _load_and_hash(task: dict[str, Any]) -> dict[str, str]:
    """Load a file as a user would, and hash its state.

    Raises:
        BpConvertError: it cannot be loaded.
    """
    weights, *beside = (Path(one) for one in task["places"])
    trust = task["trust"]
    if weights.is_dir():
        return bits_in_folder(loaded_folder(weights))
    if not is_converted(weights):
        return bits_of(load_model(weights, trust=trust).model)
    read = read_converted(weights, trust=trust, beside=beside[0] if beside else None)
    source: Any = None
    if read.skeleton is None and read.arch is None:
        if task["source"] is None:
            return digests(read.state)  # whoever loads it brings the model
        source = load_model(task["source"], trust=trust).model
    return bits_of(restored(read, str(weights), model=source, trust=trust))


def _answer(task: dict[str, Any]) -> dict[str, Any]:
    """Return the hashes of a file's state, or the four parts of the error.

    Raises:
        MemoryError: there is too little; that says nothing about the file.
    """
    try:
        return {"bits": _load_and_hash(task)}
    except BpConvertError as problem:
        return {"error": [problem.where, problem.found, problem.allowed, problem.fix]}
    except MemoryError:
        raise
    except Exception as problem:
        text = f"{type(problem).__name__}: {problem}"
        return {"error": ["loading", text, "a file that loads", "please report this model"]}


if __name__ == "__main__":
    main()
