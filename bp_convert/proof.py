"""A written file proven: a fresh process, in another folder, loads it and gives every bit back.

The process is started before the work, so that it has imported torch when the file is there:
``python -m bp_convert.proof`` reads one line of JSON, loads the file, and answers with a hash of
each entry of its state.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bp_convert.errors import BpConvertError, VerificationError

if TYPE_CHECKING:
    from torch import nn

    from bp_convert.files.atomic import Prove

TIMEOUT = 1800  # seconds for loading one file


class Proof:
    """A process that is ready to load a file; ended with the ``with`` block."""

    def __init__(self, timeout: float = TIMEOUT) -> None:
        self.timeout = timeout
        self.notes: list[str] = []
        self._folder = tempfile.TemporaryDirectory(prefix="bp-convert-")
        # What can be imported here can be imported there, though the folder is another.
        path = os.pathsep.join(str(Path(one).resolve()) for one in sys.path)
        self._process: subprocess.Popen[str] | None = None
        with contextlib.suppress(OSError):
            self._process = subprocess.Popen(
                [sys.executable, "-m", "bp_convert.proof"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                cwd=self._folder.name,
                env={**os.environ, "PYTHONPATH": path},
                text=True,
            )

    def __enter__(self) -> Proof:
        return self

    def __exit__(self, *details: object) -> None:
        if self._process is not None:
            self._process.kill()
            for pipe in (self._process.stdin, self._process.stdout):
                with contextlib.suppress(OSError):
                    if pipe is not None:
                        pipe.close()
            self._process.wait()
        self._folder.cleanup()

    def of(
        self,
        model: nn.Module,
        path: Path,
        *,
        trust: Sequence[str] = (),
        source: Path | None = None,
    ) -> Prove:
        """Return what proves a file of ``model`` before it takes its name ``path``.

        Args:
            trust: what loading has to trust.
            source: the file that holds the source model, for a result that holds neither that
                nor how it is made.
        """

        def prove(places: Sequence[Path]) -> None:
            from bp_convert.files import read_back
            from bp_convert.files.reread import bits_of, compare

            task = {
                "places": [str(one.resolve()) for one in places],
                "trust": [
                    str(Path(one).resolve()) if one.endswith(".py") else one for one in trust
                ],
                "source": None if source is None else str(source.resolve()),
            }
            self._ask(task)
            expected = bits_of(model)  # while the other process loads
            answer = self._answer()
            if answer is None:  # a process that died says nothing about the file
                read_back(model, path, trust=trust)(places)
                return
            if "error" in answer:
                raise _unreadable(path, answer["error"])
            compare(path, expected, answer["bits"])

        return prove

    def _ask(self, task: dict[str, Any]) -> None:
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.write(json.dumps(task) + "\n")
                self._process.stdin.flush()

    def _answer(self) -> dict[str, Any] | None:
        reason = "it cannot be started"
        if self._process is not None:
            try:
                said, _ = self._process.communicate(timeout=self.timeout)
                answer: dict[str, Any] = json.loads(said.splitlines()[-1])
            except subprocess.TimeoutExpired:
                reason = f"it took longer than {self.timeout:g} seconds"
            except (ValueError, IndexError, OSError):
                reason = f"it ended with exit code {self._process.returncode}"
            else:
                return answer
        self.notes.append(
            f"the file was read back in this process alone; not in a fresh one, for {reason}"
        )
        return None


def _unreadable(path: Path, error: Sequence[str]) -> VerificationError:
    where, found, allowed, fix = error
    return VerificationError(
        where=str(path),
        found=f"a fresh process cannot load the file as it was written: {where}: {found}; it was "
        "removed",
        allowed=allowed,
        fix=fix,
    )


def load_and_hash(task: dict[str, Any]) -> dict[str, str]:
    """Load a file as a user would, and hash its state.

    Raises:
        BpConvertError: it cannot be loaded.
    """
    from bp_convert.files import is_converted, load_model, read_converted
    from bp_convert.files.bits import digests
    from bp_convert.files.reread import bits_of
    from bp_convert.storage import restored

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


def main() -> None:
    """Answer one question; what the model's own code prints goes nowhere."""
    import bp_convert.files.load
    import bp_convert.storage  # noqa: F401 - imported before the file is there

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    line = sys.stdin.readline()
    if not line:
        return
    try:
        answer: dict[str, Any] = {"bits": load_and_hash(json.loads(line))}
    except BpConvertError as problem:
        answer = {"error": [problem.where, problem.found, problem.allowed, problem.fix]}
    except MemoryError:
        return
    except Exception as problem:
        text = f"{type(problem).__name__}: {problem}"
        answer = {"error": ["loading", text, "a file that loads", "please report this model"]}
    print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
