"""A dry run of a recipe in a terminal of 80 columns."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from bp_convert.render.fold import middle
from bp_convert.render.numbers import clock, short
from bp_convert.values.outcome import Estimate

_NAME, _WHAT = 24, 14


def shown_estimates(name: str, found: Sequence[Estimate]) -> RenderableType:
    """Return the table of all planned jobs, with what stands in their way."""
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False, pad_edge=False)
    table.add_column("job", no_wrap=True)
    table.add_column("how", no_wrap=True)
    trained = any(one.steps != (0, 0) for one in found)
    heads = ["params", "kept", "MACs"] + ["steps", "at least"] * trained
    for head in heads:
        table.add_column(head, justify="right", no_wrap=True)
    for one in found:
        if one.problem:
            table.add_row(middle(one.name, _NAME), Text("cannot run", style="red"))
            continue
        table.add_row(
            middle(one.name, _NAME),
            middle(one.what, _WHAT),
            short(one.params.after) if one.params else "",
            f"{100 * one.params.ratio:.1f}%" if one.params else "",
            short(one.macs.after) if one.macs else "?",
            *([_steps(one), _time(one)] if trained else []),
        )
    parts: list[RenderableType] = [Text(f"{name}: nothing was run", style="bold"), table, Text()]
    total = sum(one.seconds or 0.0 for one in found)
    unknown = sum(one.training_macs is None for one in found)
    words = "no training"
    if total:
        words = (
            f"training: at least {clock(total)} at the speed that this machine multiplies large "
            "matrices, several times that for small layers; a full model is counted for each job, "
            "and trained once"
        )
    if unknown:
        words += f"; not known for {unknown} jobs, whose data is not counted before it is read"
    parts.append(Text(words))
    notes = {note: one.name for one in reversed(found) for note in one.notes}
    parts += [Text(f"{name}: {note}", style="dim") for note, name in reversed(notes.items())]
    parts += [Text(f"{one.name}: {one.problem}", style="red") for one in found if one.problem]
    return Group(*parts)


def _steps(one: Estimate) -> str:
    first, then = one.steps
    if first is None or then is None:
        return "?"
    return short(first + then) if first + then else ""


def _time(one: Estimate) -> str:
    return "" if not one.training_macs or one.seconds is None else clock(one.seconds)
