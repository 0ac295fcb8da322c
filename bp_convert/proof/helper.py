"""The process that loads files, started once and kept for the next question."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any


class Helper:
    """A process that answers questions by loading files, each in a fresh copy of itself.

    Raises:
        OSError: no process can be started.
    """

    def __init__(self) -> None:
        self.owner = os.getpid()
        self.waiting = False  # for an answer
        self.process = subprocess.Popen(
            # -P: nothing is imported from the folder in which it happens to stand.
            [sys.executable, "-P", "-m", "bp_convert.proof"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=tempfile.gettempdir(),
            env={**os.environ, "PYTHONPATH": os.pathsep.join(_path())},
            text=True,
            start_new_session=True,
        )

    def ready(self) -> bool:
        """Return whether this process may ask it."""
        return self.owner == os.getpid() and not self.waiting and self.process.poll() is None

    def ask(self, task: dict[str, Any]) -> None:
        """Put a question; it is answered while this process goes on."""
        task = {**task, "path": _path(), "environment": dict(os.environ)}
        assert self.process.stdin is not None
        self.waiting = True
        with contextlib.suppress(OSError):
            self.process.stdin.write(json.dumps(task) + "\n")
            self.process.stdin.flush()

    def answer(self, timeout: float) -> dict[str, Any]:
        """Wait for the answer.

        Raises:
            ProcessLookupError: there is none; the text says why. The process has been ended.
        """
        lines: list[str] = []
        output = self.process.stdout
        assert output is not None
        # A thread, for pipes have no timeout of their own everywhere.
        reader = threading.Thread(target=lambda: lines.append(output.readline()), daemon=True)
        reader.start()
        reader.join(timeout)
        self.waiting = False
        if reader.is_alive():
            self.end()
            reader.join()
            raise ProcessLookupError(f"it took longer than {timeout:g} seconds")
        if not lines or not lines[0]:
            self.end()
            raise ProcessLookupError(f"it ended with exit code {self.process.returncode}")
        answer: dict[str, Any] = json.loads(lines[0])
        if "died" in answer:
            raise ProcessLookupError(f"it ended with exit code {answer['died']}")
        return answer

    def end(self) -> None:
        """End it and whatever it has started."""
        if self.owner != os.getpid():
            return
        with contextlib.suppress(OSError):
            if self.process.poll() is None:
                if hasattr(os, "killpg"):
                    os.killpg(self.process.pid, signal.SIGKILL)
                else:
                    self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(OSError):
                if pipe is not None:
                    pipe.close()


_idle: list[Helper] = []
_lock = threading.Lock()


def take() -> Helper | None:
    """Return a helper for one question at a time; None where none can be started."""
    with _lock:
        while _idle:
            one = _idle.pop()
            if one.ready():
                return one
            one.end()
    try:
        return Helper()
    except OSError:
        return None


def give_back(one: Helper) -> None:
    """Keep a helper for the next question; one is kept."""
    with _lock:
        if one.ready() and not _idle:
            _idle.append(one)
            return
    one.end()


@atexit.register
def _end_all() -> None:
    while _idle:
        _idle.pop().end()


def _path() -> list[str]:
    """Return where this process imports from: what it finds, a helper in another folder finds."""
    return [str(Path(one).resolve()) for one in sys.path]
