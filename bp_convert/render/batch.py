"""The summary of a recipe as a table of values and in a terminal."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from bp_convert.render import batch_cells as cells_of
from bp_convert.render import documents
from bp_convert.render.fold import middle
from bp_convert.render.numbers import clock
from bp_convert.values.outcome import Outcome, Summary

WIDTH, LEAST = 80, 12  # of the table, and of a job's name
MOST = 40  # jobs that a terminal shows
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


# A terminal of 80 columns


def shown(summary: Summary) -> RenderableType:
    """Return the table of all jobs."""
    scored = next((one.score.metric for one in summary.jobs if one.score), "")
    printed = any(one.paper and one.paper.score is not None for one in summary.jobs)
    heads = ["state", "params", "kept"]
    heads += ["full", scored] if scored else []
    heads += ["paper"] if printed else []
    heads += ["time"]
    rows = summary.jobs[:MOST]
    cells = []
    for one in rows:
        line = [one.state, cells_of.params(one), cells_of.kept(one)]
        line += [cells_of.full(one), cells_of.score(one)] if scored else []
        line += [cells_of.printed(one)] if printed else []
        cells.append([*line, clock(one.seconds) if one.seconds else ""])
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False, pad_edge=False)
    table.add_column("job", no_wrap=True)
    for head in heads:
        table.add_column(head, justify="left" if head == "state" else "right", no_wrap=True)
    # Numbers are whole; names give way.
    width = WIDTH - sum(2 + max(map(len, column)) for column in zip(heads, *cells, strict=True))
    for one, (state, *numbers) in zip(rows, cells, strict=True):
        name = Text(middle(one.name, max(LEAST, width)))
        table.add_row(name, Text(state, style=_STATE[state]), *numbers)
    parts: list[RenderableType] = [Text(summary.name, style="bold"), table]
    if len(rows) < len(summary.jobs):
        parts.append(Text(f"and {len(summary.jobs) - len(rows)} more", style="dim"))
    if printed:
        parts.append(Text("paper: as printed there, in percent", style="dim"))
    if groups := cells_of.over_seeds(summary.jobs):
        parts += [Text(), _shown_seeds(groups, scored)]
    return Group(*parts, Text(), Text(cells_of.verdict(summary), style="bold"))


def _shown_seeds(groups: Sequence[cells_of.Seeds], metric: str) -> Table:
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False, pad_edge=False)
    table.add_column("over seeds", no_wrap=True)
    for head in ("seeds", "params", "kept", metric, "spread"):
        table.add_column(head, justify="right", no_wrap=True)
    for one in groups:
        name, *cells = cells_of.seeds_row(one)
        table.add_row(Text(middle(name, 34)), *cells)
    return table
