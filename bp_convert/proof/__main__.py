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

from bp_convert.proof.loading import answer

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
            text = json.dumps(answer(task))
        finally:
            os.chdir(Path(folder).parent)
    print(text, file=answers, flush=True)


if __name__ == "__main__":
    main()
