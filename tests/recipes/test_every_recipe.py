"""Each file in recipes/ is read, planned, and run for two steps on small data of its form."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import bp_convert
from bp_convert.batch.book import read_recipe
from bp_convert.batch.sources import check_scores
from bp_convert.cli.reading import settings_from
from bp_convert.models import build
from bp_convert.values.plan import Plan
from tests.recipes.small import ran, representatives

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
SETTINGS = sorted((ROOT / "recipes" / "settings").glob("*.yaml"))
# The same forms on larger models.
LONG = ("cifar10-mobilenet-v2", "cifar10-resnet56", "cifar10-squeezenet", "fashion-resnet11")
LONG += ("svhn-mobilenet-v2",)
EACH = [
    pytest.param(path, id=path.stem, marks=[pytest.mark.long] if path.stem in LONG else [])
    for path in RECIPES
]
BY_NAME = {"ids": lambda path: path.stem}


@pytest.fixture(autouse=True)
def _from_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def test_there_are_recipes() -> None:
    assert len(RECIPES) >= 20
    assert len(SETTINGS) >= 2


@pytest.mark.parametrize("path", RECIPES, **BY_NAME)
def test_a_recipe_is_read_and_says_what_it_needs_and_gave(path: Path) -> None:
    book = read_recipe(path)
    assert book.jobs
    for one in book.jobs:
        check_scores(one)
    head = []
    for line in path.read_text().splitlines():
        if not line.startswith("#"):
            break
        head.append(line)
    assert any(line.startswith("# Needs: ") for line in head)
    assert any(line.startswith("# Gave: ") for line in head)
    assert any(f"recipe run recipes/{path.name}" in line for line in head)
    assert all(len(line) <= 100 for line in path.read_text().splitlines())


@pytest.mark.slow
@pytest.mark.parametrize("path", EACH)
def test_a_recipe_is_planned_and_runs_for_two_steps(path: Path, tmp_path: Path) -> None:
    for job in representatives(read_recipe(path)):
        outcome, folder = ran(job, tmp_path)
        assert outcome.state == "done", (job.name, outcome.problem)
        assert outcome.params is not None
        if job.evaluate is not None:
            assert outcome.score is not None
        tuned = job.finetune is not None and (job.counterpart != "full" or job.train is None)
        assert (outcome.trained is not None) == tuned
        if outcome.trained is not None:
            assert outcome.trained.steps == 2
        assert (outcome.full is not None) == (job.train is not None)
        names = {one.name for one in folder.iterdir()}
        assert {"recipe.yaml", "result.json", "log.txt", "done.json"} <= names
        assert "model.pt" in names or job.weights == "none"
        if job.counterpart == "full":
            continue
        plan = Plan.model_validate_json((folder / "plan.json").read_text())
        assert plan.params == outcome.params
        assert job.counterpart == "pruned" or plan.converted, f"{job.name} converts nothing"
        assert plan.params.after < plan.params.before or job.request.alpha > 1


@pytest.mark.slow
@pytest.mark.parametrize("path", SETTINGS, **BY_NAME)
def test_settings_convert_a_model_that_then_trains(path: Path) -> None:
    model = build("svgg")
    small, report = bp_convert.convert(model, settings_from(path))
    assert any(layer.action == "replaced" for layer in report.layers)
    optimiser = torch.optim.Adam(small.parameters())
    images, labels = torch.randn(4, 3, 32, 32), torch.arange(4)
    for _ in range(2):
        optimiser.zero_grad()
        torch.nn.functional.cross_entropy(small(images), labels).backward()
        optimiser.step()
    assert all(bool(p.isfinite().all()) for p in small.parameters())


@pytest.mark.parametrize("path", SETTINGS, **BY_NAME)
def test_settings_say_how_to_use_them(path: Path) -> None:
    head = [line for line in path.read_text().splitlines() if line.startswith("#")]
    assert any(f"--settings recipes/settings/{path.name}" in line for line in head)
    assert any("Accuracy" in line for line in head)
