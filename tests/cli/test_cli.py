"""The command line on real files: what it prints, what it writes, how it ends."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
import torchvision
from torch import nn
from typer.testing import CliRunner, Result

import bp_convert
import bp_convert.pipeline
from bp_convert.cli.app import app
from bp_convert.cli.session import TRACEBACK
from bp_convert.models import build
from bp_convert.values.report import Report
from tests.tolerances import assert_near


def run(*words: object) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words])


def ok(*words: object) -> Result:
    done = run(*words)
    assert done.exit_code == 0, done.output + done.stderr
    return done


@pytest.fixture(autouse=True)
def _unforeseen_faults_are_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no test take a fault that nobody foresaw for an error that somebody did."""
    monkeypatch.setenv(TRACEBACK, "1")


@pytest.fixture
def mlp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A pickled MLP in a folder of its own, which is the current one."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "mlp.pt"
    torch.save(nn.Sequential(nn.Linear(768, 768), nn.ReLU(), nn.Linear(768, 10)), path)
    return path


def test_a_model_in_a_model_out(mlp: Path) -> None:
    done = ok(mlp, "--rank", "0.25", "--convert-anyway", "-o", "small.pt")
    assert "replaced" in done.stdout
    assert "wrote small.pt" in done.stdout
    source = torch.load(mlp, weights_only=False)
    small = bp_convert.load("small.pt")
    assert type(small) is nn.Sequential
    assert sum(p.numel() for p in small.parameters()) < 0.3 * sum(
        p.numel() for p in source.parameters()
    )
    assert small(torch.randn(3, 768)).shape == (3, 10)


def test_the_default_name_stands_in_this_folder(mlp: Path) -> None:
    done = ok(mlp, "--convert-anyway")
    assert "wrote mlp-bp.pt" in done.stdout
    assert Path("mlp-bp.pt").exists()


def test_full_rank_keeps_the_outputs_and_dense_undoes_it(mlp: Path) -> None:
    ok(mlp, "--rank", 10**9, "--convert-anyway", "-o", "full.pt")
    source = torch.load(mlp, weights_only=False)
    x = torch.randn(3, 768)
    assert_near(bp_convert.load("full.pt")(x), source(x))
    done = ok("dense", "full.pt", "-o", "plain.pt")
    assert "plain torch layers" in done.stdout
    plain = torch.load("plain.pt", weights_only=False)
    assert [type(m) for m in plain] == [nn.Linear, nn.ReLU, nn.Linear]
    assert_near(plain(x), source(x))


def test_json_has_exactly_the_documented_shape(mlp: Path) -> None:
    done = ok(mlp, "--json", "--dry-run", "--alpha", 2, "--pairs", "paper")
    made = json.loads(done.stdout)
    jsonschema.validate(made, json.loads(ok("schema").stdout))
    assert list(made) == [
        "verdict", "plan", "fit_errors", "source", "calibration", "notes", "reconstruction",
        "scores", "training",
        "verification", "plain_int8", "latency", "seconds", "versions", "machine",
    ]  # fmt: skip
    assert set(made["plan"]["params"]) == {"before", "after"}
    first, second = made["plan"]["layers"]
    assert set(first) == {
        "name", "aliases", "kind", "action", "reason", "notes", "inputs", "outputs", "factors",
        "shares", "init", "store", "way", "params", "shared", "macs", "error", "sensitivity",
        "sides",
    }  # fmt: skip
    assert first["factors"] == {
        "weight": {"out": [32, 48], "in": [24, 32], "rank": 1, "axes": []}
    }  # fmt: skip
    assert second["factors"] == {}
    assert second["action"] == "widened"
    again = Report.model_validate(made)
    assert again.model_dump(mode="json", by_alias=True) == made


def test_the_plan_in_a_report_is_one_to_apply(mlp: Path) -> None:
    ok(mlp, "--rank", 3, "--convert-anyway", "--json", "-o", "first.pt", "--report", "r.json")
    made = json.loads(Path("r.json").read_text())
    assert set(made["fit_errors"]) == {"0"}
    Path("plan.json").write_text(json.dumps(made["plan"]))
    ok(mlp, "--plan", "plan.json", "-o", "again.pt")
    first, again = (bp_convert.load(name).state_dict() for name in ("first.pt", "again.pt"))
    assert all(torch.equal(first[name], again[name]) for name in first)


def test_lstm_pairs_in_json_are_by_role(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save(nn.LSTM(12, 16), "lstm.pt")
    done = ok(
        "lstm.pt", "--json", "--dry-run", "--pairs", "paper", "--convert-head", "--input", "5x12"
    )
    made = json.loads(done.stdout)
    assert set(made["plan"]["layers"][0]["factors"]) == {"ih_l0", "hh_l0"}


@pytest.mark.slow
@pytest.mark.parametrize("alpha", [1, 2, 3])
def test_the_paper_s_table_through_the_command(
    alpha: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save(build("svgg"), "svgg.pt")
    done = ok("svgg.pt", "--alpha", alpha, "--pairs", "paper", "--json", "--dry-run")
    after = json.loads(done.stdout)["plan"]["params"]["after"]
    assert after == {1: 18798, 2: 50418, 3: 88726}[alpha]


def test_plan_out_edited_and_applied(mlp: Path) -> None:
    ok(mlp, "--pairs", "paper", "--dry-run", "--plan-out", "plan.json")
    assert not Path("mlp-bp.pt").exists()
    plan = json.loads(Path("plan.json").read_text())
    one = plan["layers"][0]
    one["factors"]["weight"]["rank"] = 3
    Path("plan.json").write_text(json.dumps(plan))
    ok(mlp, "--plan", "plan.json", "-o", "edited.pt")
    assert bp_convert.load("edited.pt")[0].factors.rank == 3
    one["factors"]["weight"]["out"] = [5, 5]
    Path("plan.json").write_text(json.dumps(plan))
    bad = run(mlp, "--plan", "plan.json", "-o", "bad.pt")
    assert bad.exit_code == 1
    assert "5 x 5 = 25" in bad.stderr
    assert not Path("bad.pt").exists()


def test_a_settings_file_with_rules_and_flags_that_win(mlp: Path) -> None:
    Path("s.yaml").write_text(
        "alpha: 2\npairs: paper\nlayers:\n"
        "  - match: '0'\n    pairs: {out: [16, 48], in: [24, 32]}\n    rank: 2\n"
    )
    done = ok(mlp, "--settings", "s.yaml", "--alpha", 1, "--dry-run", "--json")
    layer = json.loads(done.stdout)["plan"]["layers"][0]
    assert layer["factors"]["weight"]["out"] == [16, 48]
    assert layer["factors"]["weight"]["rank"] == 2
    Path("s.yaml").write_text("alpa: 2\n")
    bad = run(mlp, "--settings", "s.yaml", "--dry-run")
    assert bad.exit_code == 1
    assert "s.yaml, line 1, column 1, at alpa" in bad.stderr
    assert "did you mean 'alpha'?" in bad.stderr
    Path("s.yaml").write_text("layers:\n  - match: '0'\n    rnk: 2\n")
    bad = run(mlp, "--settings", "s.yaml", "--dry-run")
    assert "layers.0.rnk" in bad.stderr
    assert "'rank'" in bad.stderr


@pytest.mark.parametrize(
    ("text", "where", "says"),
    [
        ("rank: 0", "at rank\n", "a share between 0 and 1"),
        ("rank: 1.5", "at rank\n", "a share between 0 and 1"),
        ("inputs: [[768]]", "at inputs.0\n", "768"),
        ("inputs: 3xx4", "at inputs\n", "SHAPE"),
        ("target: 25%", "at target\n", "did you mean params=0.25?"),
        ("layers: 5", "at layers\n", "5"),
        ("layers:\n  - rank: 2", "at layers.0\n", "no 'match' here"),
        ("layers:\n  - {match: '0', pairs: sqare}", "at layers.0.pairs\n", "fast, paper, or"),
        ("layers: [{match: a, pairs: {out: [5], in: [2, 3]}}]", "0.pairs.out\n", "[k1, k2]"),
        ("layers: [{match: a, pairs: {out: [5, 5]}}]", "at layers.0.pairs\n", "in: [d1, d2]"),
        ("layers: [{match: a, pairs: {inn: [3, 3]}}]", "at layers.0.pairs.inn\n", "mean 'in'"),
        ("seed: -1", "at seed\n", "greater than or equal to 0"),
        ("- alpha", "s.yaml, line 1, column 1\n", "a list at the top"),
        ("\nalpha: [", "s.yaml, line 2, column 9\n", "no YAML"),
    ],
)  # fmt: skip
def test_a_bad_settings_file_is_told_by_its_path(
    mlp: Path, text: str, where: str, says: str
) -> None:
    Path("s.yaml").write_text(text)
    bad = run(mlp, "--settings", "s.yaml", "--dry-run")
    assert bad.exit_code == 1
    assert where in bad.stderr
    assert says in bad.stderr
    assert "[type=" not in bad.stderr


def test_one_word_stands_for_a_list_in_a_settings_file(mlp: Path) -> None:
    Path("s.yaml").write_text("inputs: 768\nexclude: '0'\nconvert_head: true\npairs: paper\n")
    made = json.loads(ok(mlp, "--settings", "s.yaml", "--dry-run", "--json").stdout)
    assert [layer["action"] for layer in made["plan"]["layers"]] == ["kept", "replaced"]


def test_reports_in_three_forms(mlp: Path) -> None:
    ok(mlp, "--pairs", "paper", "--report", "r.md", "--report", "r.html", "--report", "r.json")
    assert "| layer |" in Path("r.md").read_text()
    page = Path("r.html").read_text()
    assert page.startswith("<!doctype html>")
    assert "<svg" in page
    full = json.loads(Path("r.json").read_text())
    assert full["verification"]["source_untouched"] is True
    jsonschema.validate(full, json.loads(ok("schema").stdout))
    ok(mlp, "--pairs", "paper", "--report", "R.HTML", "--dry-run")


def test_an_existing_file_is_kept_unless_forced(mlp: Path) -> None:
    Path("out.pt").write_text("mine")
    done = run(mlp, "--pairs", "paper", "-o", "out.pt")
    assert done.exit_code == 1
    assert "--force" in done.stderr
    assert Path("out.pt").read_text() == "mine"
    ok(mlp, "--pairs", "paper", "-o", "out.pt", "--force")
    assert bp_convert.load("out.pt")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["-o", "small.onnx"], "small.pt"),
        (["-o", "s.safetensors"], "s.plan.json"),
        (["-o", "r.pt", "--report", "r.pdf"], ".html"),
        (["-o", "r.safetensors", "--plan-out", "r.plan.json"], "two results"),
    ],
)
def test_what_cannot_be_written_is_refused_before_any_work(
    mlp: Path, words: list[str], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("s.plan.json").write_text("mine")
    monkeypatch.setattr(bp_convert.pipeline, "open_model", lambda *_, **__: pytest.fail("worked"))
    done = run(mlp, *words)
    assert done.exit_code == 1, done.output
    assert says in done.stderr
    assert Path("s.plan.json").read_text() == "mine"


def test_a_folder_for_what_is_no_model_of_transformers_is_refused_before_any_work(
    mlp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bp_convert.pipeline, "prepared", lambda *_, **__: pytest.fail("worked"))
    done = run(mlp, "-o", "small")
    assert done.exit_code == 1, done.output
    assert "-o small.pt" in done.stderr


def test_nothing_converted_is_exit_three_and_writes_nothing(mlp: Path) -> None:
    torch.save(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), "tiny.pt")
    done = run("tiny.pt", "-o", "t.pt")
    assert done.exit_code == 3
    assert "Nothing was converted" in done.stdout
    assert not Path("t.pt").exists()


def test_quiet_verbose_and_inspect(mlp: Path) -> None:
    quiet = ok(mlp, "--pairs", "paper", "--quiet", "-o", "q.pt")
    assert len(quiet.stdout.strip().splitlines()) == 1
    assert "0  " in ok("inspect", mlp).stdout
    again = ok("inspect", "q.pt")
    assert "converted before" in again.stdout
    kept = json.loads(ok("inspect", mlp, "--pairs", "paper", "--json").stdout)
    assert [layer["action"] for layer in kept["plan"]["layers"]] == ["replaced", "kept"]
    done = json.loads(ok("inspect", mlp, "--pairs", "paper", "--json", "--convert-head").stdout)
    assert [layer["action"] for layer in done["plan"]["layers"]] == ["replaced", "replaced"]


def test_measure_says_how_fast(mlp: Path) -> None:
    done = ok(mlp, "--pairs", "paper", "--batch", 2, "-o", "m.pt")
    assert "batch 2:" in done.stdout
    assert "x as fast" in done.stdout or "SLOWER" in done.stdout
    torch.save(nn.Sequential(nn.ReLU()), "relu.pt")
    assert "nothing was timed" in run("relu.pt", "--measure").stdout


def test_dtype_of_the_result(mlp: Path) -> None:
    ok(mlp, "--pairs", "paper", "--dtype", "bfloat16", "-o", "half.pt")
    assert next(bp_convert.load("half.pt").parameters()).dtype == torch.bfloat16


@pytest.mark.slow
def test_weights_with_an_architecture_and_safetensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save(torchvision.models.squeezenet1_1(num_classes=7).state_dict(), "w.pth")
    arch = "torchvision:squeezenet1_1?num_classes=7"
    ok("w.pth", "--arch", arch, "--pairs", "paper", "-o", "s.safetensors")
    assert Path("s.plan.json").exists()
    model = bp_convert.load("s.safetensors")
    assert isinstance(model, torchvision.models.SqueezeNet)
    assert model(torch.randn(1, 3, 64, 64)).shape == (1, 7)


BAD: list[tuple[list[str], int, str]] = [
    (["absent.pt"], 1, "absent.pt"),
    (["empty.pt"], 1, "empty"),
    (["text.pt"], 1, "text"),
    (["cut.pt"], 1, "cut.pt"),
    (["script.pt"], 1, "TorchScript"),
    (["mlp.pt", "--input", "9"], 1, "--input"),
    (["mlp.pt", "--input", "3xx4"], 1, "SHAPE"),
    (["mlp.pt", "--include", "zzz"], 1, "matches none"),
    (["mlp.pt", "-o", "no/such/folder/out.pt"], 1, "folder"),
    (["mlp.pt", "--device", "cuda:99"], 1, "device"),
    (["mlp.pt", "--plan", "text.pt"], 1, "plan"),
    (["mlp.pt", "--alpha", "0"], 2, "alpha"),
    (["mlp.pt", "--alpha", "0.5"], 2, "rank"),
    (["mlp.pt", "--rank", "0"], 2, "share"),
    (["mlp.pt", "--rank", "1.5"], 2, "share"),
    (["mlp.pt", "--pairs", "square"], 2, "fast"),
    (["mlp.pt", "--dtype", "int8"], 2, "float32"),
    (["mlp.pt", "--alfa", "2"], 2, "--alfa"),
    (["prob", "mlp.pt"], 2, "Did you mean 'probe'?"),
    (["mlp.pt", "--target", "25%"], 1, "did you mean params=0.25?"),
    (["mlp.pt", "--target", "param=0.25"], 1, "did you mean params=0.25?"),
    (["mlp.pt", "--target", "params=2"], 1, "did you mean params=0.02?"),
    (["sweep", "mlp.pt", "--target", "0.25"], 1, "did you mean params=0.25?"),
    (["mlp.pt", "--rank", "inf"], 2, "share"),
    (["mlp.pt", "--rank", "1e3"], 2, "share"),
    (["mlp.pt", "--seed", "9" * 30], 1, "seed"),
    (["mlp.pt", "--plan", "absent.json", "--alpha", "2"], 2, "--alpha"),
    (["mlp.pt", "--measure", "--dry-run"], 2, "--measure"),
]


@pytest.mark.filterwarnings("ignore:`torch.jit")
@pytest.mark.parametrize(
    ("words", "code", "says"), BAD, ids=lambda x: " ".join(x) if isinstance(x, list) else None
)
def test_bad_input_says_what_to_do_and_writes_nothing(
    mlp: Path, words: list[str], code: int, says: str
) -> None:
    Path("empty.pt").touch()
    Path("text.pt").write_text("hello, this is not a model\n")
    Path("cut.pt").write_bytes(mlp.read_bytes()[:20_000])
    torch.jit.script(nn.Linear(3, 3)).save("script.pt")
    before = {path: path.read_bytes() for path in Path.cwd().iterdir()}
    done = run(*words)
    assert done.exit_code == code, done.output
    assert says in done.stderr
    assert "Traceback" not in done.output + done.stderr
    if code == 1:
        assert "to do" in done.stderr
    assert done.stdout == ""
    assert {path: path.read_bytes() for path in Path.cwd().iterdir()} == before


def test_a_hostile_file_runs_nothing(mlp: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return (eval, ("open('ran', 'w')",))

    torch.save({"state_dict": {"weight": torch.zeros(3)}, "x": Evil()}, "evil.pt")
    done = run("evil.pt")
    assert done.exit_code == 1
    assert not Path("ran").exists()
    assert "weights_only" not in done.stderr


def test_a_verification_that_fails_is_exit_four(mlp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from bp_convert.layers import BPLinear

    plain = BPLinear.forward
    monkeypatch.setattr(BPLinear, "forward", lambda self, x: plain(self, x)[..., :5])
    done = run(mlp, "--pairs", "paper", "--include", "2", "--convert-head", "-o", "out.pt")
    assert done.exit_code == 4, done.output
    assert "to do" in done.stderr
    assert not Path("out.pt").exists()


def test_an_unforeseen_fault_shows_no_traceback_unless_asked(
    mlp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("by [red]nought")

    monkeypatch.setattr(bp_convert.pipeline, "prepared", broken)
    assert isinstance(run(mlp).exception, ZeroDivisionError)
    monkeypatch.delenv(TRACEBACK)
    done = run(mlp)
    assert done.exit_code == 1
    assert "ZeroDivisionError: by [red]nought" in done.stderr
    assert "in broken" in done.stderr
    assert "Traceback" not in done.stderr


def test_an_interruption_ends_quietly(mlp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(bp_convert.pipeline, "prepared", stopped)
    done = run(mlp)
    assert done.exit_code == 130
    assert done.stderr == "interrupted\n"


def test_version_help_and_no_words() -> None:
    assert ok("--version").stdout.strip() == f"bp-convert {bp_convert.__version__}"
    text = ok("--help").stdout
    for words in ("--alpha", "--widen", "--include", "inspect", "demo", "Exit codes"):
        assert words in text
    assert "--alpha" in run().output
    assert ok("-h").stdout == text
    assert "--only" in ok("recipe", "run", "-h").stdout


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["bp-convert", "in"], ["inspect"]),
        (["bp-convert", "recipe", "r"], ["run"]),
        (["bp-convert", "--cali"], ["--calibrate"]),
        (["bp-convert", "m.pt", "--method", "svd"], ["svd", "svd-data"]),
        (["bp-convert", "m.pt", "--metric", "c"], ["cosine"]),
        (["bp-convert", "finetune", "m.pt", "--preset", "p"], ["paper", "paper-captioner"]),
        (["bp-convert", "finetune", "m.pt", "--set", "ep"], ["epochs="]),
    ],
)
def test_a_shell_completes_commands_options_and_values(words: list[str], found: list[str]) -> None:
    asked = {"COMP_WORDS": " ".join(words), "COMP_CWORD": str(len(words) - 1)}
    done = CliRunner().invoke(
        app, [], prog_name="bp-convert", env={**asked, "_BP_CONVERT_COMPLETE": "complete_bash"}
    )
    assert done.stdout.split() == found


@pytest.mark.slow
def test_the_module_is_the_command(mlp: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "bp_convert",
        str(mlp),
        "--dry-run",
        "--json",
        "--pairs",
        "paper",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["plan"]["layers"][0]["action"] == "replaced"


@pytest.mark.slow
def test_inspect_of_weights_alone_and_of_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    state = {"fc.weight": torch.zeros(3, 2), "fc.scale": torch.tensor(1.0)}
    torch.save({"epoch": 3, "state_dict": state}, "w.pth")
    done = ok("inspect", "w.pth")
    assert "2 tensors, 7 numbers" in done.stdout
    assert re.search(r"fc\.weight +3 ?[x×] ?2 +float32", done.stdout)
    assert "--arch" in done.stdout
    done = ok("inspect", "w.pth", "--json")
    assert json.loads(done.stdout)["fc.weight"] == {"shape": [3, 2], "dtype": "float32"}
    transformers = pytest.importorskip("transformers")
    small = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2}
    config = transformers.BertConfig(**small, num_hidden_layers=1, vocab_size=30)
    transformers.BertModel(config).save_pretrained("bert")
    for flags in ([], ["--arch", "transformers:bert"]):
        assert "pooler.dense" in ok("inspect", "bert", *flags).stdout
