"""The summary of a recipe, in all its forms."""

from __future__ import annotations

import csv
import io
import json
from xml.etree import ElementTree

import pytest
from rich.console import Console

from bp_convert.pages.batch import Board, document, shown, shown_estimates
from bp_convert.render.batch_cells import over_seeds, verdict
from bp_convert.values.outcome import Estimate, Outcome, Summary
from bp_convert.values.plan import Totals
from bp_convert.values.recipe import Figures
from bp_convert.values.report import Score
from bp_convert.values.training import Trained


def score(after: float, before: float = 0.92) -> Score:
    return Score(
        metric="accuracy", before=before, after=after, higher_is_better=True, examples=10_000
    )


def job(name: str, params: int, after: float, **keys: object) -> Outcome:
    given = {"alpha": 1.0, "rank": 1, "init": "warm", "counterpart": "", "method": "auto", **keys}
    return Outcome(
        name=name,
        identity="0" * 20,
        keys=given,
        model="svgg",
        params=Totals(before=2_589_194, after=params),
        macs=Totals(before=47_800_000, after=9_000_000),
        bytes=Totals(before=10_000_000, after=4 * params),
        converted=score(0.1),
        score=score(after),
        trained=Trained(steps=4220, examples=540_160, seconds=600.0),
        seconds=612.0,
        folder=f"jobs/{name}",
    )


def summary() -> Summary:
    jobs = [
        job("full", 2_589_194, 0.921, counterpart="full").model_copy(
            update={"paper": Figures(score=82.9, params=2_589_194, source="table 3")}
        ),
        *(
            job(f"scratch-alpha={a}", p, s, alpha=float(a), init="random").model_copy(
                update={"paper": Figures(score=68.5 + 5 * a, params=p, source="table 3")}
            )
            for a, p, s in ((1, 18_798, 0.78), (2, 50_418, 0.86), (3, 88_726, 0.905))
        ),
        job("from-trained-params=0.1", 258_000, 0.917, target="params=0.1"),
        job("low-rank", 88_000, 0.88, counterpart="low-rank", alpha=3.0),
        job("pruned", 87_441, 0.87, counterpart="pruned", alpha=3.0),
        Outcome(name="=broken <job>", state="failed", problem="model.pt: <no> such file & more"),
        Outcome(name="later", state="waiting"),
    ]
    return Summary(name="fashion-svgg", about="A <study>.", recipe="f.yaml", jobs=tuple(jobs))


def test_the_page_is_whole_and_shows_everything() -> None:
    page = document(summary(), "html")
    body = page.partition("</style></head>")[2].removesuffix("</html>\n")
    for number in range(page.count("<svg")):
        start = page.split("<svg")[number + 1]
        ElementTree.fromstring("<svg" + start.partition("</svg>")[0] + "</svg>")
    assert page.count("<svg") == 2
    for words in (
        "parameters (logarithmic)",
        ">alpha</text>",
        "accuracy (%)",
        "Against the paper",
        "7 of 9 jobs done, 1 failed",
        "=broken &lt;job&gt;",
        "&lt;no&gt; such file &amp; more",
        '<a href="jobs/low-rank/">',
        "+9.2",  # 92.1 measured, 82.9 printed
        "+4.5",  # 78.0 measured, 73.5 printed
    ):
        assert words in body, words
    assert "<script" not in page
    assert "http" not in page.replace("http://www.w3.org", "")


def test_metrics_share_neither_axis_nor_column() -> None:
    cosine = Score(metric="cosine", before=1, after=0.9, higher_is_better=True, examples=9)
    other = job("minilm", 10_000, 0.5).model_copy(update={"model": "minilm", "score": cosine})
    both = Summary(name="both", jobs=(job("svgg", 20_000, 0.8), other))
    page = document(both, "html")
    for words in (">accuracy (%)</text>", ">cosine</text>", "quality: cosine", "score, full"):
        assert words in page, words
    assert "accuracy, full" not in page
    assert "| minilm | 10.0k |" in document(both, "md")
    assert "| cosine | 1 |" in document(both, "md")


def test_a_summary_as_markdown_leads_to_the_jobs() -> None:
    text = document(summary(), "md")
    assert "[jobs/low-rank](<jobs/low-rank/>) |" in text
    assert "model.pt: \\<no> such file & more" in text
    assert "bp-convert recipe run f.yaml" in text
    assert "<svg" not in text


def test_a_summary_of_nothing_is_a_page_too() -> None:
    empty = Summary(name="none", jobs=(Outcome(name="one", state="waiting"),))
    page = document(empty, "html")
    assert "0 of 1 job done, 1 not run." in page
    assert "<svg" not in page


def test_infinite_scores_are_in_the_table_and_not_in_the_picture() -> None:
    bad = job("bad", 10, 0.5).model_copy(
        update={
            "score": Score(
                metric="perplexity",
                before=20.0,
                after=float("inf"),
                higher_is_better=False,
                examples=3,
            )
        }
    )
    made = Summary(name="one", jobs=(bad,))
    assert ">inf<" in document(made, "html")
    assert "<svg" not in document(made, "html")
    assert Summary.model_validate_json(document(made, "json")) == made


def test_the_table_of_values_has_a_row_a_job_and_no_formulas() -> None:
    rows = list(csv.DictReader(io.StringIO(document(summary(), "csv"))))
    assert [row["state"] for row in rows] == ["done"] * 7 + ["failed", "waiting"]
    assert rows[7]["name"] == "'=broken <job>"
    assert rows[1]["params"] == "18798"
    assert rows[1]["paper_score"] == "73.5"
    assert float(rows[3]["score"]) == 0.905


def test_json_gives_the_same_summary_back() -> None:
    assert Summary.model_validate(json.loads(document(summary(), "json"))) == summary()


def _drawn(what: object) -> list[str]:
    console = Console(width=80, file=io.StringIO(), height=24)
    console.print(what)
    text = console.file
    assert isinstance(text, io.StringIO)
    return text.getvalue().splitlines()


def test_terminal_views_keep_to_80_columns() -> None:
    lines = _drawn(shown(summary()))
    assert all(len(line) <= 80 for line in lines)
    assert not any("…" in line for line in lines if "alpha=" in line), lines
    assert any("88.7k" in line and "90.50 %" in line for line in lines)
    plans = [
        Estimate(
            name="from-trained-params=0.0343",
            what="low-rank like alpha 3, afresh",
            params=Totals(before=2_589_194, after=88_726),
            macs=Totals(before=47_800_000, after=61_300_000),
            steps=(4220, 4220),
            training_macs=1e15,
            seconds=4000.0,
        ),
        Estimate(name="gone", problem="study.yaml, line 3: nothing at model.pt. To do: look"),
    ]
    lines = _drawn(shown_estimates("study", plans))
    assert all(len(line) <= 80 for line in lines)
    text = "\n".join(lines)
    for whole in (
        "88.7k",
        "3.4%",
        "61.3M",
        "8.44k",
        "1:06:40",
        "cannot run",
        "nothing at model.pt",
    ):
        assert whole in text, text


def test_the_board_fits_a_terminal_with_many_jobs() -> None:
    names = [f"job-{n}" for n in range(60)]
    board = Board(names)
    for name in names[:50]:
        board.started(name)
        board.ended(job(name, 18_798, 0.9))
    board.ended(Outcome(name="job-50", state="failed", problem="out of memory " * 9))
    board.started("job-51")
    board.progressed("job-51", "training with a rather long description", 120, 4000)
    lines = _drawn(board)
    assert len(lines) <= 24
    assert all(len(line) <= 80 for line in lines)
    text = "\n".join(lines)
    assert "50 done, 1 running, 8 waiting, 1 failed" in text
    assert "job-50" in text
    assert "120/4000" in text


def test_jobs_of_several_seeds_are_one_row_with_mean_and_spread() -> None:
    jobs = [
        job(f"scratch-alpha={a}-seed={seed}", 18_798, s, alpha=float(a), seed=seed)
        for a, seed, s in ((1, 0, 0.80), (1, 1, 0.84), (2, 0, 0.9), (2, 1, 0.9))
    ]
    jobs += [job("once", 88_000, 0.7), Outcome(name="later-seed=2", state="waiting")]
    found = over_seeds(jobs)
    assert [one.name for one in found] == ["scratch-alpha=1", "scratch-alpha=2", "once"]
    assert [len(one.jobs) for one in found] == [2, 2, 1]
    assert found[0].mean == pytest.approx(0.82)
    assert found[0].spread == pytest.approx(0.0283, abs=1e-4)
    assert found[2].spread is None
    whole = Summary(name="s", jobs=tuple(jobs))
    assert "<h2>Over seeds</h2>" in document(whole, "html")
    assert "82.00 %" in document(whole, "html")
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(shown(whole))
    text = console.export_text()
    assert "over seeds" in text
    assert all(len(line) <= 80 for line in text.splitlines())
    assert "Over seeds" not in document(summary(), "html")


def test_long_names_give_way_and_numbers_stay_whole() -> None:
    name = "scratch-with-a-name-that-nobody-would-want-to-type-seed=1"
    full = job(name, 2_588_618, 0.9176).model_copy(update={"seconds": 2254.8})
    lines = _drawn(shown(Summary(name="s", jobs=(full, Outcome(name="later", state="waiting")))))
    row = next(line for line in lines if "seed=1" in line)
    assert len(row) <= 80
    assert row.count("…") == 1, row
    assert all(cell in row.split() for cell in ("2.59M", "91.76", "37:34"))
    assert any("waiting" in line for line in lines)


def test_other_jobs_are_not_put_together() -> None:
    one, two = job("a-seed=0", 10, 0.5, alpha=1.0), job("a-seed=1", 10, 0.6, alpha=2.0)
    assert over_seeds([one, two]) == []
    assert over_seeds([job("a-seed=0", 10, 0.5), job("b-seed=0", 10, 0.6)]) == []


def test_the_verdict_counts() -> None:
    assert verdict(summary()).startswith("7 of 9 jobs done, 1 failed (such as =broken <job>: ")
    assert verdict(summary()).endswith("), 1 not run.")
