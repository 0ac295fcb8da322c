"""An export in a terminal of 80 columns, and as a page."""

from __future__ import annotations

from collections import Counter

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table as Grid
from rich.text import Text

from bp_convert.pages.page import Lines, Note, Page, Row, Section, Table
from bp_convert.render import words
from bp_convert.render.fold import wrapped
from bp_convert.render.numbers import change, layers, milliseconds, size
from bp_convert.values.exported import Export, ExportedLayer
from bp_convert.values.literals import Form
from bp_convert.values.plan import Totals
from bp_convert.values.report import Latency

NAMES, ROWS = 34, 24  # columns of layers' names, and rows that a terminal shows
SLOWER = 1.05  # times of one model differ by so much from run to run
MEANS: dict[Form, str] = {
    "factors": "products on the factors at run time",
    "built": "the file holds factors; the runtime builds the weight when it loads the file",
    "dense": "the file holds the weight",
}


def verdict(export: Export) -> str:
    """Say in a sentence what was gained."""
    said = f"{size(export.size)} for {export.goal}"
    if export.dense_size is not None:
        said = f"{size(export.dense_size)} to {size(export.size)} for {export.goal}"
    if export.difference is None:
        return f"{said}; not run, for its runtime is not installed here."
    said += f", outputs equal to {export.difference:.0e}"
    if not export.latency:
        return f"{said} in {export.runtime}."
    slow = [one for one in export.latency if one.converted_ms > SLOWER * one.dense_ms]
    best = max(export.latency, key=lambda one: one.speedup)
    if slow:
        worst = min(slow, key=lambda one: one.speedup)
        return (
            f"{said}; SLOWER than the dense export in {export.runtime}: "
            f"{1 / worst.speedup:.2f}x its time at batch {worst.batch}. {_why(export)}"
        )
    if best.speedup > SLOWER:
        return f"{said}, up to {best.speedup:.2f}x as fast as the dense export in {export.runtime}."
    return f"{said}, as fast as the dense export in {export.runtime}."


def _why(export: Export) -> str:
    counts = Counter(one.form for one in export.layers)
    if counts["factors"]:
        return (
            f"{layers(counts['factors'])} run on factors; --form {_fast(export)} lets all run as "
            "the dense ones do."
        )
    return "All layers run as the dense ones do: time it again on a quiet machine."


def _fast(export: Export) -> Form:
    return "built" if export.goal in ("onnx", "openvino") else "dense"


def form_lines(export: Export) -> list[str]:
    """Say how many layers stand in which form, and what that means."""
    counts = Counter(one.form for one in export.layers)
    return [f"{layers(counts[form])}: {form}: {MEANS[form]}" for form in MEANS if counts[form]]


def _facts(export: Export) -> list[tuple[str, list[str]]]:
    found: list[tuple[str, list[str]]] = []
    if export.dense_size is not None:
        both = Totals(before=export.dense_size, after=export.size)
        found.append(("size", [f"{size(both.before)} to {size(both.after)}, {change(both)}"]))
    else:
        found.append(("size", [size(export.size)]))
    found.append(("speed", [_speed(one) for one in export.latency]))
    if export.difference is not None:
        apart = f"outputs differ from the model's by {export.difference:.1e} of the largest"
        where = f"in {export.runtime}, at {', '.join(export.checked)}"
        found.append(("checked", [f"{apart}, {where}"]))
    found.append(("inputs", list(export.inputs)))
    free = f"of any length: {', '.join(export.free)}"
    return [*found, ("free", [free]), ("note", list(export.notes))]


def _speed(one: Latency) -> str:
    """Say one measurement in a line; what differs no more than two runs of one model is alike."""
    if 1 / SLOWER <= one.speedup < 1:
        return words.latency(one).replace(
            f"SLOWER: {1 / one.speedup:.2f}x the dense time", "as fast as the dense export"
        )
    return words.latency(one)


def _compared(export: Export) -> str:
    whose = "that was given" if export.dense == "given" else "of the same weights"
    return f"compared with the dense model {whose}" if export.dense else ""


def shown_export(export: Export, *, every: bool = False) -> RenderableType:
    """Return an export as one renderable."""
    head = Text(export.model.rpartition(".")[2], style="bold")
    head.append(f"  to {export.goal}", style="not bold")
    if _compared(export):
        head.append(f", {_compared(export)}", style="not bold")
    parts: list[RenderableType] = [head]
    rows = list(export.layers if every else export.layers[:ROWS])
    if rows:
        table = Grid(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False, pad_edge=False)
        table.add_column("layer", max_width=NAMES)
        table.add_column("kind", no_wrap=True)
        table.add_column("form", no_wrap=True)
        forms = _timed_forms(export)
        for form in forms:
            table.add_column(form, justify="right", no_wrap=True)
        for one in rows:
            called = Text(wrapped(one.name, NAMES))
            table.add_row(called, one.kind, one.form, *(_time(one, form) for form in forms))
        parts.append(table)
        if len(export.layers) > len(rows):
            more = len(export.layers) - len(rows)
            parts.append(Text(f"and {layers(more)} more (--verbose)", style="dim"))
        parts += [Text(line, style="dim") for line in form_lines(export)]
        parts.append(Text())
    facts = Grid(box=None, padding=(0, 2, 0, 0), show_header=False, pad_edge=False)
    facts.add_column(no_wrap=True, style="bold")
    facts.add_column(overflow="fold")
    for name, lines in _facts(export):
        for place, line in enumerate(lines):
            facts.add_row("" if place else name, Text(line))
    return Group(*parts, facts, Text(), Text(export.verdict, style="bold"))


def _timed_forms(export: Export) -> list[Form]:
    found = {form for one in export.layers for form in one.micros}
    return [form for form in MEANS if form in found]


def _time(layer: ExportedLayer, form: Form) -> str:
    return milliseconds(layer.micros[form] / 1e3) if form in layer.micros else ""


def export_page(export: Export) -> Page:
    """Return a page with the size, the times, and each layer's form."""
    forms = _timed_forms(export)
    times = Table(
        ("batch", "dense", "converted", "times as fast"),
        tuple(
            Row(
                (
                    str(one.batch),
                    milliseconds(one.dense_ms),
                    milliseconds(one.converted_ms),
                    f"{one.speedup:.2f}",
                )
            )
            for one in export.latency
        ),
        frozenset({0, 1, 2, 3}),
    )
    table = Table(
        ("layer", "kind", "form", *forms),
        tuple(
            Row((one.name, one.kind, one.form, *(_time(one, form) for form in forms)))
            for one in export.layers
        ),
        frozenset(range(3, 3 + len(forms))),
    )
    meant = Lines(tuple(form_lines(export)))
    sections = [Section("", (Note(f"{_compared(export)}."),) if _compared(export) else ())]
    sections += [Section("Speed", (times,))] if export.latency else []
    sections += [Section("Layers", (meant, table))] if export.layers else []
    sections += [
        Section(name.capitalize(), (Lines(tuple(lines)),))
        for name, lines in _facts(export)
        if lines
    ]
    return Page(
        title=f"{export.model.rpartition('.')[2]}, exported to {export.goal}",
        verdict=export.verdict,
        sections=tuple(sections),
    )
