"""Plans and reports as people read them: terminal, Markdown, HTML, JSON, and one verdict.

Importing it gives plans, reports, probes and sweeps their looks.
"""

from __future__ import annotations

from bp_convert.values.plan import Plan
from bp_convert.values.report import Report
from bp_convert.values.shown import looks_of
from bp_convert.values.study import Probe, Sweep


def _text(value: Plan | Report | Probe | Sweep) -> str:
    from bp_convert.render.looks import text

    return text(value)


def _html(value: Plan | Report | Probe | Sweep) -> str:
    from bp_convert.render.looks import html

    return html(value)


looks_of(Plan, Report, Probe, Sweep, text=_text, html=_html)
