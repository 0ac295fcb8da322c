"""A live table of jobs in a terminal of 80 columns."""

from __future__ import annotations

import time
from dataclasses import dataclass

from rich.box import SIMPLE_HEAD
from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.table import Table
from rich.text import Text

from bp_convert.render.fold import middle
from bp_convert.render.numbers import clock, short
from bp_convert.render.words import value_of
from bp_convert.values.outcome import Outcome
from bp_convert.values.progress import Onlooker

NAME, STATE, DOING, TIME = 28, 8, 30, 8
RECENT = 8  # jobs that ended, at least


@dataclass
class _Running:
    since: float
    words: str = "starting"
    done: int = 0
    total: int = 0


class Board(Onlooker):
    """What runs, what ended lately, and how many wait.

    Args:
        names: of all jobs, in order.
    """

    def __init__(self, names: list[str]) -> None:
        self.names = names
        self.start = time.monotonic()
        self.running: dict[str, _Running] = {}
        self.ended_jobs: dict[str, Outcome] = {}

    def started(self, name: str) -> None:
        """Show that a job runs."""
        self.running[name] = _Running(time.monotonic())

    def progressed(self, name: str, words: str, done: int, total: int) -> None:
        """Show how far it is."""
        if name in self.running:
            one = self.running[name]
            one.words, one.done, one.total = words, done, total

    def ended(self, outcome: Outcome) -> None:
        """Show what became of it."""
        self.running.pop(outcome.name, None)
        self.ended_jobs.pop(outcome.name, None)
        self.ended_jobs[outcome.name] = outcome

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Draw the table, no higher than the terminal."""
        room = max(RECENT, options.height or console.height) - 6 - len(self.running)
        table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False, pad_edge=False)
        table.add_column("job", width=NAME, no_wrap=True)
        table.add_column("state", width=STATE, no_wrap=True)
        table.add_column("", width=DOING, no_wrap=True)
        table.add_column("time", width=TIME, justify="right", no_wrap=True)
        ended = list(self.ended_jobs.values())
        failed = [one for one in ended if one.state == "failed"][-max(1, room // 2) :]
        good = [one for one in ended if one.state != "failed"][-max(1, room - len(failed)) :]
        for one in [*good, *failed]:
            table.add_row(
                middle(one.name, NAME),
                Text(one.state, style="green" if one.state == "done" else "red"),
                Text(_words(one)[:DOING]),
                clock(one.seconds),
            )
        now = time.monotonic()
        for name, job in self.running.items():
            table.add_row(
                middle(name, NAME),
                Text("running", style="cyan"),
                Text(_doing(job)),
                clock(now - job.since),
            )
        hidden = len(ended) - len(good) - len(failed)
        parts = [Text(f"{hidden} more ended before", style="dim")] if hidden else []
        yield Group(*parts, table, self._last(now))

    def _last(self, now: float) -> Text:
        ended = list(self.ended_jobs.values())
        failed = sum(one.state == "failed" for one in ended)
        waiting = len(self.names) - len(ended) - len(self.running)
        words = f"{len(ended) - failed} done, {len(self.running)} running, {waiting} waiting"
        if failed:
            words += f", {failed} failed"
        return Text(f"{words}; {clock(now - self.start)}", style="bold")


def _words(one: Outcome) -> str:
    if one.state == "failed":
        return one.problem
    found = [f"{short(one.params.after)} ({100 * one.params.ratio:.1f} %)"] if one.params else []
    if one.score is not None:
        found.append(f"{one.score.metric} {value_of(one.score, one.score.after)}")
    return ", ".join(found)


def _doing(job: _Running) -> str:
    share = f" {job.done}/{job.total}" if job.total > 1 else ""
    return middle(job.words, DOING - len(share)) + share
