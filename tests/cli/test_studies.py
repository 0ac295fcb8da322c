"""The commands probe and sweep on real files."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from torch import nn

import bp_convert
import bp_convert.pipeline
from bp_convert.cli.reading import several
from tests.cli.test_targets import _unforeseen_faults_are_raised as _unforeseen
from tests.cli.test_targets import count, misused, mlp, ok, refused, run, source

__all__ = ["_unforeseen", "mlp"]  # fixtures
VOID = {"meta", "link", "br", "hr", "img", "input"}


class Page(HTMLParser):
    """A page whose tags are closed in order; keeps its words and the numbers of its lines."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.words: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    def named(self, tag: str) -> list[dict[str, str | None]]:
        return [attrs for name, attrs in self.tags if name == tag]


def narrow(text: str) -> None:
    assert text
    assert max(map(len, text.splitlines())) <= 80


# sweep


def test_a_sweep_writes_files_that_reload_and_meet_their_targets(mlp: Path) -> None:
    before = mlp.read_bytes()
    data = ("--calibrate", "d.npz", "--examples", 60, "--evaluate", "d.npz")
    done = ok("sweep", mlp, "--target", "params=0.6,0.3", *data, "-o", "out/all", "--report",
              "s.html", "--report", "s.json", "--report", "s.md")  # fmt: skip
    narrow(done.stdout)
    total = count(source())
    for share in ("0.6", "0.3"):
        path = Path(f"out/all/mlp-params-{share}.pt")
        assert f"wrote {path}" in done.stdout
        small = bp_convert.load(path)
        assert 0.9 * float(share) < count(small) / total <= float(share)
        assert small(torch.randn(2, 48)).shape == (2, 10)
    assert sorted(path.name for path in Path("out/all").iterdir()) == [
        "mlp-params-0.3.pt",
        "mlp-params-0.6.pt",
    ]
    found = json.loads(Path("s.json").read_text())
    points = found["points"]
    assert [(p["target"], p["method"]) for p in points] == [
        ("params=0.6", "kron-data"),
        ("params=0.6", "svd"),
        ("params=0.3", "kron-data"),
        ("params=0.3", "svd"),
    ]
    for point in points:
        assert point["params"] <= float(point["target"].partition("=")[2]) * total
        assert point["score"]["before"] == 1.0
        assert point["score"]["examples"] == 36
        assert bool(point["file"]) == (point["method"] != "svd")
        if point["file"]:
            assert count(bp_convert.load(point["file"])) == point["params"]
    assert found["verdict"] in re.sub(r"\s+", " ", done.stdout)
    marked = [line for line in done.stdout.splitlines() if line.startswith(">")]
    assert len(marked) == 1
    assert points[found["recommended"]]["target"] in marked[0]
    page = Page(Path("s.html").read_text())
    words = " ".join(page.words)
    assert "parameters that are left (logarithmic)" in words
    assert "accuracy" in words
    assert found["verdict"] in words
    charts = len(page.named("svg"))
    assert charts == 4  # accuracy and estimated error, over parameters and multiply-adds
    assert len(page.named("polyline")) == 2 * charts
    assert len(page.named("circle")) == 4 * charts
    assert all(64 < float(dot["cx"] or 0) < 384 for dot in page.named("circle"))
    text = Path("s.md").read_text()
    assert found["verdict"] in text.replace("\\", "")
    assert all(f"| {p['target']} | {p['method']} |" in text for p in points)
    assert mlp.read_bytes() == before


def test_a_sweep_s_data_is_split_like_a_conversion_s(mlp: Path) -> None:
    data = ("--calibrate", "d.npz", "--examples", 60, "--evaluate", "./d.npz")
    ok("sweep", mlp, "--target", "params=0.5", *data, "--report", "s.json", "--no-svd")
    point = json.loads(Path("s.json").read_text())["points"][0]
    ok(mlp, "--target", "params=0.5", *data, "-o", "s.pt", "--report", "r.json")
    report = json.loads(Path("r.json").read_text())
    assert point["score"] == report["scores"][0]
    assert point["params"] == report["plan"]["params"]["after"]
    assert point["error"] == report["plan"]["error"]


def test_ways_of_running_are_asked_for(mlp: Path) -> None:
    whole = ("--target", "params=0.5", "--no-svd")
    for way in ("factored", "expanded"):
        ok("sweep", mlp, *whole, "--ways", way, "-o", way)
        (file,) = Path(way).iterdir()
        assert {one.way for one in bp_convert.plan_of(bp_convert.load(file)).converted} == {way}
        reports = ("--report", "p.json", "--report", "p.html", "--force")
        done = ok("probe", mlp, "--ways", way, *reports)
        rows = json.loads(Path("p.json").read_text())["rows"]
        assert {row["way"] for row in rows} == {way}
        for text in (done.stdout, Path("p.html").read_text()):
            assert ("expanded" in text) == (way == "expanded")
        told = json.loads(ok("inspect", mlp, "--ways", way, "--json").stdout)
        assert told["plan"]["settings"]["ways"] == way


def test_a_count_is_not_rounded() -> None:
    """A limit of seven digits is the limit, not its first six digits."""
    assert [one.value for one in several(["params=1234564,0.5"])] == [1234564, 0.5]


def test_targets_may_be_given_one_by_one_and_twice(mlp: Path) -> None:
    words = ("--target", "params=0.6", "--target", "error=0.5", "--target", "params=0.60")
    found = json.loads(ok("sweep", mlp, *words, "--no-svd", "--json").stdout)
    assert [point["target"] for point in found["points"]] == ["params=0.6", "error=0.5"]
    assert all(point["method"] == "kron" for point in found["points"])
    assert found["calibration"] == ""


def test_a_target_out_of_reach_is_a_row_beside_others(mlp: Path) -> None:
    done = ok("sweep", mlp, "--target", "params=0.6,0.001", "-o", "out", "--report", "s.html")
    assert done.stdout.count("out of reach") == 2
    narrow(done.stdout)
    assert [path.name for path in Path("out").iterdir()] == ["mlp-params-0.6.pt"]
    page = Page(Path("s.html").read_text())
    assert "estimated error" in page.words
    assert len(page.named("svg")) == 2
    assert len(page.named("circle")) == 2 * 2
    refused(run("sweep", mlp, "--target", "params=0.001"), "out of reach", "larger targets")


def test_quiet_prints_the_verdict_alone(mlp: Path) -> None:
    done = ok("sweep", mlp, "--target", "params=0.5", "--quiet", "--no-svd")
    assert len(done.stdout.splitlines()) == 1
    assert "params=0.5" in done.stdout


REFUSED: list[tuple[list[str], list[str]]] = [
    (["sweep", "--target", "params=0.5,"], ["QUANTITY=VALUE"]),
    (["sweep", "--target", "parms=0.5"], ["params=0.25"]),
    (["sweep", "--method", "svd-data"], ["--calibrate"]),
    (["sweep", "--calibrate", "absent.npz"], ["absent.npz"]),
    (["sweep", "--evaluate", "x.npy", "--metric", "top2"], ["labels"]),
    (["sweep", "--report", "s.pdf", "-o", "new"], [".html"]),
    (["sweep", "--report", "old.html", "-o", "new"], ["--force"]),
    (["sweep", "--target", "params=0.5", "-o", "old"], ["--force"]),
    (["probe", "--calibrate", "empty"], ["no image"]),
    (["probe", "--include", "zzz"], ["matches none"]),
    (["probe", "--input", "7"], ["--input"]),
    (["probe", "--report", "p.pdf"], [".html"]),
    (["probe", "--report", "old.html"], ["--force"]),
]


@pytest.mark.parametrize(("words", "says"), REFUSED, ids=lambda x: " ".join(x))
def test_what_cannot_be_done_is_told_and_nothing_is_written(
    mlp: Path, words: list[str], says: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if {"--report", "-o"} & set(words):  # told before any work

        def opened(*_: object, **__: object) -> None:
            pytest.fail("worked")

        monkeypatch.setattr(bp_convert.pipeline, "open_model", opened)
    Path("empty").mkdir()
    Path("old").mkdir()
    Path("old/mlp-params-0.5.pt").write_text("mine")
    Path("old.html").write_text("mine")
    before = sorted(Path.cwd().rglob("*"))
    refused(run(words[0], mlp, *words[1:]), *says)
    assert sorted(Path.cwd().rglob("*")) == before
    assert Path("old.html").read_text() == "mine"
    assert Path("old/mlp-params-0.5.pt").read_text() == "mine"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["probe", "--error", "0"], "between 0 and 1"),
        (["probe", "--error", "1.5"], "between 0 and 1"),
        (["probe", "--examples", "8"], "--calibrate"),
        (["probe", "--tokenizer", "."], "--calibrate"),
        (["sweep", "--metric", "top2"], "--evaluate"),
        (["sweep", "--examples", "8"], "--calibrate"),
        (["sweep", "--examples", "8", "--evaluate", "x.npy"], "--calibrate"),
        (["sweep", "--method", "best"], "kron-data"),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, list) else "",
)
def test_misuse(mlp: Path, words: list[str], says: str) -> None:
    misused(run(words[0], mlp, *words[1:]), says)


# probe


def test_a_probe_sorts_by_savings_and_writes_a_page(mlp: Path) -> None:
    before = mlp.read_bytes()
    words = ("--calibrate", "x.npy", "--error", 0.2)
    reports = [word for form in ("html", "json", "md") for word in ("--report", f"p.{form}")]
    done = ok("probe", mlp, *words, *reports)
    narrow(done.stdout)
    found = json.loads(Path("p.json").read_text())
    saves = [row["saves"] for row in found["rows"]]
    assert len(saves) == 3
    assert saves == sorted(saves, reverse=True)
    assert saves[0] > 0
    assert found["error"] == 0.2
    assert found["calibration"]
    lines = [line.split()[0] for line in done.stdout.splitlines() if re.match(r"\d ", line)]
    assert lines == [row["layer"] for row in found["rows"]]
    page = Page(Path("p.html").read_text())
    assert [one.get("aria-label") for one in page.named("svg")] == ["savings by layer"]
    assert len(page.named("rect")) == 6
    heads = ["layer", "kind", "params", "saves", "50 %", "SVD", "25 %"]
    assert [one for one in page.words if one in heads][: len(heads)] == heads
    assert mlp.read_bytes() == before
    assert sorted(path.name for path in Path.cwd().iterdir()) == [
        "d.npz", "mlp.pt", "p.html", "p.json", "p.md", "x.npy",
    ]  # fmt: skip


def test_kept_layers_stand_last_with_their_reasons(mlp: Path) -> None:
    done = ok("probe", mlp, "--exclude", "2", "--report", "p.html", "--report", "p.json")
    rows = json.loads(Path("p.json").read_text())["rows"]
    assert [row["layer"] for row in rows if row["reason"]] == ["2"]
    assert rows[-1]["reason"] == "excluded"
    assert rows[-1]["errors"] == []
    assert "1 cannot be converted, such as 2: excluded" in done.stdout
    assert "excluded" in Page(Path("p.html").read_text()).words


def test_a_probe_as_json_and_in_one_line(mlp: Path) -> None:
    made = json.loads(ok("probe", mlp, "--json").stdout)
    assert made["shares"] == [0.5, 0.25, 0.1, 0.05]
    assert {row["layer"] for row in made["rows"]} == {"0", "2", "4"}
    done = ok("probe", mlp, "--quiet")
    assert len(done.stdout.splitlines()) == 1
    assert done.stdout.startswith(("At an error of 0.3", "No layer gives up"))


def test_a_converted_file_or_none_is_refused(mlp: Path) -> None:
    for command in ("probe", "sweep"):
        refused(run(command, "absent.pt"), "absent.pt")
    torch.save(nn.Sequential(nn.ReLU()), "relu.pt")
    done = run("probe", "relu.pt")
    assert done.exit_code == 0
    assert "No layer gives up parameters" in done.stdout


def test_help_names_the_options() -> None:
    for command in ("probe", "sweep"):
        text = ok(command, "--help").stdout
        assert "--calibrate" in text
        narrow(text)
