"""A worker process: takes jobs from its parent until there are none, and dies with it."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path

OFTEN = 0.2  # seconds between two reports of progress


def work(tasks: Connection, folder: str, log: str, threads: int) -> None:
    """Run jobs as they come.

    Args:
        tasks: brings Tasks, None to stop; takes what becomes of them.
        folder: of results.
        log: a file for whatever libraries print past Python.
        threads: for torch.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent hears it, and decides
    threading.Thread(target=_die_with_parent, daemon=True).start()
    with open(log, "ab", buffering=0) as opened:  # noqa: PTH123 - a file descriptor is meant
        os.dup2(opened.fileno(), 1)
        os.dup2(opened.fileno(), 2)
    import torch

    from bp_convert.batch.attempt import run_job
    from bp_convert.batch.folders import Results

    torch.set_num_threads(threads)
    results = Results(Path(folder))
    while (task := tasks.recv()) is not None:
        teller = _Teller(tasks)
        outcome, fresh = run_job(task, results, teller.tell)
        tasks.send(("ended", outcome, fresh))


class _Teller:
    """Sends progress, but not more often than a person can read."""

    def __init__(self, pipe: Connection) -> None:
        self.pipe = pipe
        self.last = 0.0
        self.words = ""

    def tell(self, words: str, done: int, total: int) -> None:
        now = time.monotonic()
        if words != self.words or now - self.last > OFTEN:
            self.words, self.last = words, now
            self.pipe.send(("progress", words, done, total))


def _die_with_parent() -> None:
    """End this process when its parent has ended, however that came about."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
