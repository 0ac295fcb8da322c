"""``bp-convert recipe``: validate, schema, init, dry runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from bp_convert.batch import estimate
from bp_convert.cli.app import app
from bp_convert.values.marks import read_tree
from bp_convert.values.recipe import Job

ROOT = Path(__file__).parents[2]
RUN = CliRunner()


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_the_schema_accepts_every_recipe_and_refuses_others() -> None:
    made = json.loads(RUN.invoke(app, ["recipe", "schema"]).stdout)
    jsonschema.Draft202012Validator.check_schema(made)
    checker = jsonschema.Draft202012Validator(made)
    for path in sorted((ROOT / "recipes").glob("*.yaml")):
        problems = [one.message for one in checker.iter_errors(read_tree(path).plain())]
        assert not problems, (path, problems)
    assert not checker.is_valid({"arch": "bp:svgg", "alhpa": 2})
    assert not checker.is_valid({"arch": "bp:svgg", "alpha": "wide"})
    assert checker.is_valid({"arch": "bp:svgg", "target": "params=0.5", "input": "3x32x32"})


def test_a_dry_run_plans_once_what_differs_in_its_seed_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.save(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4)), "model.pt")
    Path("study.yaml").write_text(
        "model: model.pt\nsettings: {convert_anyway: true}\n"
        "matrix: {rank: [1, 2, 3], seed: [0, 1], alpha: [1, 2]}\n"
    )
    planned: list[str] = []
    real = estimate.planned

    def counted(job: Job, *rest: Any) -> Any:
        planned.append(job.name)
        return real(job, *rest)

    monkeypatch.setattr(estimate, "planned", counted)
    done = RUN.invoke(app, ["recipe", "run", "study.yaml", "--dry-run", "--json"])
    assert done.exit_code == 0, done.output
    found = {one["name"]: one["params"]["after"] for one in json.loads(done.stdout)}
    assert len(found) == 12
    assert len(planned) == 6
    assert len(set(found.values())) == 6
    for name, params in found.items():
        assert params == found[name.replace("seed=1", "seed=0")]


def test_the_schema_says_of_every_key_what_it_is() -> None:
    made = json.loads(RUN.invoke(app, ["recipe", "schema"]).stdout)
    silent = [
        f"{name}.{key}"
        for name, one in {"": made, **made["$defs"]}.items()
        for key, field in one.get("properties", {}).items()
        if not field.get("description")
    ]
    assert not silent
    assert made["properties"]["target"]["description"].startswith("limits that the converted")


def test_validate_counts_jobs_and_names_the_code_that_runs() -> None:
    Path("m.py").write_text("def f():\n    pass\n")
    Path("study.yaml").write_text("arch: m.py:f\ntrust: m.py\nmatrix: {alpha: [1, 2]}\n")
    done = RUN.invoke(app, ["recipe", "validate", "study.yaml"])
    assert done.exit_code == 0, done.output
    assert "study.yaml: 2 jobs; runs code of m.py" in done.stdout
    Path("study.yaml").write_text("model: m.pt\n")
    done = RUN.invoke(app, ["recipe", "validate", "study.yaml"])
    assert done.exit_code == 1
    assert "study.yaml, line 1, column 1, at model" in done.stderr
    assert "Traceback" not in done.stderr
    assert RUN.invoke(app, ["recipe", "validate", "--no-files", "study.yaml"]).exit_code == 0


@pytest.mark.parametrize(
    "words",
    [
        ["model.pt"],
        ["weights.pth", "--arch", "torchvision:resnet18?num_classes=10"],
        ["torchvision:resnet18"],
    ],
)
def test_init_writes_a_recipe_that_is_valid(words: list[str]) -> None:
    torch.save(nn.Linear(4, 4), "model.pt")
    Path("weights.pth").touch()
    done = RUN.invoke(app, ["recipe", "init", *words, "-o", "made.yaml"])
    assert done.exit_code == 0, done.output
    assert RUN.invoke(app, ["recipe", "validate", "made.yaml"]).exit_code == 0
    assert "#" in Path("made.yaml").read_text()
    again = RUN.invoke(app, ["recipe", "init", *words, "-o", "made.yaml"])
    assert again.exit_code == 1
    assert "--force" in again.stderr


def test_init_of_weights_alone_says_what_is_missing() -> None:
    torch.save(nn.Linear(4, 4).state_dict(), "weights.pt")
    done = RUN.invoke(app, ["recipe", "init", "weights.pt"])
    assert done.exit_code == 1
    assert "weights without the model" in done.stderr
    assert "--arch" in done.stderr
    assert not Path("weights.yaml").exists()
    arch = ["--arch", "torchvision:resnet18"]
    assert RUN.invoke(app, ["recipe", "init", "weights.pt", *arch]).exit_code == 0


def test_what_init_leaves_commented_is_valid_too() -> None:
    torch.save(nn.Linear(4, 4), "model.pt")
    for name in ("examples.npz", "test.npz", "train.npz"):
        Path(name).touch()
    RUN.invoke(app, ["recipe", "init", "model.pt", "-o", "made.yaml"])
    lines = Path("made.yaml").read_text().splitlines()
    head = next(place for place, line in enumerate(lines) if line.startswith("model:"))
    opened = [
        line.replace("# ", "", 1) if line.lstrip().startswith("# ") and _is_key(line) else line
        for line in lines[head:]
    ]
    Path("open.yaml").write_text("\n".join(opened) + "\n")
    done = RUN.invoke(app, ["recipe", "validate", "open.yaml"])
    assert done.exit_code == 0, done.output
    assert "jobs" in done.stdout


def _is_key(line: str) -> bool:
    text = line.replace("# ", "", 1).strip()
    word = text.removeprefix("- ").partition(":")[0]
    return ":" in text and " " not in word and not word.startswith("jobs") and "{name" not in text


def test_a_dry_run_plans_every_job_and_runs_none() -> None:
    torch.save(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4)), "model.pt")
    Path("study.yaml").write_text(
        "settings: {convert_anyway: true}\njobs:\n"
        "  - {name: one, model: model.pt, finetune: {data: CIFAR10, steps: 100, batch: 10}}\n"
        "  - {name: two, model: model.pt, target: params=0.5}\n"
        "  - {name: low, model: model.pt, counterpart: low-rank}\n"
        "  - {name: gone, model: nowhere.pt}\n"
    )
    done = RUN.invoke(app, ["recipe", "run", "study.yaml", "--dry-run"])
    assert done.exit_code == 1
    assert "nothing was run" in done.stdout
    assert "cannot run" in done.stdout
    assert all(len(line) <= 80 for line in done.stdout.splitlines())
    assert not Path("runs").exists()
    done = RUN.invoke(
        app, ["recipe", "run", "study.yaml", "--dry-run", "--json", "--only", "[olt]*"]
    )
    assert done.exit_code == 0, done.output
    one, two, low = json.loads(done.stdout)
    dense, small = 64 * 64 + 64 * 4, one["macs"]["after"]
    assert one["macs"]["before"] == dense
    assert one["steps"] == [0, 100]
    # Three passes of the converted model and one of its teacher, over 1,000 examples.
    assert one["training_macs"] == 1000 * (3 * small + dense)
    assert two["params"]["after"] <= 0.5 * two["params"]["before"]
    assert low["params"]["after"] <= one["params"]["after"]


def test_options_that_do_not_go_together() -> None:
    Path("study.yaml").write_text("arch: bp:svgg\n")
    assert RUN.invoke(app, ["recipe", "run", "study.yaml", "--resume", "--force"]).exit_code == 2
    done = RUN.invoke(app, ["recipe", "run", "study.yaml", "--only", "nothing*"])
    assert done.exit_code == 1
    assert "no job of this name" in done.stderr
    assert RUN.invoke(app, ["recipe", "run", "study.yaml", "--executor", "cloud"]).exit_code == 2
