"""The paper's table: full models, and the plans of alpha 1, 2, 3 with the paper's pairs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torchvision
from torch import nn

from bp_convert.errors import PlanError
from bp_convert.models import build
from bp_convert.planner import make_plan
from bp_convert.values.settings import Settings

COUNTS = json.loads((Path(__file__).parent / "reference_counts.json").read_text())
MODELS = ("svgg", "resnet56", "captioner", "mobilenet_v2")


def _model(name: str) -> nn.Module:
    if name == "mobilenet_v2":
        return torchvision.models.mobilenet_v2(num_classes=10)
    return build(name)


@pytest.mark.parametrize("name", MODELS)
def test_full_models_have_the_table_s_parameters(name: str) -> None:
    full = COUNTS[name].get("full_pytorch", COUNTS[name]["full"])
    model = _model(name)
    head = [m for m in model.modules() if isinstance(m, nn.Linear)][-1]
    assert sum(p.numel() for p in model.parameters()) == full["inc"]
    assert full["inc"] - sum(p.numel() for p in head.parameters()) == full["exc"]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("alpha", [1, 2, 3])
def test_the_paper_s_table_of_parameters(name: str, alpha: int) -> None:
    model = _model(name)
    plan = make_plan(model, Settings(alpha=alpha, pairs="paper", init="random"))
    expected = COUNTS[name]["bp"][str(alpha)]
    head = plan.layers[-1]
    assert plan.params.after == expected["inc"]
    assert plan.params.after - head.params[1] == expected["exc"]
    assert head.action == ("kept" if alpha == 1 else "widened")


@pytest.mark.parametrize("alpha", [1, 2, 3])
def test_the_two_layers_of_vgg19(alpha: int) -> None:
    with torch.device("meta"):
        model = torchvision.models.vgg19()
    settings = Settings(
        alpha=alpha, pairs="paper", init="random", include=("classifier.0", "classifier.3")
    )
    plan = make_plan(model, settings)
    two = [plan.layer(name) for name in ("classifier.0", "classifier.3")]
    assert sum(layer.params[1] for layer in two if layer) == COUNTS["vgg19_classifier"]["bp"][str(alpha)]
    assert all(layer.action == "replaced" for layer in two if layer)


def test_what_each_model_gives_out() -> None:
    images = torch.randn(2, 3, 32, 32)
    for name in ("svgg", "resnet56", "squeezenet"):
        assert build(name, num_classes=7).eval()(images).shape == (2, 7)
        assert build(name, in_channels=1).eval()(images[:, :1]).shape == (2, 10)
    captioner = build("captioner", vocabulary=50, features=64)
    assert captioner(torch.randn(2, 64), torch.zeros(2, 5, dtype=torch.long)).shape == (2, 50)


def test_a_captioner_looks_at_both_inputs() -> None:
    model = build("captioner", vocabulary=50, features=64).eval()
    image, tokens = torch.randn(1, 64), torch.arange(5)[None]
    base = model(image, tokens)
    assert not torch.allclose(model(image + 1, tokens), base)
    assert not torch.allclose(model(image, tokens + 1), base)


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(PlanError, match="svgg, resnet56, squeezenet, captioner"):
        build("resnet57")
