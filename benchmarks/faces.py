"""Trained face detectors: the three small CNNs of MTCNN. See ``benchmarks/assets.py``."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from benchmarks.assets import fetch


class Detector(nn.Module):
    """A stage of MTCNN: convolutions, perhaps a Linear, and heads of 2, 4 (and 10) numbers."""

    def __init__(
        self, convs: list[tuple[int, int, int]], pools: list[int], dense: tuple[int, int] | None
    ) -> None:
        super().__init__()
        self.pools = pools
        for number, (inputs, outputs, kernel) in enumerate(convs, start=1):
            self.add_module(f"conv{number}", nn.Conv2d(inputs, outputs, kernel))
            self.add_module(f"prelu{number}", nn.PReLU(outputs))
        self.stages = len(convs)
        last = convs[-1][1]
        at = len(convs) + 1
        self.dense = f"dense{at}" if dense else ""
        if dense:
            self.add_module(self.dense, nn.Linear(*dense))
            self.add_module(f"prelu{at}", nn.PReLU(dense[1]))
            at += 1
            last = dense[1]
        heads = 3 if len(convs) == 4 else 2
        self.heads = [f"{'dense' if dense else 'conv'}{at}_{one}" for one in range(1, heads + 1)]
        for name, outputs in zip(self.heads, (2, 4, 10), strict=False):
            self.add_module(
                name, nn.Linear(last, outputs) if dense else nn.Conv2d(last, outputs, 1)
            )

    def forward(self, images: Tensor) -> list[Tensor]:
        x = images
        for number in range(1, self.stages + 1):
            x = self.get_submodule(f"prelu{number}")(self.get_submodule(f"conv{number}")(x))
            if number <= len(self.pools):
                x = nn.functional.max_pool2d(x, self.pools[number - 1], 2, ceil_mode=True)
        if self.dense:
            x = self.get_submodule(self.dense)(x.permute(0, 3, 2, 1).flatten(1))
            x = self.get_submodule(f"prelu{self.stages + 1}")(x)
        return [self.get_submodule(name)(x) for name in self.heads]


STAGES = {
    "pnet": ([(3, 10, 3), (10, 16, 3), (16, 32, 3)], [2], None),
    "rnet": ([(3, 28, 3), (28, 48, 3), (48, 64, 2)], [3, 3], (576, 128)),
    "onet": ([(3, 32, 3), (32, 64, 3), (64, 64, 3), (64, 128, 2)], [3, 3, 2], (1152, 256)),
}


def face_detector(name: str) -> nn.Module:
    """Return a trained stage: ``pnet`` (12x12 images), ``rnet`` (24x24) or ``onet`` (48x48)."""
    path = fetch("pip", "facenet-pytorch", "2.6.0") / "facenet_pytorch" / "data" / f"{name}.pt"
    model = Detector(*STAGES[name])
    model.load_state_dict(torch.load(path, weights_only=True, map_location="cpu"))
    return model.eval()
