"""Our own models whose way through their layers depends on data, on chance or on the mode."""

from __future__ import annotations

import random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks.zoo.entry import Entry, mlp


class Experts(nn.Module):
    """A mixture of experts, each on the rows that the router gives it."""

    def __init__(self, experts: int = 4) -> None:
        super().__init__()
        self.before = mlp(32, 64, 32)
        self.router = nn.Linear(32, experts, bias=False)
        self.experts = nn.ModuleList(mlp(32, 64, 32) for _ in range(experts))
        self.out = nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.before(x)
        flat = x.reshape(-1, x.shape[-1])
        weight, which = self.router(flat).softmax(-1).max(-1)
        made = torch.zeros_like(flat)
        for i, expert in enumerate(self.experts):
            rows = (which == i).nonzero()[:, 0]
            if len(rows):
                made = made.index_add(0, rows, expert(flat[rows]) * weight[rows, None])
        return self.out((flat + made).view_as(x))


class EarlyExit(nn.Module):
    """Stops at the first head that is sure of all examples."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(mlp(32, 48, 32) for _ in range(3))
        self.heads = nn.ModuleList(nn.Linear(32, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        scores = x
        for block, head in zip(self.blocks, self.heads, strict=True):
            x = x + block(x)
            scores = head(x)
            if not self.training and float(scores.softmax(-1).amax(-1).min()) > 0.9:
                break
        return scores


class LayerDrop(nn.Module):
    """Skips layers by chance in train mode."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(32), *mlp(32, 64, 32)) for _ in range(4)
        )
        self.out = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if self.training and torch.rand([]) < 0.5:
                continue
            x = x + layer(x)
        return self.out(x)


class PythonChance(LayerDrop):
    """Draws from Python's own generator, in eval mode too."""

    def forward(self, x: Tensor) -> Tensor:
        order = list(self.layers)
        random.shuffle(order)
        for layer in order:
            x = x + layer(x) * random.random()
        return self.out(x)


class Noisy(nn.Module):
    """Monte-Carlo dropout and Gumbel noise in eval mode."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(24, 48), nn.Linear(48, 48), nn.Linear(48, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(F.relu(self.a(x)), 0.3, training=True)
        x = F.relu(self.b(x)) + 0.1 * torch.randn(x.shape, dtype=x.dtype)
        return F.gumbel_softmax(self.c(x), tau=2.0)


class Checkpointed(nn.Module):
    """Recomputes its blocks; re-entrant checkpoints give the first of them no gradient."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.blocks = nn.ModuleList(mlp(32, 64, 32) for _ in range(2))
        self.out = nn.Linear(32, 6)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            more = checkpoint(block, x, use_reentrant=self.reentrant) if self.training else block(x)
            x = x + more
        return self.out(x)


class AuxiliaryHead(nn.Module):
    """Gives another structure in train mode than in eval mode; one head has no use in eval."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.extra = mlp(24, 48, 32), nn.Linear(32, 5)
        self.out = nn.Linear(32, 7)

    def forward(self, x: Tensor) -> Any:
        x = self.body(x)
        return {"out": self.out(x), "aux": self.extra(x)} if self.training else self.out(x)


class Unused(nn.Module):
    """Holds layers that its forward never calls."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(24, 48), nn.Linear(48, 6)
        self.old_head = nn.Linear(48, 12)
        self.decoder = nn.LSTM(48, 24)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(F.relu(self.a(x)))


ENTRIES = (
    Entry("own/experts", Experts, ("6x32",)),
    Entry("own/early-exit", EarlyExit, ("32",)),
    Entry("own/layer-drop", LayerDrop, ("5x32",)),
    Entry("own/python-chance", PythonChance, ("5x32",)),
    Entry("own/noise-in-eval", Noisy, ("24",)),
    Entry("own/checkpoint-reentrant", lambda: Checkpointed(True), ("32",)),
    Entry("own/checkpoint", lambda: Checkpointed(False), ("32",)),
    Entry("own/auxiliary-head", AuxiliaryHead, ("24",)),
    Entry("own/unused-layers", Unused, ("24",)),
)
