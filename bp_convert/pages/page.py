"""A page as a value, what its words mean, and the templates that write it as HTML or Markdown.

What stands on a page, and in which words, is decided where the page is made; how a table, a chart
or a list looks is decided in ``templates/`` alone.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from functools import cache
from typing import ClassVar, Literal, TypeAlias

from jinja2 import Environment, PackageLoader, StrictUndefined

from bp_convert.pages.chart import Bars, Chart

Term = Literal[
    "alpha", "bits", "estimated error", "kept", "low rank", "MAC", "method", "pair", "params",
    "rank R",
    "relative error", "replaced", "saves", "score", "seed", "target", "term",
]  # fmt: skip

MEANING: dict[Term, str] = {
    "alpha": "how much wider than before layers are; a convolution has alpha squared as many "
    "channels",
    "bits": "how weights are stored: int8 as whole numbers of 8 bits with a scale for each row, "
    "int4 and int3 with one for some 32 numbers; where nothing stands, as the source has them",
    "estimated error": "the relative error of the model's output that is expected from the errors "
    "of its layers",
    "kept": "the share of the source's parameters that is left",
    "low rank": "a sum of products of one column and one row, which is a Kronecker sum too; "
    "truncated SVD gives the best one for the weight",
    "MAC": "a multiply-add of one example; 1 MAC = 2 FLOPs",
    "method": "which sums may be chosen: svd is low rank alone, kron all Kronecker sums; with "
    "-data they are fitted to what layers see on examples, not to the weights alone",
    "pair": "how widths are split: a layer of K = k1 x k2 outputs and D = d1 x d2 inputs has the "
    "pair k1xk2|d1xd2 and, in each term, factors of k1 x d1 and k2 x d2 numbers",
    "params": "parameters: the numbers in the weights",
    "rank R": "the number of terms in a weight's sum",
    "relative error": "the length of what is lost over the length of the original, of a weight or, "
    "with examples, of a layer's output: 0 is the same, 1 is nothing left",
    "replaced": "a replaced layer is bilinear now, a widened one is dense in a new width, a kept "
    "one is as it was",
    "saves": "parameters of the layer that fall away at the error that the page names",
    "score": "measured on examples that nothing was fitted to",
    "seed": "of every random start; the same seed gives the same result on the same machine",
    "target": "a limit that the converted model keeps; a number up to 1 is a share of the source's",
    "term": "one Kronecker product of two small factors; a weight is a sum of R of them",
}


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
        loader=PackageLoader("bp_convert.pages"),
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
