"""Reports as people read them: the width of the table, the words of the verdict, escaping."""

from __future__ import annotations

import io
import json
from html import unescape
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from rich.console import Console

from bp_convert.pages import documents
from bp_convert.pages.documents import document
from bp_convert.pages.page import MEANING
from bp_convert.render import words
from bp_convert.render.fold import common, fold, middle, wrapped
from bp_convert.render.numbers import change, percent, short, size
from bp_convert.render.summary import verdict
from bp_convert.render.terminal import rendered
from bp_convert.render.words import kept, notes
from bp_convert.values.base import as_json
from bp_convert.values.factors import FactorSpec
from bp_convert.values.plan import LayerPlan, OtherWeights, Plan, Totals, Tried
from bp_convert.values.report import Latency, Report, Score, Verification
from bp_convert.values.settings import Settings

SPEC = FactorSpec(out=(16, 32), inp=(16, 32), rank=2)


def _layer(name: str, **change: Any) -> LayerPlan:
    fields: dict[str, Any] = {
        "name": name,
        "kind": "Linear",
        "action": "replaced",
        "inputs": (512, 512),
        "outputs": (512, 512),
        "factors": {"weight": SPEC},
        "params": (262_656, 3_072),
        "macs": (262_144, 40_960),
    }
    return LayerPlan(**{**fields, **change})


def _kept(name: str, reason: str) -> LayerPlan:
    return _layer(name, action="kept", reason=reason, factors={}, params=(262_656, 262_656))


def _report(
    *layers: LayerPlan, error: float | None = 0.5, others: Any = (), **change: Any
) -> Report:
    """Return a report of these layers; ``error`` is the fit error of each that is replaced."""
    before, after = (sum(layer.params[at] for layer in layers) for at in (0, 1))
    plan = Plan(
        model="torchvision.models.resnet.ResNet",
        fingerprint="",
        settings=Settings(),
        inputs=(),
        layers=layers,
        others=others,
        params=Totals(before=before, after=after),
        macs=Totals(before=10**9, after=10**8),
        bytes=Totals(before=4 * before, after=4 * after),
    )
    plan = plan.model_copy(update=change.pop("plan", {}))
    errors = {} if error is None else {one.name: error for one in plan.converted}
    return Report(plan=plan, **{"fit_errors": errors, **change})


def _checked(error: float, examples: int = 64) -> Verification:
    return Verification(
        ran_eval=True, ran_train=True, gradients=True, source_untouched=True, output_error=error,
        examples=examples, on="calibration data" if examples else "random input",
    )  # fmt: skip


def html(report: Report) -> str:
    return document(report, Path("x.html"))


def markdown(report: Report) -> str:
    return document(report, Path("x.md"))


def _text(report: Report, width: int = 80, **how: Any) -> str:
    stream = io.StringIO()
    Console(file=stream, width=width).print(rendered(report, **how))
    return stream.getvalue()


def test_numbers() -> None:
    counts = (0, 999, 1_000, 12_345, 999_999, 4.56e6, 1.2e9)
    assert [short(n) for n in counts] == ["0", "999", "1.00k", "12.3k", "1000k", "4.56M", "1.20G"]
    assert size(46_796_608) == "46.8 MB"
    assert size(12) == "12 B"
    assert [percent(x) for x in (0, 0.025, 0.74)] == ["0.0 %", "2.5 %", "74 %"]
    assert percent(0.0001) == "less than 0.1 %"
    assert change(Totals(before=4, after=1)) == "75 % less"
    assert change(Totals(before=4, after=6)) == "50 % more"
    assert change(Totals(before=4, after=4)) == "unchanged"


@pytest.mark.parametrize(("error", "said"), [(0.2, "the best of 2"), (0.3, "none beats by more")])
def test_what_is_taken_is_called_the_best_only_where_it_is(error: float, said: str) -> None:
    tried = Tried(words="as measured", error=error, taken=True), Tried(words="alike", error=0.25)
    line, other = words.fitting(_report(plan={"tried": tried, "error": None}))
    assert said in line
    assert line.endswith(f": as measured, {error:g}")
    assert other == "  alike, 0.25"


def test_names_fold_by_their_numbers_and_shorten_in_the_middle() -> None:
    assert common(["layer1.0.conv1", "layer1.1.conv1"]) == "layer1.{0-1}.conv1"
    assert common(["a"]) == "a"
    short_name = middle("encoder.layers.encoder_layer_11.self_attention", 20)
    assert len(short_name) == 20
    assert short_name.startswith("encoder")
    assert short_name.endswith("attention")


def test_a_long_name_goes_on_in_the_next_line() -> None:
    name = "encoder.layer.{0-5}.attention.output.dense x6"
    assert wrapped(name, 24).splitlines() == [
        "encoder.layer.{0-5}.",
        " attention.output.",
        " dense x6",
    ]
    assert wrapped(name, 45) == name
    for width in range(2, 50):
        lines = wrapped(name, width).splitlines()
        assert max(map(len, lines)) <= width
        assert lines[0] + "".join(line[1:] for line in lines[1:]) == name


def test_a_wide_terminal_keeps_names_in_one_line() -> None:
    name = "encoder.layers.encoder_layer_11.self_attention.projection"
    assert name not in _text(_report(_layer(name)))
    assert name in _text(_report(_layer(name)), width=120)


def test_layers_that_fare_alike_share_a_row() -> None:
    layers = (
        _layer("blocks.0.fc"),
        _layer("blocks.1.fc"),
        _layer("blocks.2.fc", params=(5, 3_072)),
        _kept("blocks.3.fc", "excluded"),
    )
    rows = fold(_report(*layers, fit_errors={"blocks.0.fc": 0.5, "blocks.1.fc": 0.7}))
    assert [(row.name, row.count) for row in rows] == [
        ("blocks.{0-1}.fc", 2),
        ("blocks.2.fc", 1),
        ("blocks.3.fc", 1),
    ]
    assert rows[0].params == (2 * 262_656, 2 * 3_072)
    assert rows[0].errors == (0.5, 0.7)


@pytest.mark.parametrize("every", [False, True])
def test_the_table_fits_eighty_columns(every: bool) -> None:
    layers = [
        _layer(f"encoder.layers.encoder_layer_{i}.self_attention.projection", kind="Embedding",
               factors={"weight": FactorSpec(out=(4096, 1), inp=(1, 25088), rank=880)})
        for i in range(300)
    ]  # fmt: skip
    report = _report(*layers, _kept("a.b", "prime width 509 has no factor pair"),
                     verification=_checked(0.3))  # fmt: skip
    text = _text(report, every=every)
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text
    column = text.splitlines()[1].index("kind")
    names = "".join(line[:column].strip() for line in text.splitlines())
    for i in range(300) if every else ["{0-299}"]:
        assert f"encoder.layers.encoder_layer_{i}.self_attention.projection" in names
    assert "params" in text
    assert "error" in text
    assert "prime width 509" in text


def test_user_text_is_not_markup() -> None:
    text = _text(_report(_layer("blocks[0].fc[/]"), plan={"model": "a.[bold]Net"}))
    assert "[bold]Net" in text
    assert "blocks[0].fc[/]" in text


def test_html_escapes_and_stands_alone() -> None:
    page = html(_report(_layer("<script>alert(1)</script>"), source="a & b"))
    assert "<script>" not in page
    assert "a &amp; b" in page
    assert "http" not in page
    assert page.count("<tr") > 5


def test_a_report_says_how_it_was_made_and_what_its_words_mean() -> None:
    asked = Settings(target=("params=0.25",), exclude=("<fc>",), seed=7)
    report = _report(_layer("a"), plan={"settings": asked}, machine="CPU, 2 threads",
                     versions={"torch": "2.14"}, seconds=75.0)  # fmt: skip
    for form in ("html", "md"):
        text = document(report, Path(f"r.{form}"), "bp-convert 'my model.pt' --seed 7")
        plain = unescape(text).replace("\\", "")
        for said in ("my model.pt", "target params=0.25; exclude <fc>", "CPU, 2 threads",
                      "torch 2.14", "1:15", MEANING["rank R"], MEANING["target"]):  # fmt: skip
            assert said in plain, (said, form)
        assert MEANING["score"] not in plain  # nothing was scored
    assert "all defaults" in html(_report(_layer("a")))


def test_times_have_a_picture_where_they_were_measured() -> None:
    page = html(_report(_layer("a"), latency=(_latency(80, 40),)))
    assert 'aria-label="milliseconds an example, dense and converted"' in page
    assert ">batch 32</text>" in page
    assert ">2.5 ms</text>" in page
    assert "milliseconds" not in html(_report(_layer("a"))).lower()


def test_a_report_stands_in_a_notebook() -> None:
    text = documents.piece(_report(_layer("blocks.0.<fc>"), _layer("blocks.1.<fc>")))
    assert text.count("<table>") == text.count("</table>") == 2
    assert "blocks.{0-1}.&lt;fc&gt; x2" in text
    assert "<html" not in text


def test_markdown_keeps_its_tables() -> None:
    text = markdown(_report(_layer("a_b"), _kept("c", "excluded"), _layer("<b>`[x](y)")))
    assert "\\<b>\\`\\[x\\](y)" in text
    assert "| c | Linear | kept | excluded |" in text
    table = [line for line in text.splitlines() if line.startswith("| a")]
    assert table == [
        "| a\\_b | Linear | replaced | 16x32\\|16x32 | 2 | 263k | 3.07k | 262k | 41.0k | 0.500 |"
    ]


def test_reasons_and_notes_are_counted() -> None:
    slow = "would be slower than the dense layer (predicted 3.{}x its time)"
    report = _report(
        _kept("a", slow.format(1)),
        _kept("b", slow.format(2)),
        _layer("c", notes=("starts from noise: as asked",)),
    )
    assert kept(report) == [(2, "would be slower than the dense layer", "a")]
    assert notes(report) == ["1 layer from noise, as asked"]


def _norms(count: int) -> tuple[OtherWeights, ...]:
    norm = {"kind": "LayerNorm", "reason": "no kind", "params": (1536, 1536)}
    return (
        *(OtherWeights(name=f"blocks.{i}.norm", **norm) for i in range(count)),
        OtherWeights(name="", kind="<Net>", reason="bare parameter", params=(1, 1)),
    )


def test_weights_without_a_kind_stand_in_every_report() -> None:
    report = _report(_layer("a"), others=_norms(50))
    line = "50 LayerNorm: 76,800 parameters, 29 %: no kind"
    assert line in _text(report)
    assert line in markdown(report)
    assert line in html(report)
    assert "1 <Net>: 1 parameter, less than 0.1 %: bare parameter" in _text(report)
    assert "blocks.17.norm" not in _text(report)
    one = "blocks.17.norm: LayerNorm: 1,536 parameters, 0.6 %: no kind"
    assert one in _text(report, every=True)
    assert one in html(report)
    assert "the model itself: &lt;Net&gt;: 1 parameter" in html(report)
    made = json.loads(document(report, Path("r.json")))
    assert len(made["plan"]["others"]) == 51
    assert made["plan"]["others"][0]["name"] == "blocks.0.norm"
    assert "without a kind" not in _text(_report(_layer("a"))).lower()


def test_many_classes_without_a_kind_are_summed_up() -> None:
    others = tuple(
        OtherWeights(name=f"m{i}", kind=f"Class{i}", reason="no kind", params=(100 - i, 100 - i))
        for i in range(15)
    )
    lines = words.others(_report(_layer("a"), others=others))
    assert len(lines) == 13
    assert lines[0].startswith("1 Class0: 100 parameters")
    assert lines[-1] == "3 further classes: 261 parameters, less than 0.1 %"


def test_nothing_converted_says_what_holds_the_weights() -> None:
    gru = OtherWeights(name="g", kind="GRU", reason="no kind", params=(262_656, 262_656))
    report = _report(_kept("a", "excluded"), others=(gru,))
    assert "these stay as they are: 1 GRU (100 % of the parameters)." in verdict(report)


def test_a_long_reason_hangs_under_itself() -> None:
    reason = "its width is fixed by line 17 of the model's forward, which reshapes to 3 x 4 x 5 x 6"
    lines = _text(_report(_layer("a"), _kept("b", reason))).splitlines()
    start = next(place for place, line in enumerate(lines) if reason[:20] in line)
    indent = lines[start].index(reason[:20])
    assert lines[start + 1][:indent].isspace()
    assert lines[start + 1][indent:].rstrip().endswith("[b]")


def test_the_verdict_for_each_case() -> None:
    def said(*layers: LayerPlan, **change: Any) -> str:
        return verdict(_report(*layers, **change))

    assert "train it before use" in said(_layer("a"), error=0.99, verification=_checked(0.9))
    assert "Rank 2 keeps 2.0 %" in said(_layer("a"), error=0.99, verification=_checked(0.9))
    assert "usable as it is" in said(_layer("a"), error=0.01, verification=_checked(0.001))
    assert "check its accuracy" in said(_layer("a"), error=0.1, verification=_checked(0.05))
    noise = _layer("a", notes=("starts from noise: as asked",))
    assert "starts from noise: train it" in said(noise, error=None, verification=_checked(1.0))
    assert said(_layer("a")).startswith("Saved 99 % of the parameters (263k to 3.07k)")
    assert said(_layer("a", params=(262_656, 10**6))).startswith("Grew by")
    assert said(_layer("a", params=(262_656, 262_656))).startswith("The same number of parameters")
    assert "was not measured" in said(_layer("a"), error=None)
    slow = _layer("a", notes=("slower than the dense layer",))
    assert "1 layer is expected to be slower" in said(slow)
    assert "2 layers are expected to be slower" in said(slow, slow)
    nothing = said(_kept("a", "would be slower than the dense layer"))
    assert nothing.startswith("Nothing was converted; 1 of 1 layers")
    assert "--convert-anyway" in nothing
    assert "--target" in nothing
    assert "--calibrate" in nothing
    target = {"settings": Settings(target=("params=0.5",))}  # type: ignore[arg-type]
    assert "--target" not in said(_kept("a", "excluded"), plan=target)
    assert "no layer of a known kind" in said()


@pytest.mark.parametrize(
    ("examples", "words"),
    [
        (0, "on random input: that is no measure of its quality"),
        (1, "on 1 example of calibration data: too few for a verdict"),
        (15, "on 15 examples of calibration data: too few for a verdict"),
        (16, "on 16 examples of calibration data: usable as it is."),
    ],
)
def test_no_verdict_from_a_handful(examples: int, words: str) -> None:
    for gap in (2e-4, 0.003, 0.009):
        said = verdict(_report(_layer("a"), error=0.01, verification=_checked(gap, examples)))
        assert words in said
        assert ("usable" in said) == (examples == 16)
        assert ("--evaluate" in said) == (examples < 16)
    middling = verdict(_report(_layer("a"), verification=_checked(0.05, examples)))
    assert ("check its accuracy" in middling) == (examples == 16)
    bad = verdict(_report(_layer("a"), verification=_checked(0.5, examples)))
    assert bad.endswith("train it before use.")


@pytest.mark.parametrize("examples", [3, 15, 16, 2000])
def test_no_verdict_from_a_handful_of_scores(examples: int) -> None:
    score = Score(
        metric="accuracy", before=1.0, after=1.0, higher_is_better=True, examples=examples
    )
    said = verdict(_report(_layer("a"), scores=(score,)))
    assert ("usable as it is" in said) == (examples >= 16)
    assert ("too few for a verdict" in said) == (examples < 16)


@pytest.mark.parametrize("gap", [float("nan"), float("inf")])
def test_outputs_that_are_not_finite_are_said_so(gap: float) -> None:
    report = _report(_layer("a"), verification=_checked(gap))
    assert "outputs are not finite on 64 examples" in verdict(report)
    assert "usable" not in verdict(report)
    assert "nan %" not in verdict(report) + _text(report)
    assert "inf %" not in verdict(report) + _text(report)


@pytest.mark.parametrize("odd", [float("nan"), float("inf"), float("-inf")])
def test_json_holds_finite_numbers_only(odd: float) -> None:
    def strict(text: str) -> Any:
        def refuse(constant: str) -> None:
            pytest.fail(constant)

        return json.loads(text, parse_constant=refuse)

    score = Score(metric="error", before=odd, after=odd, higher_is_better=False, examples=20)
    report = _report(_layer("a"), error=odd, verification=_checked(odd), scores=(score,),
                     plan={"error": odd}, seconds=odd)  # fmt: skip
    made = strict(document(report, Path("r.json")))
    assert made["fit_errors"]["a"] == str(odd)
    assert made["verification"]["output_error"] is None
    strict(report.model_dump_json())
    jsonschema.validate(made, Report.model_json_schema(mode="serialization"))
    assert "nan %" not in verdict(_report(_layer("a"), error=odd))
    assert strict(as_json({"a": [odd, (odd, 1.5)], "b": {"c": odd}}, None)) == {
        "a": [None, [None, 1.5]], "b": {"c": None},
    }  # fmt: skip


def _latency(dense: float, converted: float) -> Latency:
    return Latency(
        batch=32, dense_ms=dense, converted_ms=converted, dense_spread_ms=0.1,
        converted_spread_ms=0.1, repeats=9, device="CPU", threads=2,
    )  # fmt: skip


def test_slower_is_said_in_words() -> None:
    slow, fast = _latency(1, 2), _latency(2, 1)
    assert "It is slower: 2.0x the dense time at batch 32" in verdict(
        _report(_layer("a"), latency=(fast, slow))
    )
    assert "SLOWER: 2.00x" in _text(_report(_layer("a"), latency=(slow,)))
    assert "2.00x as fast" in _text(_report(_layer("a"), latency=(fast,)))
