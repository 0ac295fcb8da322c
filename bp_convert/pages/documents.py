"""A result as a document, in the form that a file's name asks for, and as it is printed.

A document says how its result was made, so that a reader can make it again.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any, TypeAlias

from rich.console import Console, RenderableType

from bp_convert.errors import PlanError
from bp_convert.pages import batch_page, page, report_page, study_page
from bp_convert.pages.export_page import export_page, shown_export
from bp_convert.render.numbers import clock
from bp_convert.render.study_table import probe_verdict, shown_probe, shown_sweep
from bp_convert.render.terminal import WIDTH, rendered
from bp_convert.values.base import as_json
from bp_convert.values.exported import Export
from bp_convert.values.outcome import Summary
from bp_convert.values.plan import Plan
from bp_convert.values.report import Report
from bp_convert.values.settings import Settings
from bp_convert.values.study import Probe, Sweep

FORMS = (".md", ".html", ".json")
Result: TypeAlias = Report | Probe | Sweep | Export | Summary


def document(result: Result, path: Path, command: str = "") -> str:
    """Return a result in the form that the file's name asks for.

    Args:
        command: that made it, as it was typed.

    Raises:
        PlanError: a form that is not known.
    """
    form = form_of(path)
    if form == ".json":
        return as_json(result) + "\n"
    if form == ".md":
        return page.markdown(page_of(result, command, folded=True))
    return page.html(page_of(result, command))


def form_of(path: Path) -> str:
    """Return the form that a file's name asks for, as one of ``FORMS``.

    Raises:
        PlanError: a form that is not known.
    """
    form = path.suffix.lower()
    if form in FORMS:
        return form
    raise PlanError(
        where=f"--report {path}",
        found=f"the ending {path.suffix!r}",
        allowed=", ".join(FORMS),
        fix="name the file with one of these endings",
    )


def page_of(result: Result, command: str = "", *, folded: bool = False) -> page.Page:
    """Return a result as a page.

    Args:
        command: that made it, as it was typed.
        folded: repeated layers of a report stand in one row.
    """
    if isinstance(result, Report):
        made = report_page.page(result, folded=folded)
        return replace(made, facts=facts(result, command, result.plan.settings, result.plan.inputs))
    if isinstance(result, Summary):
        command = f"bp-convert recipe run {result.recipe}" if result.recipe else ""
        return replace(batch_page.page(result), facts=facts(result, command))
    if isinstance(result, Export):
        return replace(export_page(result), facts=facts(result, command))
    if isinstance(result, Probe):
        made = study_page.probe_page(result)
    else:
        made = study_page.sweep_page(result)
    return replace(made, facts=facts(result, command, result.settings))


def facts(
    result: Result,
    command: str,
    settings: Settings | None = None,
    inputs: Sequence[object] = (),
) -> tuple[tuple[str, str], ...]:
    """Return (what, words) for all that is known.

    Args:
        command: as it was typed; empty where no command was.
        settings: that were asked for.
        inputs: that one example is.
    """
    # A summary is of jobs that have a model, data and a time of their own.
    one = None if isinstance(result, Summary) else result
    known = {
        "command": command,
        "model": one.source if one else "",
        "settings": _asked(settings) if settings else "",
        "seed": str(settings.seed) if settings else "",
        "inputs": ", ".join(map(str, inputs)),
        "fitted to": getattr(one, "calibration", ""),
        "versions": ", ".join(f"{name} {number}" for name, number in result.versions.items()),
        "machine": result.machine,
        "time": clock(one.seconds) if one and one.seconds else "",
    }
    return tuple((what, words) for what, words in known.items() if words)


def _asked(settings: Settings) -> str:
    """Write what differs from the settings that hold where nothing is asked."""
    given = settings.model_dump(mode="json", by_alias=True, exclude_defaults=True, exclude={"seed"})
    plain = {**given, "target": [str(one) for one in settings.target]}
    plain |= {"inputs": [str(one) for one in settings.inputs]}
    said = [f"{name} {_value(value)}" for name, value in plain.items() if value not in ([], ())]
    return "; ".join(said) or "all defaults"


def _value(value: Any) -> str:
    if isinstance(value, list) and all(isinstance(one, str) for one in value):
        return ", ".join(value)
    return value if isinstance(value, str) else json.dumps(value)


def text(value: Plan | Report | Probe | Sweep | Export) -> str:
    """Return a value as the command line prints it, without colours."""
    console = Console(file=StringIO(), width=None if sys.stdout.isatty() else WIDTH)
    with console.capture() as taken:
        console.print(drawn(value))
    return "\n".join(line.rstrip() for line in taken.get().splitlines()).rstrip()


def piece(value: Plan | Report | Probe | Sweep | Export) -> str:
    """Return a value's tables as a piece of a page, with all text escaped."""
    found = page_of(Report(plan=value) if isinstance(value, Plan) else value, folded=True)
    parts = (part for section in found.sections for part in section.parts)
    tables = (part for part in parts if isinstance(part, page.Table))
    return page.fragment(
        *(page.Note(line.strip("<>")) for line in repr(value).splitlines()), *tables
    )


def drawn(value: Plan | Report | Probe | Sweep | Export, *, every: bool = False) -> RenderableType:
    """Return a value as it stands in a terminal.

    Args:
        every: repeated layers have a row each, and no row is left out.
    """
    if isinstance(value, Probe):
        return shown_probe(value, every=every)
    if isinstance(value, Sweep):
        return shown_sweep(value)
    if isinstance(value, Export):
        return shown_export(value, every=every)
    return rendered(Report(plan=value) if isinstance(value, Plan) else value, every=every)


def verdict(value: Report | Probe | Sweep | Export) -> str:
    """Return the sentence to remember."""
    return probe_verdict(value) if isinstance(value, Probe) else value.verdict
