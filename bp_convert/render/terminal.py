"""A report, and the tensors of a file, in a terminal of 80 columns or more."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from bp_convert.render import words
from bp_convert.render.fold import Folded, common, fold, middle, wrapped
from bp_convert.render.numbers import short
from bp_convert.values.report import Report

if TYPE_CHECKING:
    from torch import Tensor

WIDTH = 80
_TENSORS, _SHAPES = 40, 18  # columns at most
_PAIRS = 14  # columns at most
_BITS = 5  # columns and a gap
_RUNS = 9
_FIXED = 8 + 6 + 6 + 5 + 8  # action, params, after, error, gaps
# Without lines and heads.
_grid = partial(Table, box=None, padding=(0, 2, 0, 0), show_header=False, pad_edge=False)
_COLOURS = {"replaced": "green", "widened": "yellow", "kept": ""}


def rendered(report: Report, *, every: bool = False) -> RenderableType:
    """Return the whole report as one renderable."""
    parts: list[RenderableType] = [_head(report)]
    rows = fold(report, every=every)
    if rows:
        parts.append(_Layers(rows))
    parts += _kept(report)
    parts += _others(report, every=every)
    parts.append(_totals(report))
    parts += _lines("bits", words.bits(report))
    parts += _lines("fit", words.fitting(report))
    parts += _lines("blocks", words.blocks(report.reconstruction))
    parts += _lines("quality", [words.score(one) for one in report.scores])
    parts += _lines("trained", words.trained_lines(report.training))
    parts += _lines("speed", [words.latency(one) for one in report.latency])
    if report.verification is not None:
        parts += _lines("checked", words.verification(report))
    parts += _lines("note", words.notes(report))
    parts.append(Text())
    parts.append(Text(report.verdict, style="bold"))
    return Group(*parts)


def _head(report: Report) -> Text:
    text = Text(report.plan.model.rpartition(".")[2], style="bold")
    if report.source:
        text.append(f"  {report.source}", style="not bold")
    if report.plan.assumed:
        text.append(f"\nassumed {report.plan.assumed}", style="dim not bold")
    return text


@dataclass(frozen=True)
class _Layers:
    """The table of layers. A name that is too long for its column goes on in the next line."""

    rows: list[Folded]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield _table(self.rows, options.max_width)


def _table(rows: list[Folded], width: int) -> Table:
    pairs = min(_PAIRS, max(6, *(len(words.pairs_of(row.layer)) for row in rows)))
    ranks = max(len(short(row.layer.rank or 0)) for row in rows)
    kinds = max(4, *(len(row.layer.kind) for row in rows))
    stored = any(row.layer.store for row in rows)
    ways = any(row.layer.way != "factored" for row in rows)
    names = max(WIDTH, width) - _FIXED - pairs - ranks - kinds - (_BITS if stored else 0)
    names -= _RUNS if ways else 0
    table = Table(box=SIMPLE_HEAD, padding=0, show_edge=False, pad_edge=False)
    table.add_column("layer", max_width=names)
    table.add_column("kind", no_wrap=True)
    table.add_column("action", no_wrap=True)
    table.add_column("out|in", no_wrap=True, overflow="ellipsis")
    table.add_column("R", justify="right", no_wrap=True)
    table.add_column("params", justify="right", no_wrap=True)
    table.add_column("after", justify="right", no_wrap=True)
    if stored:
        table.add_column("bits", no_wrap=True)
    if ways:
        table.add_column("runs", no_wrap=True)
    table.add_column("error", justify="right", no_wrap=True)
    for row in rows:
        layer = row.layer
        count = f" x{row.count}" if row.count > 1 else ""
        table.add_row(
            Text(wrapped(row.name + count, names)),
            Text(layer.kind),
            Text(layer.action, style=_COLOURS[layer.action]),
            Text(middle(words.pairs_of(layer), pairs)),
            Text("" if layer.rank is None else short(layer.rank)),
            Text(short(row.params[0])),
            Text(short(row.params[1])),
            *([Text(layer.store or "")] if stored else []),
            *([Text(layer.way if layer.factors else "")] if ways else []),
            Text(_error(row.errors)),
        )
    return table


def _error(errors: tuple[float, ...]) -> str:
    """Write the largest relative error of a row."""
    if not errors:
        return ""
    high = max(errors)
    return f"{high:.2f}" if high >= 0.005 or high == 0 else f"{high:.0e}"


def _kept(report: Report) -> list[RenderableType]:
    found = words.kept(report)
    if not found:
        return []
    table = _grid()
    table.add_column(justify="right", no_wrap=True, min_width=4)
    table.add_column(overflow="fold")
    for count, reason, example in found:
        table.add_row(str(count), Text.assemble(reason, (f"  [{example}]", "dim not bold")))
    return [Text("\nleft dense", style="bold"), table, Text()]


def _others(report: Report, *, every: bool) -> list[RenderableType]:
    found = words.others(report, every=every)
    if not found:
        return []
    table = _grid()
    table.add_column(overflow="fold")
    for line in found:
        table.add_row(Text(line))
    return [Text("without a kind, left as they are", style="bold"), table, Text()]


def _totals(report: Report) -> Table:
    table = _grid(title="")
    for column in range(4):
        table.add_column(justify="right" if column in (1, 2) else "left", no_wrap=column < 3)
    for name, before, after, change in words.totals(report):
        table.add_row(Text(name, style="bold"), before, f"to {after}", Text(change))
    table.caption = "per example; 1 multiply-add (MAC) = 2 FLOPs"
    table.caption_justify = "left"
    return table


def _lines(name: str, lines: list[str]) -> list[RenderableType]:
    if not lines:
        return []
    table = _grid()
    table.add_column(no_wrap=True, style="bold")
    table.add_column(overflow="fold")
    for number, line in enumerate(lines):
        table.add_row(name if number == 0 else "", Text(line))
    return [table]


def weights_line(source: str, held: Mapping[str, Tensor]) -> str:
    """Say in a line what a file holds."""
    count = sum(one.numel() for one in held.values())
    return f"{source}: weights without a model: {len(held)} tensors, {count:,} numbers"


def shown_weights(source: str, held: Mapping[str, Tensor], fix: str) -> RenderableType:
    """Return a table of the tensors; those that differ by numbers in their names are one row.

    Args:
        fix: how to learn more.
    """
    groups: dict[tuple[object, ...], dict[str, Tensor]] = {}
    for name, one in held.items():
        groups.setdefault((re.sub(r"\d+", "*", name), one.shape, one.dtype), {})[name] = one
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False, pad_edge=False)
    table.add_column("tensor", max_width=_TENSORS)
    for head in ("shape", "dtype"):
        table.add_column(head, no_wrap=True)
    table.add_column("numbers", justify="right", no_wrap=True)
    for same in groups.values():
        count = f" x{len(same)}" if len(same) > 1 else ""
        first, *_ = same.values()
        shape = "x".join(map(str, first.shape)) or "one"
        table.add_row(
            Text(wrapped(common([*same]) + count, _TENSORS)),
            Text(middle(shape, _SHAPES)),
            Text(str(first.dtype).removeprefix("torch.")),
            Text(f"{sum(one.numel() for one in same.values()):,}"),
        )
    return Group(Text(weights_line(source, held), style="bold"), table, Text(fix))
