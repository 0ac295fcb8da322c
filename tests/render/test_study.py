"""Probes and sweeps as people read them."""

from __future__ import annotations

import io
import re
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console, RenderableType

from bp_convert.pages.documents import document
from bp_convert.pages.page import MEANING
from bp_convert.render.study_table import ROWS, probe_verdict, shown_probe, shown_sweep
from bp_convert.values.factors import FactorSpec
from bp_convert.values.report import Score
from bp_convert.values.settings import Settings
from bp_convert.values.study import Point, Probe, ProbeRow, Sweep
from tests.cli.test_studies import Page

LONG = "encoder.layers.encoder_layer_11.self_attention.in_projection"


def _text(what: RenderableType, width: int = 80) -> str:
    stream = io.StringIO()
    Console(file=stream, width=width).print(what)
    return stream.getvalue()


def _html(found: Probe | Sweep) -> str:
    return document(found, Path("x.html"))


def _row(layer: str, saves: int = 200_000, **change: Any) -> ProbeRow:
    fields: dict[str, Any] = {
        "layer": layer,
        "kind": "Linear",
        "shape": (512, 512),
        "params": 262_144,
        "errors": (0.121, 0.304, 0.507, None),
        "svd": (0.221, 0.304, None, None),
        "best": FactorSpec(out=(16, 32), inp=(16, 32), rank=128),
        "saves": saves,
    }
    return ProbeRow(**{**fields, **change})


def _kept(layer: str, reason: str) -> ProbeRow:
    return ProbeRow(layer=layer, kind="Conv2d", params=100, reason=reason)


def _probe(*rows: ProbeRow, **change: Any) -> Probe:
    fields: dict[str, Any] = {"shares": (0.5, 0.25, 0.1, 0.05), "error": 0.3}
    return Probe(model="some.where.Net", rows=rows, **{**fields, **change})


def _point(share: float, method: str = "kron", after: float | None = 0.7, **change: Any) -> Point:
    score = (
        None
        if after is None
        else Score(
            metric="accuracy", before=0.75, after=after, higher_is_better=True, examples=2000
        )
    )
    fields: dict[str, Any] = {
        "target": f"params={share:g}",
        "params": int(11_700_000 * share),
        "share": share,
        "macs_share": share,
        "error": 0.123456,
        "score": score,
    }
    return Point(method=method, **{**fields, **change})


def _sweep(*points: Point, **change: Any) -> Sweep:
    fields: dict[str, Any] = {"params": 11_700_000, "verdict": "Take this.", "recommended": 0}
    return Sweep(model="some.where.Net", points=points, **{**fields, **change})


# probe


@pytest.mark.parametrize("every", [False, True])
def test_a_probe_fits_eighty_columns_and_folds_its_end(every: bool) -> None:
    rows = [
        _row(f"{LONG}.{i}", role="hh_l0", best=FactorSpec(out=(4096, 1), inp=(1, 25088), rank=880))
        for i in range(ROWS + 7)
    ]
    probe = _probe(*rows, _kept(LONG, f"it is reached by {LONG} and {LONG}"), calibration=LONG * 2)
    text = _text(shown_probe(probe, every=every))
    assert max(map(len, text.splitlines())) <= 80
    assert ("and 7 more layers (--verbose)" in text) is not every
    assert text.count("262k") >= ROWS + 7 * every
    assert "1 cannot be converted" in text
    assert "output on" in text


def test_a_probe_s_table_names_errors_and_pairs() -> None:
    probe = _probe(_row("body"), _row("tail", best=FactorSpec(out=(512, 1), inp=(1, 512), rank=64)))
    line, tail = (
        next(one for one in _text(shown_probe(probe)).splitlines() if one.startswith(name))
        for name in ("body", "tail")
    )
    assert line.split()[1:7] == ["262k", "200k", ".12/.22", ".30", ".51/-", "-"]
    assert "low rank 64" in tail
    assert "error of the weight" in _text(shown_probe(probe))


def test_a_probe_s_verdict_is_a_sum() -> None:
    words = probe_verdict(_probe(_row("a", 150_000), _row("b", 50_000), _kept("c", "why")))
    assert "38 % of 524k" in words
    assert "75 % of that in a" in words
    assert probe_verdict(_probe(_row("a", 0))).startswith("No layer gives up parameters")
    assert probe_verdict(_probe()).startswith("No layer gives up parameters")


def test_a_probe_s_page_has_all_layers_and_bars_to_scale() -> None:
    rows = [_row("a<b>", 131_072), _row("b", 0, params=131_072), _kept("c", "<it> & more")]
    page = Page(_html(_probe(*rows)))
    words = " ".join(page.words)
    assert "a<b>" in words  # escaped in the source, as it is on the page
    assert "<it> & more" in words
    assert "0.304" in words
    bars = [float(bar["width"] or 0) for bar in page.named("rect")]
    assert bars == [340, 170, 170, 170]
    heads = [word for word in page.words if word in ("layer", "kind", "saves", "50 %", "SVD")]
    assert heads[:5] == ["layer", "kind", "saves", "50 %", "SVD"]
    cells = len(page.named("th"))
    assert len(page.named("td")) == 3 * cells
    assert Page(_html(_probe())).named("svg") == []


# sweep


def test_a_sweep_fits_eighty_columns_and_marks_the_recommended() -> None:
    points = [
        _point(0.5),
        _point(0.5, "svd-data", target="size=1.23457e+06", params=123_456_789),
        Point(target="params=0.001", method="kron-data", out_of_reach="1 of 2 is out of reach"),
    ]
    text = _text(shown_sweep(_sweep(*points, calibration=LONG * 3, recommended=1)))
    lines = text.splitlines()
    assert max(map(len, lines)) <= 80
    assert next(line for line in lines if line.startswith(">")).split()[1] == "size=1.23457e+06"
    assert "out of reach" in text
    assert "70.00 %" in text
    assert "75.00 %" in text
    assert "2,000 examples" in text
    assert "Take this." in text


def test_a_sweep_without_scores_says_none() -> None:
    text = _text(shown_sweep(_sweep(_point(0.5, after=None), recommended=None)))
    assert "the source" not in text
    assert "0.123" in text
    assert not any(line.startswith(">") for line in text.splitlines())


def _dots(page: Page) -> list[tuple[float, float]]:
    return [(float(dot["cx"] or 0), float(dot["cy"] or 0)) for dot in page.named("circle")]


def test_a_chart_has_labelled_axes_and_points_in_order() -> None:
    page = Page(_html(_sweep(_point(0.5, after=0.74), _point(0.1, after=0.4))))
    assert "parameters that are left (logarithmic)" in page.words
    assert "source" in page.words
    axes = [attrs for attrs in page.named("text") if "rotate" in (attrs.get("transform") or "")]
    assert len(axes) == 4  # accuracy and estimated error, over parameters and multiply-adds
    assert page.words.count("accuracy (%)") == 2
    assert page.words.count("estimated error") == 3  # explained besides
    for tick in ("10 %", "20 %", "50 %", "100 %"):
        assert tick in page.words
    small, large = _dots(page)[:2]
    assert small[0] < large[0]
    assert small[1] > large[1]  # a worse point lies lower
    assert [one.get("class") for one in page.named("tr")].count("chosen") == 1
    plain = Page(_html(_sweep(_point(0.5, after=None), _point(0.1, after=None, error=0.9))))
    assert "accuracy (%)" not in plain.words
    assert plain.words.count("estimated error") == 3
    assert "source" not in plain.words


@pytest.mark.parametrize(
    "points",
    [
        (_point(1.0),),
        (_point(0.5, after=0.75),),
        (_point(0.5), Point(target="params=0.1", method="kron", out_of_reach="why")),
        (_point(0.004), _point(0.0005, "svd")),
        (_point(1.02), _point(0.5, after=0.0)),
        (_point(0.5, after=None, error=0.0), _point(0.25, after=None, error=0.0)),
        (_point(0.5, after=None, error=None),),
        (_point(0.5, after=float("inf")), _point(0.7, after=0.9)),
        (_point(0.5, after=float("inf")),),
    ],
)
def test_every_chart_stays_in_its_frame(points: tuple[Point, ...]) -> None:
    page = Page(_html(_sweep(*points)))
    written = " ".join(value or "" for _, attrs in page.tags for value in attrs.values())
    assert not re.search(r"\b(nan|inf)\b", written)
    for x, y in _dots(page):
        assert 64 <= x <= 384
        assert 12 <= y <= 232


def test_what_a_model_brings_is_escaped() -> None:
    text = _html(_sweep(_point(0.5), verdict="<b>", calibration="<i>x</i>"))
    assert "<b>" not in text
    assert "<i>" not in text
    assert "&lt;b&gt;" in text


def test_a_page_says_how_it_was_made_and_what_its_words_mean() -> None:
    made = {"settings": Settings(exclude=("a_b",), seed=7), "machine": "CPU <x>, 2 threads",
            "versions": {"torch": "2.14"}}  # fmt: skip
    for found in (_sweep(_point(0.5), **made), _probe(_row("a"), **made)):
        for form in ("html", "md"):
            text = document(found, Path(f"x.{form}"), "bp-convert probe m.pt --seed 7")
            plain = unescape(text).replace("\\", "")
            for words in ("probe m.pt --seed 7", "CPU <x>, 2 threads", "exclude a_b", "torch 2.14"):
                assert words in plain, (words, form)
            assert MEANING["relative error"] in plain
    assert "How it was made" not in document(_probe(_row("a")), Path("x.md"))


def test_a_study_as_markdown_has_its_table_and_reasons() -> None:
    missed = Point(target="params=0.1", method="kron", out_of_reach="1 of 2 | 3")
    text = document(_sweep(_point(0.5), missed), Path("x.md"))
    assert "| params=0.5 | kron | 5.85M | 50.00 % | 50 % | 0.123 | 70.00 % |" in text
    assert "- params=0.1, kron: 1 of 2 \\| 3" in text
    assert "<" not in text
    text = document(_probe(_row("a|b"), _kept("c", "why_not")), Path("x.md"))
    assert "| a\\|b | Linear | 262k | 200k | 0.121 | 0.221 |" in text
    assert "why\\_not |" in text
