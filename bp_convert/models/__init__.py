"""The paper's reference models, full versions only, in plain torch.nn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from bp_convert.errors import PlanError
from bp_convert.models.captioner import Captioner
from bp_convert.models.resnet import ResNetV2, resnet56
from bp_convert.models.squeezenet import SqueezeNet
from bp_convert.models.svgg import SVGG

MODELS: dict[str, Callable[..., nn.Module]] = {
    "svgg": SVGG,
    "resnet": ResNetV2,
    "resnet56": resnet56,
    "squeezenet": SqueezeNet,
    "captioner": Captioner,
}

__all__ = ["MODELS", "SVGG", "Captioner", "ResNetV2", "SqueezeNet", "build", "resnet56"]


def build(name: str, **options: Any) -> nn.Module:
    """Return a freshly initialised reference model.

    Args:
        name: ``svgg``, ``resnet56``, ``squeezenet`` (32x32 images), ``captioner``, or ``resnet``
            for ResNet-56's relatives.
        options: of the model, such as ``num_classes=10``, ``in_channels=1`` and ``depth=20``.

    Raises:
        PlanError: no model of that name.
    """
    if name not in MODELS:
        raise PlanError(
            where="bp_convert.models.build",
            found=repr(name),
            allowed=", ".join(MODELS),
            fix="name one of these; torchvision's models are built by torchvision",
        )
    return MODELS[name](**options)
