"""The summary of a recipe as a page."""

from __future__ import annotations

from collections.abc import Callable

from bp_convert.pages.axis import linear, logarithmic
from bp_convert.pages.chart import Chart, Scored, charts
from bp_convert.pages.page import Note, Page, Row, Section, Table
from bp_convert.render.batch_cells import cells, over_seeds, seeds_row, verdict
from bp_convert.render.words import is_share
from bp_convert.values.outcome import Outcome, Summary
from bp_convert.values.plan import Totals


def page(summary: Summary) -> Page:
    """Return a page with every job, and size, work and alpha against quality."""
    size = _over(summary, "Size against quality", "parameters", lambda one: one.params)
    work = _over(summary, "Work against quality", "multiply-adds", lambda one: one.macs)
    varied = (chart for chart in (*work, *_by_alpha(summary)) if chart.varied)
    about = (Note(summary.about),) if summary.about else ()
    found = (
        Section("", about),
        Section("", (*size, *varied)),
        Section("Against the paper", _paper_table(summary)),
        Section("Over seeds", _seeds_table(summary)),
        Section("Jobs", (_jobs_table(summary),)),
    )
    return Page(
        title=summary.name,
        verdict=verdict(summary),
        sections=tuple(section for section in found if section.parts),
        terms=(
            *("alpha", "rank R", "term", "target", "low rank", "params", "kept", "MAC"),
            *("score", "seed"),
        ),
    )


# Tables


def _jobs_table(summary: Summary) -> Table:
    metrics = _metrics(summary)
    columns = {"name": "job", "params": "params", "kept": "kept", "MACs": "MACs"}
    columns |= {"metric": "metric"} if len(metrics) > 1 else {}
    if metrics:
        columns |= {"full": _headed(metrics, "full"), "converted": "converted"}
        columns |= {"score": "in the end"}
    columns |= {"steps": "steps", "time": "time", "files": "files, or why not"}
    rows = []
    for one in summary.jobs:
        said = cells(one)
        rows.append(Row(tuple(said[key] for key in columns), one.state, one.folder))
    return Table(tuple(columns.values()), tuple(rows), frozenset(range(1, len(columns) - 1)))


def _metrics(summary: Summary) -> tuple[str, ...]:
    return tuple(dict.fromkeys(one.score.metric for one in summary.jobs if one.score))


def _headed(metrics: tuple[str, ...], what: str) -> str:
    """Head a column of scores with their metric, where all have one."""
    return f"{metrics[0]}, {what}" if len(metrics) == 1 else f"score, {what}"


def _seeds_table(summary: Summary) -> tuple[Table, ...]:
    """Return mean and spread where jobs differ in nothing but their seed."""
    groups = over_seeds(summary.jobs)
    mean = _headed(_metrics(summary), "mean")
    heads = ("job", "seeds", "params", "kept", mean, "standard deviation")
    rows = tuple(Row(seeds_row(one)) for one in groups)
    return (Table(heads, rows, frozenset(range(1, 6))),) if groups else ()


def _paper_table(summary: Summary) -> tuple[Table, ...]:
    """Return what was measured beside what is printed, where the recipe says what is."""
    heads = ("job", "params", "printed", "score", "printed", "difference", "printed in")
    rows = tuple(_paper_row(one) for one in summary.jobs if one.paper is not None)
    return (Table(heads, rows, frozenset(range(1, 6))),) if rows else ()


def _paper_row(one: Outcome) -> Row:
    paper, score = one.paper, one.score
    assert paper is not None
    difference = ""
    if score is not None and paper.score is not None and paper.metric == score.metric:
        # Publications print shares in percent.
        difference = f"{score.after * (100 if is_share(score.metric) else 1) - paper.score:+.1f}"
    return Row(
        (
            one.name,
            f"{one.params.after:,}" if one.params else "not run",
            f"{paper.params:,}" if paper.params else "",
            cells(one)["score"] or ("not run" if one.state == "waiting" else ""),
            "" if paper.score is None else f"{paper.score:g} {paper.metric}",
            difference,
            paper.source,
        ),
        one.state,
    )


# Pictures


def _over(
    summary: Summary, title: str, words: str, total: Callable[[Outcome], Totals | None]
) -> tuple[Chart, ...]:
    """Draw the final score of every job over what is left of something."""
    points = [
        Scored(left.after, one.score, _group(one, summary), one.name)
        for one in summary.jobs
        if one.score is not None and (left := total(one)) is not None and left.after
    ]
    return charts(title, points, logarithmic(words), _groups(summary))


def _by_alpha(summary: Summary) -> tuple[Chart, ...]:
    """Draw the final score over alpha, a line for each way of converting."""
    points = []
    for one in summary.jobs:
        alpha = one.keys.get("alpha")
        if isinstance(alpha, int | float) and one.score is not None and not _other(one):
            points.append(Scored(float(alpha), one.score, _group(one, summary), one.name))
    return charts(
        "Alpha against quality",
        points,
        linear("alpha", only=sorted({one.x for one in points})),
        _groups(summary),
        joined=True,
    )


def _other(one: Outcome) -> bool:
    """Return whether alpha is not what this job varies."""
    return bool(one.keys.get("counterpart") or one.keys.get("target")) or one.keys.get("rank") != 1


def _groups(summary: Summary) -> tuple[str, ...]:
    return tuple(dict.fromkeys(_group(one, summary) for one in summary.jobs))


def _group(one: Outcome, summary: Summary) -> str:
    """Name the group of a job: how it was made, and of which model where there are several."""
    counterpart = str(one.keys.get("counterpart") or "")
    method = str(one.keys.get("method") or "")
    words = counterpart or ("low rank" if method.startswith("svd") else "bilinear")
    if one.keys.get("init") == "random" and counterpart != "full":
        words += ", from scratch"
    several = len({job.model for job in summary.jobs if job.model}) > 1
    return f"{one.model}: {words}" if several else words
