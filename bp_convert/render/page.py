"""A page as a value, and the templates that write it as HTML or Markdown.

What stands on a page, and in which words, is decided where the page is made; how a table, a chart
or a list looks is decided in ``templates/`` alone.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from functools import cache
from typing import ClassVar, TypeAlias

from jinja2 import Environment, PackageLoader, StrictUndefined

from bp_convert.render.chart import Bars, Chart
from bp_convert.render.glossary import MEANING, Term


@dataclass(frozen=True)
class Row:
    """One row of a table.

    Attributes:
        mark: what is special about it, such as ``kept`` or ``failed``.
        link: a folder, relative to the page, that stands behind the last cell's words.
    """

    cells: tuple[str, ...]
    mark: str = ""
    link: str = ""


@dataclass(frozen=True)
class Table:
    """A table.

    Attributes:
        numbers: places of the columns that hold numbers.
    """

    form: ClassVar = "table"
    heads: tuple[str, ...]
    rows: tuple[Row, ...]
    numbers: Set[int] = frozenset()


@dataclass(frozen=True)
class Lines:
    """Lines of text.

    Attributes:
        summary: stands for them until a reader opens them; without it they are always open.
    """

    form: ClassVar = "lines"
    lines: tuple[str, ...]
    summary: str = ""


@dataclass(frozen=True)
class Note:
    """A paragraph."""

    form: ClassVar = "note"
    text: str


Part: TypeAlias = Table | Lines | Note | Bars | Chart


@dataclass(frozen=True)
class Section:
    """Parts under a heading; the first section of a page has none."""

    title: str
    parts: tuple[Part, ...]

    @property
    def pictures(self) -> tuple[Bars | Chart, ...]:
        """The parts that only a page with pictures shows; they stand side by side."""
        return tuple(part for part in self.parts if isinstance(part, Bars | Chart))

    @property
    def texts(self) -> tuple[Table | Lines | Note, ...]:
        """The other parts."""
        return tuple(part for part in self.parts if not isinstance(part, Bars | Chart))


@dataclass(frozen=True)
class Page:
    """A page.

    Attributes:
        verdict: the sentence to remember.
        facts: how it was made: (what, words).
        terms: words that the page uses and explains.
    """

    title: str
    verdict: str
    sections: tuple[Section, ...]
    facts: tuple[tuple[str, str], ...] = ()
    terms: tuple[Term, ...] = ()

    @property
    def meanings(self) -> tuple[tuple[str, str], ...]:
        """Each term with what it means."""
        return tuple((term, MEANING[term]) for term in self.terms)


def html(page: Page) -> str:
    """Return a page that needs nothing but itself."""
    return _templates("html").get_template("page.html").render(page=page)


def markdown(page: Page) -> str:
    """Return the page's text and tables as Markdown."""
    return _templates("md").get_template("page.md").render(page=page)


def fragment(*parts: Table | Lines | Note) -> str:
    """Return parts as HTML to stand in another page, such as a notebook."""
    return _templates("html").get_template("fragment.html").render(parts=parts)


@cache
def _templates(form: str) -> Environment:
    """Return the templates of a form; whatever they are given is escaped for it."""
    return Environment(
        loader=PackageLoader("bp_convert.render"),
        autoescape=form == "html",
        finalize=_escaped if form == "md" else None,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=StrictUndefined,
    )


def _escaped(text: object) -> str:
    """Return text in which Markdown reads no marks."""
    said = str(text)
    for special in "\\`|*_[]<":
        said = said.replace(special, f"\\{special}")
    return said
