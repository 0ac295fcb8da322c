"""A probe and a sweep in a terminal of 80 columns."""

from __future__ import annotations

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from bp_convert.render.fold import wrapped
from bp_convert.render.numbers import percent, short
from bp_convert.render.words import value_of
from bp_convert.values.factors import FactorSpec
from bp_convert.values.study import Point, Probe, ProbeRow, Sweep

ROWS, NAMES = 30, 22  # of a probe that a terminal shows, and columns of their names


def shown_probe(probe: Probe, *, every: bool = False) -> RenderableType:
    """Return a probe as one renderable, the largest savings first."""
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False, pad_edge=False)
    table.add_column("layer", max_width=NAMES)
    for name in ("params", "saves", *(f"{100 * share:g}%" for share in probe.shares)):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("best at 25%", no_wrap=True)
    rows = [row for row in probe.rows if not row.reason]
    shown = rows if every else rows[:ROWS]
    for row in shown:
        table.add_row(
            wrapped(name_of(row), NAMES),
            short(row.params),
            short(row.saves),
            *(_pair(ours, svd) for ours, svd in zip(row.errors, row.svd, strict=True)),
            spec_of(row.best),
        )
    parts: list[RenderableType] = [_head(probe.model, probe.source), table]
    if len(rows) > len(shown):
        parts.append(Text(f"and {len(rows) - len(shown)} more layers (--verbose)", style="dim"))
    kept = [row for row in probe.rows if row.reason]
    if kept:
        parts.append(
            Text(f"{len(kept)} cannot be converted, such as {kept[0].layer}: {kept[0].reason}")
        )
    parts += [Text(words) for words in expanded_of(probe)]
    parts += [Text(), Text(legend(probe)), Text(probe_verdict(probe), style="bold")]
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
        f"parameters fall away; {percent(first.saves / saved)} of that in {name_of(first)}."
    )


def expanded_of(probe: Probe) -> list[str]:
    """Name the layers that would run expanded."""
    names = list(dict.fromkeys(row.layer for row in probe.rows if row.way == "expanded"))
    if not names:
        return []
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return [
        f"expanded, on the dense weight, built once and kept in memory: {names[0]}{more} "
        "(--ways factored does without)"
    ]


def legend(probe: Probe) -> str:
    """Say what the columns are."""
    of = f"output on {probe.calibration}" if probe.calibration else "weight"
    return (
        f"columns: relative error of the {of} with that share of its parameters, best pair / "
        f"truncated SVD; saves: parameters that fall away at an error of {probe.error:g}"
    )


def _pair(ours: float | None, svd: float | None) -> str:
    one, two = ("-" if e is None else f"{e:.2f}".removeprefix("0") for e in (ours, svd))
    return one if one == two else f"{one}/{two}"


def name_of(row: ProbeRow) -> str:
    """Name a layer and, where it has several, its matrix."""
    return row.layer + ("" if row.role == "weight" else f".{row.role}")


def spec_of(spec: FactorSpec | None) -> str:
    """Write a pair and its terms."""
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
    for name in ("params", "kept", "MACs", "error", metric_of(sweep)):
        table.add_column(name, justify="right", no_wrap=True)
    for place, point in enumerate(sweep.points):
        mark = ">" if place == sweep.recommended else ""
        table.add_row(mark, *cells_of(point), style="bold" if mark else "")
    parts: list[RenderableType] = [_head(sweep.model, sweep.source), table]
    parts += [Text(words) for words in source_words(sweep)]
    return Group(*parts, Text(), Text(sweep.verdict, style="bold"))


def source_words(sweep: Sweep) -> list[str]:
    """Say what the points are compared with, and what they were fitted to."""
    said = []
    before = next((point.score for point in sweep.points if point.score is not None), None)
    if before is not None:
        said.append(
            f"the source: {short(sweep.params)} parameters, {before.metric} "
            f"{value_of(before, before.before)}, on {before.examples:,} examples that "
            "nothing was fitted to"
        )
    return [*said, f"fitted to {sweep.calibration}"] if sweep.calibration else said


def metric_of(sweep: Sweep) -> str:
    """Name the metric of the points."""
    return next((point.score.metric for point in sweep.points if point.score), "score")


def cells_of(point: Point) -> tuple[str, ...]:
    """Return what a table says of a point."""
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
