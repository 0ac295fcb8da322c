"""Real architectures, without their weights."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torchvision import models

from bp_convert.graph.walk import walk
from bp_convert.widths.widen import widen

SLOW = pytest.mark.slow


def small_vit() -> nn.Module:
    return models.VisionTransformer(
        image_size=64, patch_size=16, num_layers=2, num_heads=3, hidden_dim=48, mlp_dim=96
    )


def small_swin() -> nn.Module:
    """Its attention uses the weights of two layers without calling them."""
    return models.SwinTransformer([4, 4], 24, [2, 2], [2, 4], [4, 4])


@pytest.mark.parametrize(
    ("build", "alpha", "widened", "layers"),
    [
        (models.resnet18, 2, 20, 21),
        pytest.param(models.resnet18, 1.5, 20, 21, marks=SLOW),
        pytest.param(models.squeezenet1_1, 3, 25, 26, marks=SLOW),
        pytest.param(models.shufflenet_v2_x1_0, 3, 56, 57, marks=SLOW),
        pytest.param(models.mobilenet_v2, 2, 52, 53, marks=SLOW),
        (small_vit, 2, 7, 8),
        pytest.param(small_swin, 2, 18, 19, marks=SLOW),
    ],
)
def test_all_but_the_head_is_widened(
    build: Callable[[], nn.Module], alpha: float, widened: int, layers: int
) -> None:
    with torch.device("meta"):
        model = build()
    targets = {site.name: site.kind.name for site in walk(model)}
    inputs = (torch.empty(2, 3, 64, 64, device="meta"),)
    plan = widen(model, inputs, {}, alpha=alpha, targets=targets)
    assert plan.failure is None
    assert len(plan.targets) == layers
    assert sum(one.reason is None for one in plan.targets.values()) == widened
