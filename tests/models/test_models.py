"""The paper's table: full models, and the plans of alpha 1, 2, 3 with the paper's pairs."""

from __future__ import annotations

import io
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torchvision
from torch import nn

from bp_convert.errors import PlanError
from bp_convert.models import build
from bp_convert.planner import prepare
from bp_convert.values.settings import Settings

COUNTS = json.loads((Path(__file__).parent / "reference_counts.json").read_text())
SQUEEZENET = 1792 + 11408 + 45344 + 104880 + 188992 + 197184 + 5130  # stem, fires, classifier
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


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("alpha", [1, pytest.param(2, marks=pytest.mark.long), 3])
def test_the_paper_s_table_of_parameters(name: str, alpha: int) -> None:
    model = _model(name)
    plan = prepare(model, Settings(alpha=alpha, pairs="paper", init="random")).plan
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
    plan = prepare(model, settings).plan
    two = [plan.layer(name) for name in ("classifier.0", "classifier.3")]
    assert (
        sum(layer.params[1] for layer in two if layer)
        == COUNTS["vgg19_classifier"]["bp"][str(alpha)]
    )
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


SMALL: dict[str, tuple[dict[str, int], tuple[Any, ...]]] = {
    "svgg": ({}, (torch.zeros(1, 3, 32, 32),)),
    "resnet56": ({}, (torch.zeros(2, 3, 32, 32),)),
    "squeezenet": ({}, (torch.zeros(1, 3, 32, 32),)),
    "captioner": (
        {"vocabulary": 50, "features": 64},
        (torch.zeros(1, 64), torch.zeros(1, 3, dtype=torch.long)),
    ),
}


@pytest.mark.parametrize("name", SMALL)
def test_every_parameter_is_trained(name: str) -> None:
    options, inputs = SMALL[name]
    model = build(name, **options)
    model(*(x + 1 for x in inputs)).square().sum().backward()
    assert [n for n, p in model.named_parameters() if p.grad is None] == []


@pytest.mark.parametrize("name", SMALL)
def test_models_travel_as_whole_pickles(name: str) -> None:
    options, inputs = SMALL[name]
    model = build(name, **options).eval()
    assert torch.equal(pickle.loads(pickle.dumps(model))(*inputs), model(*inputs))
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    names = torch.serialization.get_unsafe_globals_in_checkpoint(file)
    assert all(name.startswith(("bp_convert.models.", "torch.nn.")) for name in names)


def test_squeezenet_ends_in_512_channels() -> None:
    model = build("squeezenet")
    convs = [m for m in model.modules() if isinstance(m, nn.Conv2d)]
    assert len(convs) == 1 + 5 * 3  # five fire modules of three convolutions
    assert sum(p.numel() for p in model.classifier.parameters()) == 512 * 10 + 10
    assert sum(p.numel() for p in model.parameters()) == SQUEEZENET


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(PlanError, match="svgg, resnet, resnet56, squeezenet, captioner"):
        build("resnet57")
