"""The summary of a recipe as a page."""

from __future__ import annotations

from html import escape

from bp_convert.render import batch_cells as cells_of
from bp_convert.render.batch_chart import by_alpha, by_size
from bp_convert.render.documents import STYLE, table_row
from bp_convert.render.numbers import short
from bp_convert.render.seeds import over_seeds
from bp_convert.values.outcome import Outcome, Summary

MORE_STYLE = """
.jobs td{white-space:nowrap}.jobs td:first-child{white-space:normal;overflow-wrap:anywhere;
min-width:10rem}
td.why{white-space:normal!important;min-width:18rem}
tr.failed td{background:#fff1f0}tr.waiting td{color:#57606a}
.dot{display:inline-block;width:.7rem;height:.7rem;border-radius:50%;margin:0 .3rem 0 .9rem}
a{color:#0b4fa8}
"""


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
        f'<p class="verdict">{escape(cells_of.verdict(summary))}</p>{about}{pictures}'
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
        cells = [one.name, cells_of.params(one), cells_of.kept(one)]
        cells.append(short(one.macs.after) if one.macs else "")
        cells += (
            [cells_of.full(one), cells_of.converted(one), cells_of.score(one)] if metric else []
        )
        cells.append(f"{one.trained.steps:,}" if one.trained else "")
        cells.append(cells_of.clock(one.seconds) if one.seconds else "")
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
    body = "".join(table_row(cells_of.seeds_row(one), "td", numbers) for one in groups)
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
                    cells_of.score(one) or ("not run" if one.state == "waiting" else ""),
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
