"""Real architectures, without their weights."""

from __future__ import annotations

import pytest
import torch
import torchvision

from bp_convert.graph.walk import walk
from bp_convert.graph.widths import widen


@pytest.mark.parametrize(
    ("name", "alpha", "widened", "layers"),
    [
        ("resnet18", 2, 20, 21),
        ("resnet18", 1.5, 20, 21),
        ("squeezenet1_1", 3, 25, 26),
        ("shufflenet_v2_x1_0", 3, 56, 57),
        ("mobilenet_v2", 2, 52, 53),
        ("vit_b_16", 2, 37, 38),
        ("swin_t", 2, 52, 53),
    ],
)
def test_all_but_the_head_is_widened(name: str, alpha: float, widened: int, layers: int) -> None:
    with torch.device("meta"):
        model = torchvision.models.get_model(name, weights=None)
    targets = {site.name: site.kind.name for site in walk(model)}
    inputs = (torch.empty(2, 3, 224, 224, device="meta"),)
    plan = widen(model, inputs, {}, alpha=alpha, targets=targets)
    assert plan.failure is None
    assert plan.verified
    assert len(plan.targets) == layers
    assert sum(one.reason is None for one in plan.targets.values()) == widened
    assert len(plan.output_layers) == 1
