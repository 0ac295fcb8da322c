"""Budgets, data and scores through the command: what they give, and how they are refused."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode
from typer.testing import CliRunner, Result

import bp_convert
import bp_convert.run.job
from bp_convert.cli.app import app
from bp_convert.cli.session import TRACEBACK
from bp_convert.data import Examples
from tests.data.crafted import image, tokenizer

FEATURES, CLASSES = 48, 10


def run(*words: object) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words])


def ok(*words: object) -> Result:
    done = run(*words)
    assert done.exit_code == 0, done.output + done.stderr
    return done


def refused(done: Result, *says: str) -> None:
    """Expect one error of four filled parts on stderr, and nothing on stdout."""
    assert done.exit_code == 1, done.output + done.stderr
    assert done.stdout == ""
    parts = re.fullmatch(
        r"bp-convert: (.+)\n  found:   (.+)\n  allowed: (.+)\n  to do:   (.+)\n", done.stderr
    )
    assert parts, done.stderr
    for words in says:
        assert words in done.stderr
    assert "Value error" not in done.stderr


def misused(done: Result, *says: str) -> None:
    """Expect a usage error on stderr, and nothing on stdout."""
    assert done.exit_code == 2, done.output + done.stderr
    assert done.stdout == ""
    for words in says:
        assert words in done.stderr


@pytest.fixture(autouse=True)
def _unforeseen_faults_are_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no test take a fault that nobody foresaw for an error that somebody did."""
    monkeypatch.setenv(TRACEBACK, "1")


@pytest.fixture
def mlp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A pickled MLP and data for it, d.npz with labels and x.npy without, in the current folder."""
    monkeypatch.chdir(tmp_path)
    model = nn.Sequential(
        nn.Linear(FEATURES, 96), nn.ReLU(), nn.Linear(96, 64), nn.ReLU(), nn.Linear(64, CLASSES)
    )
    x = torch.randn(96, 12) @ torch.randn(12, FEATURES)
    np.savez("d.npz", x=x.numpy(), y=model(x).argmax(1).numpy())
    np.save("x.npy", x.numpy())
    path = tmp_path / "mlp.pt"
    torch.save(model, path)
    return path


def source() -> nn.Module:
    model: nn.Module = torch.load("mlp.pt", weights_only=False)
    return model


def inputs() -> Tensor:
    return torch.from_numpy(np.load("x.npy"))


def count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def macs(model: nn.Module, *shape: int) -> int:
    """Count what a pass of one example multiplies, by torch's own counter."""
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.randn(1, *shape))
    return int(counter.get_total_flops()) // 2


# Targets, counted on what was written


@pytest.fixture
def large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An MLP whose options are finer than a hundredth of its size."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "large.pt"
    torch.save(nn.Sequential(nn.Linear(384, 512), nn.ReLU(), nn.Linear(512, 384)), path)
    return path


def params_of(path: Path) -> float:
    return count(bp_convert.load(path))


def size_of(path: Path) -> float:
    return path.stat().st_size


def macs_of(path: Path) -> float:
    return macs(bp_convert.load(path), 384)


@pytest.mark.parametrize(
    ("target", "counted", "limit"),
    [
        ("params=0.25", params_of, 0.25 * 394_112),
        ("params=120k", params_of, 120_000),
        ("size=0.3", size_of, 0.3 * 4 * 394_112),
        ("size=500kB", size_of, 500_000),
        ("macs=0.4", macs_of, 0.4 * 2 * 384 * 512),
    ],
)
def test_a_target_is_met_from_below_and_spent(
    large: Path, target: str, counted: Callable[[Path], float], limit: float
) -> None:
    before = large.read_bytes()
    # Of few bits there are steps between, which a size of their own choice may fall between.
    ok(large, "--target", target, "--store", "fp32", "-o", "small.pt")
    found = counted(Path("small.pt"))
    assert 0.99 * limit <= found <= limit
    assert large.read_bytes() == before
    small = bp_convert.load("small.pt")
    assert type(small) is nn.Sequential
    assert small(torch.randn(2, 384)).shape == (2, 384)


def test_two_targets_are_both_met(large: Path) -> None:
    ok(large, "--target", "params=0.5", "--target", "macs=0.3", "-o", "small.pt")
    assert params_of(Path("small.pt")) <= 0.5 * 394_112
    assert 0.97 * 0.3 < macs_of(Path("small.pt")) / (2 * 384 * 512) <= 0.3


@pytest.mark.parametrize("limit", [0.4, 0.15])
def test_an_error_is_kept_on_the_saved_model(mlp: Path, limit: float) -> None:
    words = ("--target", f"error={limit}", "--calibrate", "x.npy", "-o", "small.pt")
    ok(mlp, *words, "--report", "r.json")
    report = json.loads(Path("r.json").read_text())
    assert 0.5 * limit < report["plan"]["error"] <= limit
    small, x = bp_convert.load("small.pt"), inputs()
    assert count(small) < count(source())
    with torch.no_grad():
        wanted = source()(x)
        assert float((small(x) - wanted).norm() / wanted.norm()) <= limit


def test_a_smaller_target_makes_a_smaller_and_worse_model(mlp: Path) -> None:
    sizes, errors = [], []
    with torch.no_grad():
        wanted = source()(inputs())
        for share in (0.7, 0.3):
            ok(mlp, "--target", f"params={share}", "--calibrate", "x.npy", "-o", f"{share}.pt")
            small = bp_convert.load(f"{share}.pt")
            sizes.append(count(small))
            errors.append(float((small(inputs()) - wanted).norm()))
    assert sizes == sorted(sizes, reverse=True)
    assert errors == sorted(errors)


def test_data_makes_a_better_model_of_the_same_size(mlp: Path) -> None:
    ok(mlp, "--target", "params=0.3", "-o", "blind.pt")
    ok(mlp, "--target", "params=0.3", "--calibrate", "x.npy", "-o", "fitted.pt")
    with torch.no_grad():
        wanted = source()(inputs())
        blind, fitted = (
            float((bp_convert.load(name)(inputs()) - wanted).norm())
            for name in ("blind.pt", "fitted.pt")
        )
    assert fitted < 0.7 * blind


def test_a_method_of_low_rank_uses_low_rank_alone(mlp: Path) -> None:
    words = ("--target", "params=0.5", "--method", "svd-data", "--calibrate", "x.npy")
    made = json.loads(ok(mlp, *words, "--dry-run", "--json").stdout)
    pairs = [one for layer in made["plan"]["layers"] for one in layer["factors"].values()]
    assert pairs
    assert all(pair["out"][1] == 1 and pair["in"][0] == 1 for pair in pairs)
    assert not Path("mlp-bp.pt").exists()


def test_the_target_of_a_settings_file_holds_and_the_flag_wins(mlp: Path) -> None:
    Path("s.yaml").write_text("target: params=0.5\n")
    total = count(source())
    for words, share in (((), 0.5), (("--target", "params=0.3"), 0.3)):
        done = ok(mlp, "--settings", "s.yaml", *words, "--dry-run", "--json")
        after = json.loads(done.stdout)["plan"]["params"]["after"]
        assert 0.9 * share < after / total <= share


# What is refused


@pytest.mark.parametrize(
    "target", ["params=0.001", "macs=0.0001", "size=100", "params=5"], ids=lambda x: x
)
def test_a_target_out_of_reach_names_the_range(mlp: Path, target: str) -> None:
    done = run(mlp, "--target", target, "-o", "out.pt")
    refused(done, f"target {target}", "out of reach", "a share of")
    found = re.search(r"from ([\d,]+) \(a share of ([\d.e-]+)\) to ([\d,]+)", done.stderr)
    assert found
    least = int(found[1].replace(",", ""))
    assert not Path("out.pt").exists()
    # What the range promises is kept.
    quantity = target.partition("=")[0]
    ok(mlp, "--target", f"{quantity}={least + 1}", "--convert-anyway", "-o", "out.pt")
    if quantity == "params":
        assert count(bp_convert.load("out.pt")) <= least + 1


REFUSED: list[tuple[list[str], list[str]]] = [
    (["--target", "params=0.2", "--target", "params=0.3"], ["two targets for one quantity"]),
    (["--target", "params"], ["QUANTITY=VALUE"]),
    (["--target", "weights=0.2"], ["params=0.25"]),
    (["--target", "error=2"], ["between 0 and 1"]),
    (["--target", "params=20MB"], ["params=1.5M"]),
    (["--target", "params=0.3", "--alpha", "2"], ["leave --alpha or --target out"]),
    (["--target", "params=0.3", "--init", "random"], ["init must be warm"]),
    (["--target", "params=0.3", "--method", "svd-data"], ["--calibrate"]),
    (["--target", "params=0.3", "--method", "kron-data"], ["--calibrate"]),
    (["--target", "params=0.3", "--calibrate", "absent.npz"], ["absent.npz"]),
    (["--target", "params=0.3", "--calibrate", "empty"], ["no image", "check the path"]),
    (["--target", "params=0.3", "--calibrate", "wide.npy"], ["50", "--input 50"]),
    (["--target", "params=0.3", "--calibrate", "nan.npy"], ["NaN", "finite"]),
    (["--target", "params=0.3", "--calibrate", "ints.npy"], ["int64 values"]),
    (["--target", "params=0.3", "--calibrate", "none.npy"], ["no examples"]),
    (["--target", "params=0.3", "--calibrate", "photos"], ["images"]),
    (["--target", "params=0.3", "--evaluate", "nan.npy"], ["NaN"]),
    (["--evaluate", "x.npy", "--metric", "accuracy"], ["labels"]),
    (["--evaluate", "x.npy", "--metric", "acuracy"], ["accuracy"]),
    (["--evaluate", "d.npz", "--calibrate", "d.npz"], ["calibration has used", "fewer examples"]),
    (["--calibrate", "x.npy", "--alpha", "2"], ["leave the calibration data out"]),
]


@pytest.mark.parametrize(
    ("words", "says"), REFUSED, ids=lambda x: " ".join(x) if str(x[0]).startswith("--") else ""
)
def test_what_cannot_be_done_is_told_in_four_parts(
    mlp: Path, words: list[str], says: list[str]
) -> None:
    Path("empty").mkdir()
    image(Path("photos/one.png"), (1, 2, 3))
    np.save("wide.npy", np.zeros((4, 50), np.float32))
    np.save("ints.npy", np.zeros((4, FEATURES), np.int64))
    np.save("none.npy", np.zeros((0, FEATURES), np.float32))
    bad = np.zeros((4, FEATURES), np.float32)
    bad[2, 3] = np.nan
    np.save("nan.npy", bad)
    before = sorted(Path.cwd().rglob("*"))
    refused(run(mlp, *words, "-o", "out.pt"), *says)
    assert sorted(Path.cwd().rglob("*")) == before


MISUSED: list[tuple[list[str], list[str]]] = [
    (["--target", "params=0.3", "--rank", "2"], ["--target", "--rank"]),
    (["--target", "params=0.3", "--pairs", "paper"], ["--target", "--pairs"]),
    (["--metric", "accuracy"], ["--evaluate"]),
    (["--metric", "accuracy", "--calibrate", "x.npy"], ["--evaluate"]),
    (["--examples", "8"], ["--examples", "--calibrate"]),
    (["--tokenizer", "."], ["--tokenizer", "--calibrate"]),
    (["--examples", "0", "--calibrate", "x.npy"], ["--examples"]),
    (["--method", "pca"], ["pca", "kron-data"]),
    (["--dry-run", "--evaluate", "x.npy"], ["--evaluate"]),
    (["--plan", "p.json", "--target", "params=0.3"], ["--target"]),
    (["--plan", "p.json", "--method", "svd"], ["--method"]),
]


@pytest.mark.parametrize(
    ("words", "says"), MISUSED, ids=lambda x: " ".join(x) if len(x) > 1 and x[1][0] != "-" else ""
)
def test_options_that_do_not_go_together_are_misuse(
    mlp: Path, words: list[str], says: list[str]
) -> None:
    misused(run(mlp, *words), *says)
    assert not Path("mlp-bp.pt").exists()


# Images and text


class Seen(nn.Module):
    """A small convolutional classifier of 3 x 8 x 8 images."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 24, 3, padding=1)
        self.second = nn.Conv2d(24, 32, 3, padding=1)
        self.head = nn.Linear(32, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(self.first(x).relu()).relu()
        out: Tensor = self.head(x.mean((2, 3)))
        return out


CODE = """
import sys
sys.path.insert(0, {root!r})
from tests.cli.test_targets import Seen

def make():
    return Seen()
"""


@pytest.fixture
def cnn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[object, ...]:
    """The words that open a CNN; photos/ holds three classes of images of another size."""
    monkeypatch.chdir(tmp_path)
    torch.save(Seen().state_dict(), "cnn.pth")
    root = str(Path(__file__).parents[2])
    Path("make.py").write_text(CODE.format(root=root))
    numbers = np.random.default_rng(0).integers(0, 255, (30, 3))
    for row, colour in enumerate(numbers.tolist()):
        image(Path(f"photos/class{row % 3}/{row}.png"), tuple(colour), (13, 11))
    return "cnn.pth", "--arch", "make.py:make", "--input", "3x8x8"


def test_a_folder_of_images_calibrates_and_scores(cnn: tuple[object, ...]) -> None:
    words = ("--target", "params=0.5", "--calibrate", "photos", "--examples", 20)
    done = ok(*cnn, *words, "--evaluate", "photos", "--convert-anyway", "-o", "s.pt", "--report",
              "r.json")  # fmt: skip
    report = json.loads(Path("r.json").read_text())
    assert [one["metric"] for one in report["scores"]] == ["accuracy"]
    assert report["scores"][0]["examples"] == 10
    assert "20 of 30 examples of photos" in report["calibration"]
    assert "accuracy" in done.stdout
    total = report["plan"]["params"]
    assert total["after"] <= 0.5 * total["before"]


def test_arrays_of_another_size_are_refused(cnn: tuple[object, ...]) -> None:
    np.save("other.npy", np.zeros((4, 2, 8, 8), np.float32))  # channels that it does not take
    done = run(*cnn, "--target", "params=0.5", "--calibrate", "other.npy", "-o", "s.pt")
    refused(done, "other.npy", "2x8x8", "3x8x8")
    assert not Path("s.pt").exists()


WORDS = [f"w{i}" for i in range(38)]  # with [PAD] and [UNK] 40 words


@pytest.fixture
def bert(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of a small BertModel and its tokenizer; lines.txt holds text."""
    transformers = pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    folder = tokenizer(tmp_path / "bert", WORDS, most=32)
    config = transformers.BertConfig(
        vocab_size=40, hidden_size=48, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=96, max_position_embeddings=32,
    )  # fmt: skip
    transformers.BertModel(config).save_pretrained(folder)
    numbers = np.random.default_rng(0).integers(0, len(WORDS), (24, 7))
    lines = [" ".join(WORDS[i] for i in row) for row in numbers]
    Path("lines.txt").write_text("\n".join(lines) + "\n")
    return folder


@pytest.mark.slow
def test_text_is_cut_by_the_model_s_own_tokenizer(bert: Path) -> None:
    words = ("--target", "params=0.7", "--calibrate", "lines.txt", "--examples", 16)
    done = ok(
        bert,
        "--arch",
        f"transformers:{bert}",
        *words,
        "--evaluate",
        "lines.txt",
        "--convert-anyway",
        "-o",
        "s.pt",
    )
    small = bp_convert.load("s.pt")
    assert type(small).__name__ == "BertModel"
    assert "cosine" in done.stdout
    assert "on 8 examples" in re.sub(r"\s+", " ", done.stdout)
    out = small(input_ids=torch.randint(0, 40, (2, 5)))
    assert out.last_hidden_state.shape == (2, 5, 48)


def test_a_tokenizer_of_another_vocabulary_is_refused(bert: Path) -> None:
    other = tokenizer(Path("other"), [f"w{i}" for i in range(80)])
    weights = (bert, "--arch", f"transformers:{bert}")
    words = (*weights, "--target", "params=0.7", "--calibrate", "lines.txt", "-o", "s.pt")
    refused(run(*words, "--tokenizer", other), "82 words", "at most 40")
    refused(run(*words, "--tokenizer", "nowhere"), "nowhere")
    assert not Path("s.pt").exists()


# Plans


def test_a_plan_made_twice_is_the_same_byte_for_byte(
    mlp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("--target", "params=0.3", "--calibrate", "d.npz", "--examples", 64, "--dry-run")
    for name in ("one.json", "two.json"):
        ok(mlp, *words, "--plan-out", name)
    assert Path("one.json").read_bytes() == Path("two.json").read_bytes()
    # Nor does it lean on what an earlier run has kept.
    monkeypatch.setenv("BP_CONVERT_CACHE", str(Path("fresh").absolute()))
    ok(mlp, *words, "--plan-out", "three.json")
    assert Path("one.json").read_bytes() == Path("three.json").read_bytes()


@pytest.mark.parametrize("data", [(), ("--calibrate", "x.npy")], ids=["weights", "data"])
def test_a_plan_edited_by_hand_is_applied_as_edited(mlp: Path, data: tuple[str, ...]) -> None:
    ok(
        mlp,
        "--target",
        "params=0.4",
        *data,
        "--convert-anyway",
        "--dry-run",
        "--plan-out",
        "p.json",
    )
    plan = json.loads(Path("p.json").read_text())
    layer = next(one for one in plan["layers"] if one["factors"])
    layer["factors"]["weight"]["rank"] = 2
    Path("p.json").write_text(json.dumps(plan))
    ok(mlp, "--plan", "p.json", *data, "-o", "edited.pt", "--report", "r.json")
    small = bp_convert.load("edited.pt")
    twin: Any = small.get_submodule(layer["name"])
    assert twin.factors.rank == 2
    report = json.loads(Path("r.json").read_text())
    row = next(one for one in report["plan"]["layers"] if one["name"] == layer["name"])
    assert row["factors"]["weight"]["rank"] == 2
    assert row["params"][1] == count(twin)
    assert report["plan"]["params"]["after"] == count(small)
    assert bool(report["calibration"]) == bool(data)


def test_a_plan_made_on_data_but_applied_without_is_noted(mlp: Path) -> None:
    words = ("--target", "params=0.4", "--calibrate", "x.npy", "--convert-anyway")
    ok(mlp, *words, "--dry-run", "--plan-out", "p.json")
    said = "fitted to the weights alone, though planned on data"
    blind = ok(mlp, "--plan", "p.json", "-o", "blind.pt")
    assert said in re.sub(r"\s+", " ", blind.stdout)
    assert "x.npy" in blind.stdout
    fitted = ok(mlp, "--plan", "p.json", "--calibrate", "x.npy", "-o", "fitted.pt")
    assert said not in re.sub(r"\s+", " ", fitted.stdout)
    ok(mlp, *words, "-o", "at_once.pt")
    for one, two in zip(
        bp_convert.load("fitted.pt").parameters(),
        bp_convert.load("at_once.pt").parameters(),
        strict=True,
    ):
        assert torch.equal(one, two)


# Scores


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> dict[str, Examples]:
    """What each part of a run was given."""
    found: dict[str, Examples] = {}
    plain = bp_convert.run.job.split_of

    def watched(*args: Any, **asked: Any) -> Any:
        split = plain(*args, **asked)
        found.update(calibrate=split.calibrate.examples, evaluate=split.evaluate.examples)
        return split

    monkeypatch.setattr(bp_convert.run.job, "split_of", watched)
    return found


def rows(examples: Examples) -> set[tuple[float, ...]]:
    return {tuple(row.tolist()) for args, _ in examples.batches for row in args[0]}


@pytest.mark.parametrize("other", ["d.npz", "./d.npz", "sub/../d.npz"])
def test_one_file_is_split_without_an_example_in_both(
    mlp: Path, taken: dict[str, Examples], other: str
) -> None:
    Path("sub").mkdir()
    words = ("--target", "params=0.5", "--calibrate", "d.npz", "--examples", 60)
    ok(mlp, *words, "--evaluate", other, "-o", "s.pt")
    one, two = rows(taken["calibrate"]), rows(taken["evaluate"])
    assert (len(one), len(two)) == (60, 36)
    assert not one & two


def test_scores_stand_in_the_report_and_the_terminal(mlp: Path) -> None:
    words = ("--target", "params=0.3", "--calibrate", "d.npz", "--examples", 60)
    done = ok(mlp, *words, "--evaluate", "d.npz", "--report", "r.json", "-o", "s.pt")
    score = json.loads(Path("r.json").read_text())["scores"][0]
    assert score["before"] == 1.0  # labels are the source's own
    assert score["metric"] == "accuracy"
    assert score["higher_is_better"] is True
    assert score["examples"] == 36
    line = f"accuracy 100.00 % before, {100 * score['after']:.2f} % after, on 36 examples"
    assert line in re.sub(r"\s+", " ", done.stdout)
    assert max(map(len, done.stdout.splitlines())) <= 80


def test_a_score_is_that_of_the_saved_model(mlp: Path) -> None:
    words = ("--target", "params=0.3", "--calibrate", "x.npy", "--evaluate", "d.npz", "-o", "s.pt")
    ok(mlp, *words, "--report", "r.json")
    score = json.loads(Path("r.json").read_text())["scores"][0]
    with np.load("d.npz") as data, torch.no_grad():
        guess = bp_convert.load("s.pt")(torch.from_numpy(data["x"])).argmax(1)
        right = (guess == torch.from_numpy(data["y"])).float().mean()
    assert score["after"] == pytest.approx(float(right))
    assert score["examples"] == 96


@pytest.mark.parametrize(
    ("metric", "before", "better"),
    [("top3", 1.0, True), ("cosine", 1.0, True), ("error", 0, False)],
)
def test_a_metric_by_name(mlp: Path, metric: str, before: float, better: bool) -> None:
    words = ("--target", "params=0.3", "--evaluate", "d.npz", "--metric", metric, "-o", "s.pt")
    ok(mlp, *words, "--report", "r.json")
    score = json.loads(Path("r.json").read_text())["scores"][0]
    assert score["metric"] == metric
    assert score["before"] == before
    assert score["higher_is_better"] is better
    assert score["after"] != before or metric == "top3"


def test_lines_of_a_long_report_stay_within_eighty_columns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = (
        tmp_path / "a_folder_whose_name_is_rather_long_as_such_names_often_happen_to_be_at_work"
    )
    folder.mkdir()
    monkeypatch.chdir(tmp_path)
    torch.save(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)), "m.pt")
    np.save(folder / "x.npy", np.random.default_rng(0).normal(size=(40, 64)).astype(np.float32))
    words = ("--calibrate", folder / "x.npy", "--examples", 20, "--evaluate", folder / "x.npy")
    done = ok("m.pt", "--target", "params=0.4", *words, "-o", "s.pt")
    assert max(map(len, done.stdout.splitlines())) <= 80
