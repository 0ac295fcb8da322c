"""The summary of a recipe as a page, as a table of values, as JSON, and in a terminal."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from html import escape
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from bp_convert.render.batch_chart import by_alpha, by_size
from bp_convert.render.documents import STYLE, table_row
from bp_convert.render.fold import middle
from bp_convert.render.numbers import short
from bp_convert.render.seeds import Group as Seeds
from bp_convert.render.seeds import over_seeds
from bp_convert.render.words import value_of
from bp_convert.values.outcome import Outcome, Summary

_STATE = {"done": "green", "failed": "red", "waiting": "dim", "running": "cyan"}
MORE_STYLE = """
.jobs td{white-space:nowrap}.jobs td:first-child{white-space:normal;overflow-wrap:anywhere;
min-width:10rem}
td.why{white-space:normal!important;min-width:18rem}
tr.failed td{background:#fff1f0}tr.waiting td{color:#57606a}
.dot{display:inline-block;width:.7rem;height:.7rem;border-radius:50%;margin:0 .3rem 0 .9rem}
a{color:#0b4fa8}
"""


def document(summary: Summary, form: str) -> str:
    """Return a summary as ``json``, ``csv`` or ``html``."""
    if form == "json":
        return json.dumps(summary.model_dump(mode="json"), indent=1) + "\n"
    return _csv(summary) if form == "csv" else page(summary)


def verdict(summary: Summary) -> str:
    """Say in a sentence how a run went."""
    total = len(summary.jobs)
    done, failed = summary.count("done"), summary.count("failed")
    words = f"{done} of {total} jobs done" if total != 1 else f"{done} of 1 job done"
    if failed:
        first = next(one for one in summary.jobs if one.state == "failed")
        words += f", {failed} failed (such as {first.name}: {_cut(first.problem, 160)})"
    left = total - done - failed
    return f"{words}{f', {left} not run' if left else ''}."


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"


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


def shown(summary: Summary, *, every: bool = False, limit: int = 40) -> RenderableType:
    """Return the table of all jobs."""
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False, pad_edge=False)
    table.add_column("job", no_wrap=True)
    table.add_column("state", no_wrap=True)
    scored = next((one.score.metric for one in summary.jobs if one.score), "")
    printed = any(one.paper and one.paper.score is not None for one in summary.jobs)
    heads = ["params", "kept"]
    heads += ["full", scored] if scored else []
    heads += ["paper"] if printed else []
    for head in (*heads, "time"):
        table.add_column(head, justify="right", no_wrap=True)
    rows = summary.jobs if every else summary.jobs[:limit]
    width = 78 - 8 - 7 - 7 - 9 * (2 * bool(scored) + printed) - 8
    for one in rows:
        cells = [_params(one), _kept(one)]
        cells += [_full(one), _score(one)] if scored else []
        cells += [_printed(one)] if printed else []
        table.add_row(
            Text(middle(one.name, width)),
            Text(one.state, style=_STATE[one.state]),
            *cells,
            clock(one.seconds) if one.seconds else "",
        )
    parts: list[RenderableType] = [Text(summary.name, style="bold"), table]
    if len(rows) < len(summary.jobs):
        parts.append(Text(f"and {len(summary.jobs) - len(rows)} more", style="dim"))
    if printed:
        parts.append(Text("paper: as printed there, in percent", style="dim"))
    if groups := over_seeds(summary.jobs):
        parts += [Text(), _shown_seeds(groups, scored)]
    return Group(*parts, Text(), Text(verdict(summary), style="bold"))


def _shown_seeds(groups: Sequence[Seeds], metric: str) -> Table:
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False, pad_edge=False)
    table.add_column("over seeds", no_wrap=True)
    for head in ("seeds", "params", "kept", metric, "spread"):
        table.add_column(head, justify="right", no_wrap=True)
    for one in groups:
        name, *cells = _seeds_row(one)
        table.add_row(Text(middle(name, 34)), *cells)
    return table


def _seeds_row(group: Seeds) -> tuple[str, ...]:
    first, spread = group.jobs[0], group.spread
    return (
        group.name,
        str(len(group.jobs)),
        _params(first),
        _kept(first),
        value_of(first.score, group.mean) if first.score else "",
        value_of(first.score, spread) if first.score and spread is not None else "",
    )


def clock(seconds: float) -> str:
    """Return 4.2 s, 3:05 or 2:01:30."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _params(one: Outcome) -> str:
    return short(one.params.after) if one.params else ""


def _kept(one: Outcome) -> str:
    return f"{100 * one.params.ratio:.1f} %" if one.params else ""


def _full(one: Outcome) -> str:
    return value_of(one.score, one.score.before) if one.score else ""


def _score(one: Outcome) -> str:
    return value_of(one.score, one.score.after) if one.score else ""


def _converted(one: Outcome) -> str:
    if one.converted is None or one.trained is None:
        return ""
    return value_of(one.converted, one.converted.after)


def _printed(one: Outcome) -> str:
    return "" if one.paper is None or one.paper.score is None else f"{one.paper.score:g}"


# A page


def page(summary: Summary) -> str:
    """Return a page with pictures and tables that needs nothing but itself."""
    title = escape(summary.name)
    about = f"<p>{escape(summary.about)}</p>" if summary.about else ""
    versions = ", ".join(f"{name} {version}" for name, version in summary.versions.items())
    foot = (summary.recipe, versions, summary.machine)
    pictures = "".join(
        f"<h2>{head}</h2>{drawn}"
        for head, drawn in (
            ("Size against quality", by_size(summary)),
            ("Alpha against quality", by_alpha(summary)),
        )
        if drawn
    )
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f"<style>{STYLE}{MORE_STYLE}</style></head><body><h1>{title}</h1>"
        f'<p class="verdict">{escape(verdict(summary))}</p>{about}{pictures}'
        f"{_paper_table(summary)}{_seeds_table(summary)}<h2>Jobs</h2>{_jobs_table(summary)}"
        f"<footer>{escape('; '.join(filter(None, foot)))}</footer>"
        "</body></html>\n"
    )


def _jobs_table(summary: Summary) -> str:
    metric = next((one.score.metric for one in summary.jobs if one.score), "")
    heads = ["job", "params", "kept", "MACs"]
    heads += [f"{metric}, full", "converted", "in the end"] if metric else []
    heads += ["steps", "time", "files, or why not"]
    numbers = set(range(1, len(heads) - 1))
    rows = []
    for one in summary.jobs:
        cells = [one.name, _params(one), _kept(one)]
        cells.append(short(one.macs.after) if one.macs else "")
        cells += [_full(one), _converted(one), _score(one)] if metric else []
        cells.append(f"{one.trained.steps:,}" if one.trained else "")
        cells.append(clock(one.seconds) if one.seconds else "")
        row = table_row(tuple(cells), "td", numbers, one.state)
        last = escape(one.problem) if one.problem else "" if one.folder else "not run"
        if one.folder:
            last += f' <a href="{escape(one.folder)}/">{escape(one.folder)}</a>'
        rows.append(row.removesuffix("</tr>") + f'<td class="why">{last}</td></tr>')
    return (
        '<div class="wide"><table class="jobs"><thead>'
        f"{table_row(tuple(heads), 'th', numbers)}</thead><tbody>{''.join(rows)}</tbody></table>"
        "</div>"
    )


def _seeds_table(summary: Summary) -> str:
    """Return mean and spread where jobs differ in nothing but their seed."""
    groups = over_seeds(summary.jobs)
    if not groups:
        return ""
    metric = next((one.score.metric for one in summary.jobs if one.score), "")
    heads = ("job", "seeds", "params", "kept", f"{metric}, mean", "standard deviation")
    numbers = {1, 2, 3, 4, 5}
    body = "".join(table_row(_seeds_row(one), "td", numbers) for one in groups)
    return (
        "<h2>Over seeds</h2>"
        f'<div class="wide"><table class="jobs"><thead>{table_row(heads, "th", numbers)}</thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def _paper_table(summary: Summary) -> str:
    """Return what was measured beside what is printed, where the recipe says what is."""
    rows = [one for one in summary.jobs if one.paper is not None]
    if not rows:
        return ""
    heads = ("job", "params", "printed", "score", "printed", "difference", "printed in")
    numbers = {1, 2, 3, 4, 5}
    body = []
    for one in rows:
        paper = one.paper
        assert paper is not None
        measured = _percent(one)
        comparable = measured is not None and paper.score is not None and _same(one)
        body.append(
            table_row(
                (
                    one.name,
                    f"{one.params.after:,}" if one.params else "not run",
                    f"{paper.params:,}" if paper.params else "",
                    _score(one) or ("not run" if one.state == "waiting" else ""),
                    "" if paper.score is None else f"{paper.score:g} {paper.metric}",
                    f"{measured - paper.score:+.1f}"
                    if comparable and measured is not None and paper.score is not None
                    else "",
                    paper.source,
                ),
                "td",
                numbers,
                one.state,
            )
        )
    return (
        "<h2>Against the paper</h2>"
        f'<div class="wide"><table class="jobs"><thead>{table_row(heads, "th", numbers)}</thead>'
        f"<tbody>{''.join(body)}</tbody></table></div>"
    )


def _percent(one: Outcome) -> float | None:
    """Return a score on the scale on which publications print it."""
    if one.score is None:
        return None
    share = one.score.metric == "accuracy" or one.score.metric.startswith("top")
    return 100 * one.score.after if share else one.score.after


def _same(one: Outcome) -> bool:
    return one.paper is not None and one.score is not None and one.paper.metric == one.score.metric
