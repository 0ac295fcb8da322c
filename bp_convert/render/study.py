"""A probe and a sweep in a terminal of 80 columns, and as pages with a picture."""

from __future__ import annotations

from html import escape
from math import isfinite, log10

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from bp_convert.render.documents import STYLE, table_row
from bp_convert.render.fold import middle
from bp_convert.render.numbers import percent, short, ticks
from bp_convert.render.words import value_of
from bp_convert.values.factors import FactorSpec
from bp_convert.values.study import Point, Probe, ProbeRow, Sweep

OURS, SVD = "#1f6feb", "#9aa5b1"
ROWS = 30  # of a probe that a terminal shows
LEFT, TOP, WIDE, HIGH = 70, 20, 520, 260  # of a chart's frame


def shown_probe(probe: Probe, *, every: bool = False) -> RenderableType:
    """Return a probe as one renderable, the largest savings first."""
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False, pad_edge=False)
    table.add_column("layer", no_wrap=True)
    for name in ("params", "saves", *(f"{100 * share:g}%" for share in probe.shares)):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("best at 25%", no_wrap=True)
    rows = [row for row in probe.rows if not row.reason]
    shown = rows if every else rows[:ROWS]
    for row in shown:
        table.add_row(
            middle(_name(row), 22),
            short(row.params),
            short(row.saves),
            *(_pair(ours, svd) for ours, svd in zip(row.errors, row.svd, strict=True)),
            _spec(row.best),
        )
    parts: list[RenderableType] = [_head(probe.model, probe.source), table]
    if len(rows) > len(shown):
        parts.append(Text(f"and {len(rows) - len(shown)} more layers (--verbose)", style="dim"))
    kept = [row for row in probe.rows if row.reason]
    if kept:
        parts.append(
            Text(f"{len(kept)} cannot be converted, such as {kept[0].layer}: {kept[0].reason}")
        )
    parts += [Text(), Text(_legend(probe)), Text(probe_verdict(probe), style="bold")]
    return Group(*parts)


def probe_verdict(probe: Probe) -> str:
    """Say in a sentence what can be saved."""
    rows = [row for row in probe.rows if not row.reason]
    total, saved = sum(row.params for row in rows), sum(row.saves for row in rows)
    if not saved:
        return f"No layer gives up parameters at an error of {probe.error:g}."
    first = rows[0]
    return (
        f"At an error of {probe.error:g} a layer, {percent(saved / total)} of {short(total)} "
        f"parameters fall away; {percent(first.saves / saved)} of that in {_name(first)}."
    )


def _legend(probe: Probe) -> str:
    of = f"output on {probe.calibration}" if probe.calibration else "weight"
    return (
        f"columns: relative error of the {of} with that share of its parameters, best pair / "
        f"truncated SVD; saves: parameters that fall away at an error of {probe.error:g}"
    )


def _pair(ours: float | None, svd: float | None) -> str:
    one, two = (_short_error(value) for value in (ours, svd))
    return one if one == two else f"{one}/{two}"


def _short_error(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}".removeprefix("0")


def _name(row: ProbeRow) -> str:
    return row.layer + ("" if row.role == "weight" else f".{row.role}")


def _spec(spec: FactorSpec | None) -> str:
    if spec is None:
        return ""
    if spec.out[1] == 1 and spec.inp[0] == 1:
        return f"low rank {spec.rank}"
    return str(spec)


def _head(model: str, source: str) -> Text:
    text = Text(model.rpartition(".")[2], style="bold")
    if source:
        text.append(f"  {source}", style="not bold")
    return text


def shown_sweep(sweep: Sweep) -> RenderableType:
    """Return a sweep as one renderable."""
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False, pad_edge=False)
    table.add_column("", no_wrap=True)
    table.add_column("target", no_wrap=True)
    table.add_column("method", no_wrap=True)
    for name in ("params", "kept", "MACs", "error", _metric(sweep)):
        table.add_column(name, justify="right", no_wrap=True)
    for place, point in enumerate(sweep.points):
        mark = ">" if place == sweep.recommended else ""
        table.add_row(mark, *_cells(point), style="bold" if mark else "")
    parts: list[RenderableType] = [_head(sweep.model, sweep.source), table]
    before = next((point.score for point in sweep.points if point.score is not None), None)
    if before is not None:
        parts.append(
            Text(
                f"the source: {short(sweep.params)} parameters, {before.metric} "
                f"{value_of(before, before.before)}, on {before.examples:,} examples that "
                "nothing was fitted to"
            )
        )
    if sweep.calibration:
        parts.append(Text(f"fitted to {sweep.calibration}"))
    return Group(*parts, Text(), Text(sweep.verdict, style="bold"))


def _metric(sweep: Sweep) -> str:
    return next((point.score.metric for point in sweep.points if point.score), "score")


def _cells(point: Point) -> tuple[str, ...]:
    if point.out_of_reach:
        return (point.target, point.method, "out of reach", "", "", "", "")
    return (
        point.target,
        point.method,
        short(point.params),
        f"{100 * point.share:.2f} %",
        "" if point.macs_share is None else f"{100 * point.macs_share:.0f} %",
        "" if point.error is None else f"{point.error:.3g}",
        "" if point.score is None else value_of(point.score, point.score.after),
    )


# Pages


def sweep_page(sweep: Sweep) -> str:
    """Return a page with the table and size against quality, that needs nothing but itself."""
    heads = ("target", "method", "params", "kept", "MACs", "error", _metric(sweep))
    numbers = set(range(2, 7))
    rows = "".join(
        table_row(_cells(point), "td", numbers, "replaced" if place == sweep.recommended else "")
        for place, point in enumerate(sweep.points)
    )
    return _page(
        f"{sweep.model.rpartition('.')[2]}: size against quality",
        sweep.verdict,
        f"{_chart(sweep)}<table class=points><thead>{table_row(heads, 'th', numbers)}</thead>"
        f"<tbody>{rows}</tbody></table>"
        + (f"<p>Fitted to {escape(sweep.calibration)}.</p>" if sweep.calibration else ""),
    )


def probe_page(probe: Probe) -> str:
    """Return a page with every layer's errors, ours beside truncated SVD's."""
    heads = ["layer", "kind", "params", "saves"]
    for share in probe.shares:
        heads += [f"{100 * share:g} %", "SVD"]
    heads.append("best at 25 %, or why not")
    numbers = set(range(2, 4 + 2 * len(probe.shares)))
    rows = []
    for row in probe.rows:
        cells = [_name(row), row.kind, short(row.params), "" if row.reason else short(row.saves)]
        for place in range(len(probe.shares)):
            ours, svd = (
                ("", "")
                if row.reason
                else (_full_error(row.errors[place]), _full_error(row.svd[place]))
            )
            cells += [ours, svd]
        cells.append(row.reason or _spec(row.best))
        rows.append(table_row(tuple(cells), "td", numbers, "kept" if row.reason else ""))
    return _page(
        f"{probe.model.rpartition('.')[2]}: how far each layer can be compressed",
        probe_verdict(probe),
        f"<h2>Savings by layer</h2>{_savings(probe)}<p>{escape(_legend(probe))}.</p>"
        f'<div class="wide"><table class=points><thead>{table_row(tuple(heads), "th", numbers)}'
        f"</thead><tbody>{''.join(rows)}</tbody></table></div>",
    )


def _full_error(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _page(title: str, verdict: str, body: str) -> str:
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}'
        f"</title><style>{STYLE}</style></head><body><h1>{escape(title)}</h1>"
        f'<p class="verdict">{escape(verdict)}</p>{body}</body></html>\n'
    )


def _savings(probe: Probe, limit: int = 24) -> str:
    """Draw how much of the largest layers falls away, as bars."""
    rows = [row for row in probe.rows if not row.reason][:limit]
    if not rows:
        return ""
    top = max(row.params for row in rows)
    parts = []
    for place, row in enumerate(rows):
        y = 26 * place
        parts.append(
            f'<text x="292" y="{y + 15}" text-anchor="end">{escape(middle(_name(row), 34))}</text>'
        )
        for colour, count in ((SVD, row.params), (OURS, row.params - row.saves)):
            parts.append(
                f'<rect x="300" y="{y + 5}" width="{max(1.0, 400 * count / top):.1f}" height="13" '
                f'fill="{colour}"/>'
            )
        parts.append(
            f'<text class="num" x="{306 + 400 * row.params / top:.1f}" y="{y + 15}">'
            f"{short(row.params)} to {short(row.params - row.saves)}</text>"
        )
    return (
        f'<svg viewBox="0 0 830 {26 * len(rows) + 8}" role="img" aria-label="savings by layer">'
        f"{''.join(parts)}</svg>"
        f'<p><span class="key before"></span> falls away at an error of {probe.error:g} '
        '<span class="key after"></span> stays</p>'
    )


def _chart(sweep: Sweep) -> str:
    """Draw quality over the share of parameters, on a logarithmic axis, ours beside SVD's."""
    points = [  # a perplexity may be infinite: it has a row in the table, and no place here
        point for point in sweep.points if not point.out_of_reach and isfinite(_value(point))
    ]
    if not points:
        return ""
    scored = any(point.score for point in points)
    shares = [log10(point.share) for point in points]
    low, high = min(shares) - 0.08, max(0.0, max(shares)) + 0.04
    values = [_value(point) for point in points]
    before = next((point.score.before for point in points if point.score), 0.0)
    before = before if isfinite(before) else min(values)
    bottom, top = min(*values, before), max(*values, before)
    edge = 0.08 * (top - bottom) or 0.1
    bottom, top = bottom - edge, top + edge

    def place(share: float, value: float) -> tuple[float, float]:
        x = LEFT + WIDE * (log10(share) - low) / (high - low)
        return x, TOP + HIGH * (top - value) / (top - bottom)

    parts = [
        f'<rect x="{LEFT}" y="{TOP}" width="{WIDE}" height="{HIGH}" fill="none" stroke="#57606a"/>'
    ]
    for share in (0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0):
        if low <= log10(share) <= high:
            x, _ = place(share, top)
            parts.append(
                f'<line x1="{x:.1f}" y1="{TOP}" x2="{x:.1f}" y2="{TOP + HIGH}" stroke="#e1e4e8"/>'
                f'<text x="{x:.1f}" y="{TOP + HIGH + 18}" text-anchor="middle">'
                f"{100 * share:g} %</text>"
            )
    for value in ticks(bottom, top):
        _, y = place(1.0, value)
        parts.append(
            f'<line x1="{LEFT - 4}" y1="{y:.1f}" x2="{LEFT}" y2="{y:.1f}" stroke="#57606a"/>'
            f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{value:g}</text>'
        )
    if scored:
        _, y = place(1.0, before)
        parts.append(
            f'<line x1="{LEFT}" y1="{y:.1f}" x2="{LEFT + WIDE}" y2="{y:.1f}" stroke="#57606a" '
            f'stroke-dasharray="5 4"/><text x="{LEFT + 6}" y="{y - 5:.1f}">source</text>'
        )
    for method in dict.fromkeys(point.method for point in points):
        colour = SVD if method == "svd" else OURS
        line = sorted(
            place(point.share, _value(point)) for point in points if point.method == method
        )
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in line)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}"/>' for x, y in line]
    what = _metric(sweep) if scored else "estimated error"
    methods = list(dict.fromkeys(point.method for point in points))
    keys = "".join(
        f'<span class="key {"before" if method == "svd" else "after"}"></span> {method} '
        for method in methods
    )
    return (
        f'<svg viewBox="0 0 {LEFT + WIDE + 30} {TOP + HIGH + 50}" role="img" '
        f'aria-label="size against quality">{"".join(parts)}'
        f'<text x="{LEFT + WIDE / 2}" y="{TOP + HIGH + 42}" text-anchor="middle">'
        f"parameters that are left (logarithmic)</text>"
        f'<text x="16" y="{TOP + HIGH / 2}" text-anchor="middle" '
        f'transform="rotate(-90 16 {TOP + HIGH / 2})">{escape(what)}</text></svg><p>{keys}</p>'
    )


def _value(point: Point) -> float:
    return point.score.after if point.score is not None else (point.error or 0.0)
