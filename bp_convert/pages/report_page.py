"""A report as a page."""

from __future__ import annotations

from bp_convert.pages.chart import Bars
from bp_convert.pages.page import Lines, Note, Page, Part, Row, Section, Table
from bp_convert.render import words
from bp_convert.render.fold import Folded, fold, middle
from bp_convert.render.numbers import milliseconds, short
from bp_convert.values.report import Report

LARGEST = 24  # layers that a picture shows
COUNTED = "Multiply-adds are of one example; 1 MAC = 2 FLOPs."
_HEADS = (
    *("layer", "kind", "action", "out|in, or why dense", "R"),
    *("params", "after", "MACs", "after", "error"),
)


def page(report: Report, *, folded: bool = False) -> Page:
    """Return a page with totals, every layer, and all that the run showed.

    Args:
        folded: repeated layers stand in one row.
    """
    rows = tuple(Row(cells) for cells in words.totals(report))
    totals = Table(("total", "before", "after", "change"), rows, frozenset({1, 2}))
    return Page(
        title=f"{report.plan.model.rpartition('.')[2]}, converted",
        verdict=report.verdict,
        sections=(
            Section("", (totals, Note(COUNTED))),
            Section("", _pictures(report)),
            Section("Layers", (_layers(report, folded=folded),)),
            *_sections(report),
        ),
        terms=(
            *("params", "MAC", "replaced", "pair", "rank R", "term", "relative error"),
            *(("alpha",) if report.plan.settings.alpha > 1 else ()),
            *(("target", "method", "estimated error") if report.plan.settings.target else ()),
            *(("score",) if report.scores else ()),
            *(("bits",) if report.plan.stored else ()),
            "seed",
        ),
    )


def _layers(report: Report, *, folded: bool) -> Table:
    rows = []
    stored = bool(report.plan.stored)
    for row in fold(report, every=not folded):
        layer = row.layer
        cells = (
            _name(row),
            layer.kind,
            layer.action + ("" if layer.way == "factored" else f", {layer.way}"),
            words.pairs_of(layer) or layer.reason,
            "" if layer.rank is None else str(layer.rank),
            *(short(count) for count in (*row.params, *row.macs)),
            *([layer.store or ""] if stored else []),
            f"{max(row.errors):.3f}" if row.errors else "",
        )
        rows.append(Row(cells, layer.action))
    heads = (*_HEADS[:-1], "bits", _HEADS[-1]) if stored else _HEADS
    return Table(heads, tuple(rows), frozenset(range(4, len(heads))))


def _name(row: Folded) -> str:
    return row.name + (f" x{row.count}" if row.count > 1 else "")


def _pictures(report: Report) -> tuple[Bars, ...]:
    """Draw the largest layers' parameters, and the times that were measured."""
    found = []
    rows = sorted(fold(report), key=lambda row: -row.params[0])[:LARGEST]
    if rows:
        found.append(
            Bars(
                title="Parameters by layer",
                label="parameters before and after",
                rows=tuple((middle(_name(row), 52), *row.params) for row in rows),
                keys=("before", "after"),
                more=f"the largest {LARGEST}" if len(rows) == LARGEST else "",
            )
        )
    if report.latency:
        found.append(
            Bars(
                title="Time an example, by examples in a pass",
                label="milliseconds an example, dense and converted",
                rows=tuple(
                    (f"batch {one.batch}", one.dense_ms / one.batch, one.converted_ms / one.batch)
                    for one in report.latency
                ),
                keys=("dense", "converted"),
                words=milliseconds,
            )
        )
    return tuple(found)


def _sections(report: Report) -> list[Section]:
    kept = [f"{count} x {reason} (such as {name})" for count, reason, name in words.kept(report)]
    others: tuple[Part, ...] = ()
    if every := words.others(report, every=True):
        others = (Lines(tuple(every), "each of them"),)
    found: list[tuple[str, list[str], tuple[Part, ...]]] = [
        ("Left dense", kept, ()),
        ("Without a kind, left as they are", words.others(report), others),
        ("Bits", words.bits(report), ()),
        ("Fit", words.fitting(report), ()),
        ("Blocks", words.blocks(report.reconstruction), ()),
        ("Quality", [words.score(one) for one in report.scores], ()),
        ("Training", words.trained_lines(report.training), ()),
        ("Speed", [words.latency(one) for one in report.latency], ()),
        ("Checked", words.verification(report), ()),
        ("Notes", words.notes(report), ()),
    ]
    return [Section(title, (Lines(tuple(said)), *more)) for title, said, more in found if said]
