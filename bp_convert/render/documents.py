"""A report as a Markdown or HTML document."""

from __future__ import annotations

from html import escape
from pathlib import Path

from bp_convert.errors import PlanError
from bp_convert.render import words
from bp_convert.render.fold import Row, fold, middle, unfolded
from bp_convert.render.numbers import short
from bp_convert.values.report import Report
from bp_convert.values.text import as_json

FORMATS = (".md", ".html", ".json")
_HEADS = (
    "layer",
    "kind",
    "action",
    "out|in, or why dense",
    "R",
    "params",
    "after",
    "MACs",
    "after",
    "error",
)


def document(report: Report, path: Path) -> str:
    """Return the report in the form that the file's name asks for.

    Raises:
        PlanError: a form that is not known.
    """
    form = form_of(path)
    if form == ".md":
        return markdown(report)
    if form == ".html":
        return html(report)
    return as_json(report.model_dump(mode="json", by_alias=True)) + "\n"


def form_of(path: Path) -> str:
    """Return the form that a file's name asks for, as one of ``FORMATS``.

    Raises:
        PlanError: a form that is not known.
    """
    form = path.suffix.lower()
    if form in FORMATS:
        return form
    raise PlanError(
        where=f"--report {path}",
        found=f"the ending {path.suffix!r}",
        allowed=", ".join(FORMATS),
        fix="name the file with one of these endings",
    )


def markdown(report: Report) -> str:
    """Return a Markdown document; repeated layers stand in one row."""
    lines = [f"# {report.plan.model.rpartition('.')[2]}, converted", "", report.verdict, ""]
    if report.source:
        lines += [f"Source: {_md(report.source)}", ""]
    lines += ["| total | before | after | change |", "| --- | ---: | ---: | --- |"]
    lines += [f"| {' | '.join(row)} |" for row in words.totals(report)]
    lines += ["", "Multiply-adds are of one example; 1 MAC = 2 FLOPs.", "", "## Layers", ""]
    lines += [f"| {' | '.join(_md(head) for head in _HEADS)} |"]
    lines += ["| --- | --- | --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |"]
    for row in fold(report):
        lines.append(f"| {' | '.join(_md(cell) for cell in _cells(row))} |")
    for title, found in _sections(report):
        lines += ["", f"## {title}", "", *(f"- {_md(line)}" for line in found)]
    return "\n".join(lines) + "\n"


def html(report: Report) -> str:
    """Return a page that needs nothing but itself."""
    title = escape(report.plan.model.rpartition(".")[2])
    heads = table_row(("total", "before", "after", "change"), "th", {1, 2})
    totals = "".join(table_row(row, "td", {1, 2}) for row in words.totals(report))
    rows = unfolded(report)
    body = "".join(
        table_row(_cells(row), "td", set(range(4, 10)), row.layer.action) for row in rows
    )
    sections = "".join(
        f"<h2>{escape(name)}</h2><ul>{''.join(f'<li>{escape(line)}</li>' for line in found)}</ul>"
        for name, found in _sections(report)
    )
    source = f"<p>{escape(report.source)}</p>" if report.source else ""
    versions = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}, converted'
        f"</title><style>{STYLE}</style></head><body><h1>{title}, converted</h1>"
        f'<p class="verdict">{escape(report.verdict)}</p>{source}'
        f'<table class="totals"><thead>{heads}'
        f"</thead><tbody>{totals}</tbody></table>"
        "<p>Multiply-adds are of one example; 1 MAC = 2 FLOPs.</p>"
        f"<h2>Parameters by layer</h2>{_bars(fold(report))}"
        f'<h2>Layers</h2><div class="wide"><table class="layers"><thead>'
        f"{table_row(_HEADS, 'th', set(range(4, 10)))}</thead>"
        f"<tbody>{body}</tbody></table></div>{sections}{_others(report)}<footer>{escape(versions)}</footer></body></html>\n"
    )


def _others(report: Report) -> str:
    """List every module without a kind, folded until somebody asks."""
    lines = words.others(report, every=True)
    if not lines:
        return ""
    items = "".join(f"<li>{escape(line)}</li>" for line in lines)
    return f"<details><summary>each of those without a kind</summary><ul>{items}</ul></details>"


def _sections(report: Report) -> list[tuple[str, list[str]]]:
    kept = [f"{count} x {reason} (such as {name})" for count, reason, name in words.kept(report)]
    found = [
        ("Left dense", kept),
        ("Without a kind, left as they are", words.others(report)),
        ("Fit", words.fitting(report)),
        ("Quality", [words.score(one) for one in report.scores]),
        ("Training", words.trained_lines(report.training)),
        ("Speed", [words.latency(one) for one in report.latency]),
        ("Checked", words.verification(report)),
        ("Notes", words.notes(report)),
    ]
    return [(title, lines) for title, lines in found if lines]


def _cells(row: Row) -> tuple[str, ...]:
    layer = row.layer
    error = f"{max(row.errors):.3f}" if row.errors else ""
    return (
        row.name + (f" x{row.count}" if row.count > 1 else ""),
        layer.kind,
        layer.action,
        words.pairs_of(layer) or layer.reason,
        "" if layer.rank is None else str(layer.rank),
        short(row.params[0]),
        short(row.params[1]),
        short(row.macs[0]),
        short(row.macs[1]),
        error,
    )


def _md(text: str) -> str:
    for special in "\\`|*_[]<":
        text = text.replace(special, f"\\{special}")
    return text


def table_row(cells: tuple[str, ...], tag: str, numbers: set[int], mark: str = "") -> str:
    """Return a row of an HTML table.

    Args:
        tag: td or th.
        numbers: places of the cells that hold numbers.
        mark: class of the row.
    """
    inner = "".join(
        f"<{tag}{' class=n' if place in numbers else ''}>{escape(cell)}</{tag}>"
        for place, cell in enumerate(cells)
    )
    return f'<tr class="{mark}">{inner}</tr>' if mark else f"<tr>{inner}</tr>"


def _bars(rows: list[Row], limit: int = 24) -> str:
    """Draw the largest layers' parameters before and after as horizontal bars."""
    rows = sorted(rows, key=lambda row: -row.params[0])[:limit]
    if not rows:
        return ""
    top = max(max(row.params) for row in rows) or 1
    left, wide, step = 300, 420, 34
    parts = []
    for place, row in enumerate(rows):
        y = place * step
        name = escape(middle(row.name, 34) + (f" x{row.count}" if row.count > 1 else ""))
        parts.append(f'<text x="{left - 8}" y="{y + 18}" text-anchor="end">{name}</text>')
        for offset, count, colour in (
            (4, row.params[0], "#9aa5b1"),
            (15, row.params[1], "#1f6feb"),
        ):
            length = max(1, wide * count / top)
            parts.append(
                f'<rect x="{left}" y="{y + offset}" width="{length:.1f}" height="9" '
                f'fill="{colour}"/><text class="num" x="{left + length + 6:.1f}" '
                f'y="{y + offset + 8.5}">{short(count)}</text>'
            )
    height = len(rows) * step + 8
    return (
        f'<svg viewBox="0 0 {left + wide + 90} {height}" role="img" '
        f'aria-label="parameters before and after"><g>{"".join(parts)}</g></svg>'
        '<p><span class="key before"></span> before <span class="key after"></span> after'
        f"{'; the largest ' + str(limit) if len(rows) == limit else ''}</p>"
    )


STYLE = """
body{font:15px/1.5 system-ui,sans-serif;color:#1b1f24;background:#fff;max-width:72rem;
margin:2rem auto;padding:0 1rem}
h1{font-size:1.5rem}h2{font-size:1.15rem;margin-top:2rem}
.verdict{font-weight:600;border-left:4px solid #1f6feb;padding-left:.8rem}
table{border-collapse:collapse;font-size:13px;width:100%}
table.totals{width:auto}
th{text-align:left;border-bottom:2px solid #57606a}th,td{padding:.2rem .6rem .2rem 0}
td{border-bottom:1px solid #e1e4e8}
.wide{overflow-x:auto}.layers td{white-space:nowrap}
table.points{width:auto}.points td,.points th{white-space:nowrap;padding-right:1rem}
.points td:last-child,.points th:last-child{white-space:normal;padding-right:0}
.layers td:nth-child(1){white-space:normal;overflow-wrap:anywhere;min-width:14rem}
.layers td:nth-child(4){white-space:normal;min-width:13rem}
.n{text-align:right;white-space:nowrap;font-variant-numeric:tabular-nums}
tr.kept td{color:#57606a}
svg{max-width:min(100%,54rem);font:12px system-ui,sans-serif;fill:#1b1f24}
.num{font-size:10px;fill:#3d444d}
.key{display:inline-block;width:.9rem;height:.6rem;margin-left:.6rem}
.key.before{background:#9aa5b1}.key.after{background:#1f6feb}
footer{margin-top:2rem;color:#57606a;font-size:12px}
"""
