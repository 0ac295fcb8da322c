"""Work in forked processes with a limit of time and of memory each.

The parent imports the libraries once and never computes, so that a child starts in milliseconds
and knows of no model.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Record = dict[str, Any]
Task = Callable[[], Record]
PAUSE = 0.05  # seconds between two looks at the children


@dataclass
class Child:
    """A process at work.

    Attributes:
        key: what the caller knows the task by.
        answer: the file in which it leaves its record.
        start: seconds on the wall clock when it began.
    """

    key: Any
    pid: int
    answer: Path
    start: float


@dataclass(frozen=True)
class Limits:
    """What a process may use: seconds on the wall clock, bytes of address space."""

    seconds: float
    memory: int


def start(key: Any, task: Task, folder: Path, limits: Limits) -> Child:
    """Begin a task in a process of its own; what it prints goes to ``folder/log``."""
    answer = folder / "answer"
    answer.unlink(missing_ok=True)
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return Child(key, pid, answer, time.monotonic())
    code = 1
    try:
        os.setpgid(0, 0)
        log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        resource.setrlimit(resource.RLIMIT_AS, (limits.memory, limits.memory))
        record = task()
        answer.with_suffix(".part").write_text(json.dumps(record))
        answer.with_suffix(".part").rename(answer)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def finished(children: list[Child], limits: Limits) -> Iterator[tuple[Child, Record | None, str]]:
    """Take ended children out of the list; yield each with its record, or why there is none."""
    for child in list(children):
        pid, status, used = os.wait4(child.pid, os.WNOHANG)
        words = ""
        if not pid and time.monotonic() - child.start > limits.seconds:
            os.killpg(child.pid, signal.SIGKILL)
            _, status, used = os.wait4(child.pid, 0)
            words = f"no end after {limits.seconds:g} s"
        elif not pid:
            continue
        children.remove(child)
        record = json.loads(child.answer.read_text()) if child.answer.exists() else None
        if record is None:
            words = words or _how(status, child.answer.with_name("log"))
        else:
            record["wall"] = round(time.monotonic() - child.start, 2)
            record["peak_mb"] = used.ru_maxrss // 1024
        yield child, record, words


def _how(status: int, log: Path) -> str:
    """Say how a process ended that left no record."""
    tail = log.read_text(errors="replace").strip().splitlines()[-1:] if log.exists() else []
    if os.WIFSIGNALED(status):
        return f"killed by signal {os.WTERMSIG(status)} {' '.join(tail)}"
    return f"exit {os.waitstatus_to_exitcode(status)}: {' '.join(tail)}"
