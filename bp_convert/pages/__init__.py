"""Plans and reports as documents: pages of HTML and Markdown, their pictures, JSON.

Importing it gives plans, reports, probes and sweeps their looks.
"""

from __future__ import annotations

from typing import Any

from bp_convert.values.base import LOOKS


def _text(value: Any) -> str:
    from bp_convert.pages.documents import text

    return text(value)


def _html(value: Any) -> str:
    from bp_convert.pages.documents import piece

    return piece(value)


LOOKS.update(text=_text, html=_html)
