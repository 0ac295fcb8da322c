"""Nets trained on FashionMNIST, kept in the cache folder, and images to fit and to score with."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torchvision
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent.parent))
import bp_convert
import bp_convert.storage
from bp_convert.data import vision_sets
from bp_convert.models import build
from recipes import assets

# In the paper's forms for one channel.
NETS: dict[str, tuple[str, dict[str, Any]]] = {
    "svgg": ("svgg", {"in_channels": 1, "image_size": 28}),
    "resnet11": ("resnet", {"depth": 11, "width": 8, "in_channels": 1}),
}


def source() -> str:
    """Return the data as the command line takes it."""
    return f"FashionMNIST?root={assets.fashion_root()}"


def trained(net: str, epochs: float) -> nn.Module:
    """Return a net trained for so many epochs; the first call trains it."""
    path = assets.CACHE / f"{net}-fashion-{epochs:g}.pt"
    if not path.exists():
        name, options = NETS[net]
        torch.manual_seed(0)
        full, done = bp_convert.finetune(
            build(name, **options), source(), validation=source(), epochs=epochs, batch=128
        )
        score = 100 * done.after["accuracy"]
        print(f"({net}: {done.steps} steps, {done.seconds:.0f} s, {score:.2f} %)", flush=True)
        bp_convert.storage.save_dense(full, path)
    return bp_convert.open_model(path).model


def garments(*, train: bool, count: int = 5000) -> tuple[Tensor, Tensor]:
    """Return images (N, 1, 28, 28), as the nets were trained on them, and their labels."""
    found = torchvision.datasets.FashionMNIST(str(assets.fashion_root()), train)
    order = torch.randperm(len(found), generator=torch.Generator().manual_seed(0))
    at = order[:count]
    mean, std = vision_sets.NORMS["FashionMNIST"]
    images = found.data[at, None].float() / 255
    return (images - mean[0]) / std[0], found.targets[at]
