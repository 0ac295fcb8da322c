"""Our own models with what is shared, frozen, hooked, cached or kept in odd places."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from benchmarks.zoo.entry import Entry, mlp


class Frozen(nn.Module):
    """A backbone without gradients under a head that learns."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(3, 16, 3, 2, 1), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.ReLU()
        )
        self.backbone.requires_grad_(False)
        self.head = mlp(32, 48, 5)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            seen = self.backbone(x)
        return self.head(seen.mean((2, 3)))


class Shared(nn.Module):
    """One block called three times, and one weight under two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.block = mlp(32, 64, 32)
        self.a, self.b = nn.Linear(32, 32), nn.Linear(32, 32)
        self.b.weight = self.a.weight
        self.out = nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = x + self.block(x)
        return self.out(torch.relu(self.a(x)) + self.b(x))


class Transposed(nn.Module):
    """An auto-encoder whose decoder is the encoder's weight, transposed by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.middle = nn.Linear(40, 24), nn.Linear(24, 24)
        self.bias = nn.Parameter(torch.zeros(40))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.middle(torch.relu(self.into(x))))
        return F.linear(x, self.into.weight.t(), self.bias)


class HookClosure(nn.Module):
    """Collects features by a hook that closes over the model itself."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
        self.head = nn.Linear(64, 10)
        self.seen: dict[str, Tensor] = {}
        self.backbone[1].register_forward_hook(lambda m, i, o: self.seen.update(mid=o))

    def forward(self, x: Tensor) -> Tensor:
        self.backbone(x)
        return self.head(self.seen["mid"])


class Scaled(nn.Module):
    """Multiplies what a layer puts out."""

    def __init__(self, by: float) -> None:
        super().__init__()
        self.by = by

    def __call__(self, module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        return output * self.by


class HookObject(nn.Module):
    """Hooks that change an input and an output; one is an object, one a method."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(24, 48), nn.Linear(48, 48), nn.Linear(48, 6)
        self.b.register_forward_hook(Scaled(0.5))
        self.c.register_forward_pre_hook(self.before)
        self.offset = nn.Parameter(torch.ones(48))

    def before(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (inputs[0] + self.offset,)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(torch.relu(self.b(torch.relu(self.a(x)))))


class Closure(nn.Module):
    """Keeps layers in functions and lists that torch does not know of."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(24, 48), nn.Linear(48, 48), nn.Linear(48, 6)
        self.steps = [self.a, torch.relu, self.b, torch.relu, self.c]
        self.by_name = {"last": self.c}

    def forward(self, x: Tensor) -> Tensor:
        for step in self.steps[:-1]:
            x = step(x)
        return self.by_name["last"](x)


class Grid(nn.Module):
    """A grid that is made at the first call and again when the picture's size changes."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.out = nn.Conv2d(3, 32, 3, padding=1), nn.Conv2d(32, 16, 1)
        self.shape, self.grid = None, torch.empty(0)
        self.register_buffer("count", torch.zeros(1, dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        y = self.out(self.conv(x).relu())
        if self.shape != y.shape:
            self.shape = y.shape
            self.grid = torch.arange(y.shape[-1], dtype=y.dtype)
        self.count += 1
        return y + self.grid


class Renormed(nn.Module):
    """A table that renormalises itself whenever it is read."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(60, 32, max_norm=1.0)
        self.layers = mlp(32, 64, 4)

    def forward(self, ids: Tensor) -> Tensor:
        return self.layers(self.words(ids).mean(1))


def _flat() -> nn.Module:
    """Return layers whose weights are slices of one buffer."""
    model = nn.Sequential(
        nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 5)
    )
    flat = parameters_to_vector(model.parameters()).detach().clone()
    vector_to_parameters(flat, model.parameters())
    return model


ENTRIES = (
    Entry("own/frozen-backbone", Frozen, ("3x16x16",)),
    Entry("own/shared-blocks", Shared, ("32",)),
    Entry("own/transposed-decoder", Transposed, ("40",)),
    Entry("own/hook-closure", HookClosure, ("32",)),
    Entry("own/hook-closure-ran", HookClosure, ("32",), ran=True),
    Entry("own/hook-objects", HookObject, ("24",)),
    Entry("own/plain-lists", Closure, ("24",)),
    Entry("own/grid-cached", Grid, ("3x8x8",)),
    Entry("own/grid-cached-ran", Grid, ("3x8x8",), ran=True),
    Entry("own/embedding-max-norm", Renormed, ("int64:1x6<60",)),
    Entry("own/flat-buffer", _flat, ("32",)),
)
