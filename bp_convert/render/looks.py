"""What ``print`` and notebooks show of a plan, a report, a probe or a sweep."""

from __future__ import annotations

import sys
from io import StringIO

from rich.console import Console, RenderableType

from bp_convert.render.documents import page_of
from bp_convert.render.page import Note, Table, fragment
from bp_convert.render.study_table import probe_verdict, shown_probe, shown_sweep
from bp_convert.render.terminal import WIDTH, rendered
from bp_convert.values.plan import Plan
from bp_convert.values.report import Report
from bp_convert.values.study import Probe, Sweep


def text(value: Plan | Report | Probe | Sweep) -> str:
    """Return a value as the command line prints it, without colours."""
    console = Console(file=StringIO(), width=None if sys.stdout.isatty() else WIDTH)
    with console.capture() as taken:
        console.print(drawn(value))
    return "\n".join(line.rstrip() for line in taken.get().splitlines()).rstrip()


def html(value: Plan | Report | Probe | Sweep) -> str:
    """Return a value's tables as a piece of a page, with all text escaped."""
    page = page_of(Report(plan=value) if isinstance(value, Plan) else value, folded=True)
    parts = (part for section in page.sections for part in section.parts)
    tables = (part for part in parts if isinstance(part, Table))
    return fragment(*(Note(line.strip("<>")) for line in repr(value).splitlines()), *tables)


def drawn(value: Plan | Report | Probe | Sweep, *, every: bool = False) -> RenderableType:
    """Return a value as it stands in a terminal.

    Args:
        every: repeated layers have a row each, and no row is left out.
    """
    if isinstance(value, Probe):
        return shown_probe(value, every=every)
    if isinstance(value, Sweep):
        return shown_sweep(value)
    return rendered(Report(plan=value) if isinstance(value, Plan) else value, every=every)


def verdict(value: Report | Probe | Sweep) -> str:
    """Return the sentence to remember."""
    return probe_verdict(value) if isinstance(value, Probe) else value.verdict
