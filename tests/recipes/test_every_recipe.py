"""Each file in recipes/ is read, planned and converted."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import bp_convert
from bp_convert.cli.settings import settings_from
from bp_convert.models import build

RECIPES = sorted((Path(__file__).parents[2] / "recipes").glob("*.yaml"))


def test_there_are_recipes() -> None:
    assert len(RECIPES) >= 2


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_converts_a_model_that_then_trains(path: Path) -> None:
    model = build("svgg")
    small, report = bp_convert.convert(model, settings_from(path, {}))
    assert any(layer.action == "replaced" for layer in report.layers)
    optimiser = torch.optim.Adam(small.parameters())
    images, labels = torch.randn(4, 3, 32, 32), torch.arange(4)
    for _ in range(2):
        optimiser.zero_grad()
        torch.nn.functional.cross_entropy(small(images), labels).backward()
        optimiser.step()
    assert all(bool(p.isfinite().all()) for p in small.parameters())


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_says_how_to_run_it(path: Path) -> None:
    head = [line for line in path.read_text().splitlines() if line.startswith("#")]
    assert any(f"--settings recipes/{path.name}" in line for line in head)
    assert any("Accuracy" in line for line in head)
