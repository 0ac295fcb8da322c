"""A recipe in a terminal of 80 columns: its summary, its dry run, and its jobs at work."""

from __future__ import annotations

import csv
import io
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from bp_convert.pages import documents
from bp_convert.render.batch_cells import Seeds, cells, over_seeds, seeds_row, verdict
from bp_convert.render.fold import middle
from bp_convert.render.numbers import clock, short
from bp_convert.render.words import value_of
from bp_convert.values.outcome import Estimate, Outcome, Summary
from bp_convert.values.progress import Onlooker

WIDTH, LEAST = 80, 12  # of the table, and of a job's name
MOST = 40  # jobs that a terminal shows
_table = partial(Table, box=SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False, pad_edge=False)
_STATE = {"done": "green", "failed": "red", "waiting": "dim", "running": "cyan"}


def document(summary: Summary, form: str) -> str:
    """Return a summary as ``json``, ``csv``, ``html`` or ``md``."""
    return _csv(summary) if form == "csv" else documents.document(summary, Path(f"_.{form}"))


# Values, one row a job


def row_of(one: Outcome) -> dict[str, Any]:
    """Return one job as plain values by column."""
    score, paper = one.score, one.paper
    return {
        "name": one.name,
        "state": one.state,
        "model": one.model,
        **{key: one.keys.get(key, "") for key in ("counterpart", "alpha", "rank", "target")},
        **{key: one.keys.get(key, "") for key in ("method", "init", "seed")},
        "params_full": one.params.before if one.params else "",
        "params": one.params.after if one.params else "",
        "macs_full": one.macs.before if one.macs else "",
        "macs": one.macs.after if one.macs else "",
        "estimated_error": "" if one.error is None else one.error,
        "metric": score.metric if score else "",
        "score_full": score.before if score else "",
        "score_converted": one.converted.after if one.converted else "",
        "score": score.after if score else "",
        "scored_on": score.examples if score else "",
        "train_steps": one.full.steps if one.full else "",
        "train_seconds": round(one.full.seconds, 1) if one.full else "",
        "finetune_steps": one.trained.steps if one.trained else "",
        "finetune_seconds": round(one.trained.seconds, 1) if one.trained else "",
        "paper_score": "" if paper is None or paper.score is None else paper.score,
        "paper_params": "" if paper is None or paper.params is None else paper.params,
        "seconds": round(one.seconds, 1),
        "folder": one.folder,
        "problem": one.problem,
    }


def _csv(summary: Summary) -> str:
    text = io.StringIO()
    rows = [row_of(one) for one in summary.jobs]
    writer = csv.DictWriter(text, list(row_of(Outcome(name=""))), lineterminator="\n")
    writer.writeheader()
    writer.writerows({key: _inert(value) for key, value in row.items()} for row in rows)
    return text.getvalue()


def _inert(value: Any) -> Any:
    """Keep spreadsheets from reading text as a formula."""
    return f"'{value}" if isinstance(value, str) and value[:1] in ("=", "+", "-", "@") else value


# The summary


def shown(summary: Summary) -> RenderableType:
    """Return the table of all jobs."""
    scored = next((one.score.metric for one in summary.jobs if one.score), "")
    printed = any(one.paper and one.paper.score is not None for one in summary.jobs)
    columns = {"state": "state", "params": "params", "kept": "kept"}
    columns |= {"full": "full", "score": scored} if scored else {}
    columns |= {"printed": "paper", "time": "time"} if printed else {"time": "time"}
    heads = list(columns.values())
    rows = summary.jobs[:MOST]
    lines = [[said[key] for key in columns] for said in map(cells, rows)]
    table = _table()
    table.add_column("job", no_wrap=True)
    for head in heads:
        table.add_column(head, justify="left" if head == "state" else "right", no_wrap=True)
    # Numbers are whole; names give way.
    width = WIDTH - sum(2 + max(map(len, column)) for column in zip(heads, *lines, strict=True))
    for one, (state, *numbers) in zip(rows, lines, strict=True):
        name = Text(middle(one.name, max(LEAST, width)))
        table.add_row(name, Text(state, style=_STATE[state]), *numbers)
    parts: list[RenderableType] = [Text(summary.name, style="bold"), table]
    if len(rows) < len(summary.jobs):
        parts.append(Text(f"and {len(summary.jobs) - len(rows)} more", style="dim"))
    if printed:
        parts.append(Text("paper: as printed there, in percent", style="dim"))
    if groups := over_seeds(summary.jobs):
        parts += [Text(), _shown_seeds(groups, scored)]
    return Group(*parts, Text(), Text(verdict(summary), style="bold"))


def _shown_seeds(groups: Sequence[Seeds], metric: str) -> Table:
    table = _table()
    table.add_column("over seeds", no_wrap=True)
    for head in ("seeds", "params", "kept", metric, "spread"):
        table.add_column(head, justify="right", no_wrap=True)
    for one in groups:
        name, *numbers = seeds_row(one)
        table.add_row(Text(middle(name, 34)), *numbers)
    return table


# A dry run

_NAME, _WHAT = 24, 14  # columns


def shown_estimates(name: str, found: Sequence[Estimate]) -> RenderableType:
    """Return the table of all planned jobs, with what stands in their way."""
    table = _table()
    table.add_column("job", no_wrap=True)
    table.add_column("how", no_wrap=True)
    trained = any(one.steps != (0, 0) for one in found)
    heads = ["params", "kept", "MACs"] + ["steps", "at least"] * trained
    for head in heads:
        table.add_column(head, justify="right", no_wrap=True)
    for one in found:
        if one.problem:
            table.add_row(middle(one.name, _NAME), Text("cannot run", style="red"))
            continue
        table.add_row(
            middle(one.name, _NAME),
            middle(one.what, _WHAT),
            short(one.params.after) if one.params else "",
            f"{100 * one.params.ratio:.1f}%" if one.params else "",
            short(one.macs.after) if one.macs else "?",
            *([_steps(one), _time(one)] if trained else []),
        )
    parts: list[RenderableType] = [Text(f"{name}: nothing was run", style="bold"), table, Text()]
    total = sum(one.seconds or 0.0 for one in found)
    unknown = sum(one.training_macs is None for one in found)
    words = "no training"
    if total:
        words = (
            f"training: at least {clock(total)} at the speed that this machine multiplies large "
            "matrices, several times that for small layers; a full model is counted for each job, "
            "and trained once"
        )
    if unknown:
        words += f"; not known for {unknown} jobs, whose data is not counted before it is read"
    parts.append(Text(words))
    notes = {note: one.name for one in reversed(found) for note in one.notes}
    parts += [Text(f"{name}: {note}", style="dim") for note, name in reversed(notes.items())]
    parts += [Text(f"{one.name}: {one.problem}", style="red") for one in found if one.problem]
    return Group(*parts)


def _steps(one: Estimate) -> str:
    first, then = one.steps
    if first is None or then is None:
        return "?"
    return short(first + then) if first + then else ""


def _time(one: Estimate) -> str:
    return "" if not one.training_macs or one.seconds is None else clock(one.seconds)


# Jobs at work

NAME, STATE, DOING, TIME = 28, 8, 30, 8  # columns of the live table
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
        table = _table()
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
