"""Jobs on this machine, in worker processes of their own."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from types import ModuleType

from bp_convert.batch.attempt import failure
from bp_convert.batch.folders import LOG, Results
from bp_convert.batch.identity import Task
from bp_convert.batch.worker import work
from bp_convert.files.atomic import write_text
from bp_convert.values.outcome import Outcome
from bp_convert.values.progress import Onlooker

BREATH = 0.2  # seconds
PATIENCE = 5.0  # seconds that a worker has to end


@dataclass
class _Hand:
    """A worker process and its end of the pipe."""

    process: SpawnProcess
    tasks: Connection
    task: Task | None = None


class Local:
    """Runs jobs in worker processes; a job that takes its worker down fails alone.

    Args:
        results: the folder of results.
        jobs: workers.
    """

    def __init__(self, results: Results, jobs: int) -> None:
        self.results = results
        self.jobs = jobs
        self.context = multiprocessing.get_context("spawn")
        self.hands: list[_Hand] = []

    def run(self, tasks: Sequence[Task], watch: Onlooker, *, keep_going: bool) -> None:
        """Run all tasks; unless ``keep_going``, none starts after one has failed."""
        waiting = list(tasks)
        try:
            while waiting or any(hand.task for hand in self.hands):
                self._hand_out(waiting, watch)
                for outcome in self._hear(watch):
                    watch.ended(outcome)
                    if outcome.state == "failed" and not keep_going:
                        waiting.clear()
        finally:
            self._stop()

    def _hand_out(self, waiting: list[Task], watch: Onlooker) -> None:
        idle = [hand for hand in self.hands if hand.task is None]
        while waiting and (idle or len(self.hands) < self.jobs):
            hand = idle.pop() if idle else self._hire(len(waiting))
            task = self._next(waiting)
            hand.task = task
            watch.started(task.job.name)
            with contextlib.suppress(OSError):  # it is dead: _hear finds out
                hand.tasks.send(task)

    def _next(self, waiting: list[Task]) -> Task:
        """Take a task; rather one that does not wait for a full model that another one trains."""
        training = {
            hand.task.full
            for hand in self.hands
            if hand.task is not None
            and hand.task.job.train is not None
            and not (self.results.folder / "full" / hand.task.full).exists()
        }
        free = (place for place, task in enumerate(waiting) if task.full not in training)
        return waiting.pop(next(free, 0))

    def _hire(self, left: int) -> _Hand:
        number = len(self.hands) + 1
        log = self.results.work / f"worker-{number}.log"
        threads = max(1, _cores() // min(self.jobs, max(1, left)))
        mine, theirs = self.context.Pipe()
        process = self.context.Process(
            target=work,
            args=(theirs, str(self.results.folder), str(log), threads),
            name=f"bp-convert-{number}",
            daemon=False,  # training may have loader processes of its own
        )
        with _script_left_alone():
            process.start()
        theirs.close()
        hand = _Hand(process, mine)
        self.hands.append(hand)
        return hand

    def _hear(self, watch: Onlooker) -> list[Outcome]:
        busy = {hand.tasks: hand for hand in self.hands if hand.task is not None}
        ended: list[Outcome] = []
        for ready in wait([*busy], timeout=BREATH):
            assert isinstance(ready, Connection)
            hand = busy[ready]
            try:
                kind, *rest = ready.recv()
            except (EOFError, OSError):
                ended.append(self._lost(hand))
                continue
            assert hand.task is not None
            if kind == "progress":
                watch.progressed(hand.task.job.name, *rest)
            else:
                hand.task = None
                ended.append(rest[0])
        return ended

    def _lost(self, hand: _Hand) -> Outcome:
        """Put down as failed the job whose worker died; keep what it logged."""
        assert hand.task is not None
        task = hand.task
        hand.process.join(PATIENCE)
        code = hand.process.exitcode or 0
        how = f"exit code {code}"
        if code < 0:
            with contextlib.suppress(ValueError):
                how = signal.Signals(-code).name
        hint = " (is there enough memory for it?)" if code == -signal.SIGKILL else ""
        outcome = failure(task.job, task.identity, f"its process died: {how}{hint}")
        log = ""
        for left in self.results.work.glob(f"{task.job.name}.{hand.process.pid}.*/{LOG}"):
            log = left.read_text(encoding="utf-8", errors="replace")
        with self.results.drafted(task.job.name) as draft:
            write_text(draft / LOG, f"{log}{outcome.problem}\n")
            self.results.land(draft, outcome)
        self.hands.remove(hand)
        hand.tasks.close()
        return outcome

    def _stop(self) -> None:
        """End all workers: idle ones by asking."""
        for hand in self.hands:
            with contextlib.suppress(OSError):
                if hand.task is None:
                    hand.tasks.send(None)
                else:
                    hand.process.kill()
        for hand in self.hands:
            hand.process.join(PATIENCE)
            if hand.process.is_alive():
                hand.process.kill()
                hand.process.join()
            hand.tasks.close()
        self.hands.clear()


@contextlib.contextmanager
def _script_left_alone() -> Iterator[None]:
    """Keep a new process from running the script that started this one, guarded or not."""
    script = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = script


def _cores() -> int:
    """Return how many cores this process may run on: a container or a scheduler lends some."""
    lent = getattr(os, "sched_getaffinity", None)  # absent on some systems
    return len(lent(0)) if lent else os.cpu_count() or 1
