"""A probe and a sweep as pages."""

from __future__ import annotations

from bp_convert.pages.axis import logarithmic, quality
from bp_convert.pages.chart import Bars, Chart, Dot, Scored, charts
from bp_convert.pages.page import Lines, Note, Page, Part, Row, Section, Table
from bp_convert.render.fold import middle
from bp_convert.render.numbers import short
from bp_convert.render.study_table import (
    cells_of,
    legend,
    metric_of,
    name_of,
    probe_verdict,
    source_words,
    spec_of,
)
from bp_convert.values.study import Point, Probe, ProbeRow, Sweep

LARGEST = 24  # layers that a picture shows


def probe_page(probe: Probe) -> Page:
    """Return a page with every layer's errors, ours beside truncated SVD's."""
    heads = ["layer", "kind", "params", "saves"]
    for share in probe.shares:
        heads += [f"{100 * share:g} %", "SVD"]
    table = Table(
        heads=(*heads, "best at 25 %, or why not"),
        rows=tuple(_row(row, len(probe.shares)) for row in probe.rows),
        numbers=frozenset(range(2, len(heads))),
    )
    able = [row for row in probe.rows if not row.reason][:LARGEST]
    saved = Bars(
        title="Savings by layer",
        label="savings by layer",
        rows=tuple((middle(name_of(row), 52), row.params, row.params - row.saves) for row in able),
        keys=("parameters now", f"at an error of {probe.error:g}"),
        more=f"the {LARGEST} largest savings" if len(able) == LARGEST else "",
    )
    return Page(
        title=f"{probe.model.rpartition('.')[2]}: how far each layer can be compressed",
        verdict=probe_verdict(probe),
        sections=(
            Section("", (saved,) if able else ()),
            Section("Layers", (Note(f"{legend(probe)}."), table)),
        ),
        terms=("params", "saves", "relative error", "term", "pair", "rank R", "low rank", "seed"),
    )


def _row(row: ProbeRow, shares: int) -> Row:
    cells = [name_of(row), row.kind, short(row.params)]
    if row.reason:
        return Row((*cells, *[""] * (1 + 2 * shares), row.reason), "kept")
    for ours, svd in zip(row.errors, row.svd, strict=True):
        cells += [_error(ours), _error(svd)]
    return Row((*cells[:3], short(row.saves), *cells[3:], _form(row)))


def _form(row: ProbeRow) -> str:
    return spec_of(row.best) + ("" if row.way in (None, "factored") else f", {row.way}")


def _error(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def sweep_page(sweep: Sweep) -> Page:
    """Return a page with all points, and size and multiply-adds against quality."""
    table = Table(
        heads=("target", "method", "params", "kept", "MACs", "error", metric_of(sweep)),
        rows=tuple(
            Row(cells_of(point), "chosen" if place == sweep.recommended else "")
            for place, point in enumerate(sweep.points)
        ),
        numbers=frozenset(range(2, 7)),
    )
    notes: tuple[Part, ...] = tuple(
        Note(f"{words[0].upper()}{words[1:]}.") for words in source_words(sweep)
    )
    missed = [point for point in sweep.points if point.out_of_reach]
    if missed:
        notes += (Lines(tuple(f"{_name(point)}: {point.out_of_reach}" for point in missed)),)
    return Page(
        title=f"{sweep.model.rpartition('.')[2]}: size against quality",
        verdict=sweep.verdict,
        sections=(Section("", _pictures(sweep)), Section("Points", (table, *notes))),
        terms=(
            *("target", "method", "term", "low rank", "params", "kept", "MAC"),
            *("relative error", "estimated error", "score", "seed"),
        ),
    )


def _pictures(sweep: Sweep) -> tuple[Chart, ...]:
    """Draw what is known of quality over what is left."""
    points = [point for point in sweep.points if not point.out_of_reach]
    methods = tuple(dict.fromkeys(point.method for point in points))
    found: list[Chart] = []
    for words, title, left in (
        ("parameters", "Size", {id(point): point.share for point in points}),
        ("multiply-adds", "Work", {id(point): point.macs_share for point in points}),
    ):
        shares = [(point, 100 * share) for point in points if (share := left[id(point)])]
        x = logarithmic(f"{words} that are left", lambda v: f"{v:g} %", holds=(100.0,))
        found += charts(
            f"{title} against quality",
            [
                Scored(share, point.score, point.method, _name(point))
                for point, share in shares
                if point.score is not None
            ],
            x,
            methods,
            joined=True,
            source=True,
        )
        known = [(share, p.error, p) for p, share in shares if p.error is not None]
        dots = tuple(Dot(share, error, p.method, _name(p)) for share, error, p in known)
        if dots:
            y = quality("estimated error", [dot.y for dot in dots], best=0.0)
            title = f"{title} against estimated error"
            found.append(Chart(title, dots, x, y, methods, joined=True))
    return tuple(found)


def _name(point: Point) -> str:
    return f"{point.target}, {point.method}"
