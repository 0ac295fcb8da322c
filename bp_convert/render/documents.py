"""A result in the form that a file's name asks for: Markdown, HTML or JSON."""

from __future__ import annotations

from pathlib import Path
from typing import TypeAlias

from bp_convert.errors import PlanError
from bp_convert.render import batch_page, report_page, study_page
from bp_convert.render.page import Page, html, markdown
from bp_convert.values.outcome import Summary
from bp_convert.values.report import Report
from bp_convert.values.study import Probe, Sweep
from bp_convert.values.text import as_json

FORMS = (".md", ".html", ".json")
Result: TypeAlias = Report | Probe | Sweep | Summary


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
        return markdown(page_of(result, command, folded=True))
    return html(page_of(result, command))


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


def page_of(result: Result, command: str = "", *, folded: bool = False) -> Page:
    """Return a result as a page.

    Args:
        command: that made it, as it was typed.
        folded: repeated layers of a report stand in one row.
    """
    if isinstance(result, Report):
        return report_page.page(result, command, folded=folded)
    if isinstance(result, Probe):
        return study_page.probe_page(result, command)
    if isinstance(result, Sweep):
        return study_page.sweep_page(result, command)
    return batch_page.page(result)
