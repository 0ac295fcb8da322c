"""Our own models of other tasks, and in other precisions."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from benchmarks.zoo.entry import Call, Entry, mlp


class Ranking(nn.Module):
    """A DLRM: embedding bags, dense features, products of pairs, one output."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(n, 16, mode="sum") for n in (20, 30, 50))
        self.bottom, self.top = mlp(8, 32, 16), mlp(16 + 6, 32, 1)

    def forward(self, dense: Tensor, sparse: Tensor) -> Tensor:
        x = self.bottom(dense)
        parts = [table(sparse[:, i]) for i, table in enumerate(self.tables)]
        all_ = torch.stack([x, *parts], 1)
        pairs = all_ @ all_.transpose(1, 2)
        i, j = torch.tril_indices(4, 4, -1)
        return self.top(torch.cat([x, pairs[:, i, j]], -1)).sigmoid()


class Graph(nn.Module):
    """Messages along edges, added up by index."""

    def __init__(self) -> None:
        super().__init__()
        self.message, self.update = mlp(48, 48, 24), nn.GRUCell(24, 24)
        self.out = nn.Linear(24, 3)

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        for _ in range(2):
            start, end = edges
            sent = self.message(torch.cat([nodes[start], nodes[end]], -1))
            nodes = self.update(torch.zeros_like(nodes).index_add(0, end, sent), nodes)
        return self.out(nodes)


class Physics(nn.Module):
    """A PINN: gives the solution and its derivatives, by autograd inside the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(2, 48), nn.Tanh(), nn.Linear(48, 48), nn.Tanh(), nn.Linear(48, 1)
        )

    def forward(self, xt: Tensor) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            xt = xt.detach().requires_grad_()
            u = self.net(xt)
            (slope,) = torch.autograd.grad(u.sum(), xt, create_graph=self.training)
        return u, slope


class Regressor(nn.Module):
    """One input, one output."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(1, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


class Actor(nn.Module):
    """Policy and value of a player; a distribution inside, its sample drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp(12, 64, 64)
        self.mean, self.value = nn.Linear(64, 4), nn.Linear(64, 1)
        self.spread = nn.Parameter(torch.zeros(4))

    def forward(self, seen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = torch.tanh(self.body(seen))
        policy = torch.distributions.Normal(self.mean(x), self.spread.exp())
        move = policy.sample()
        return move, policy.log_prob(move).sum(-1), self.value(x).squeeze(-1)


class Flow(nn.Module):
    """A normalising flow of affine couplings, with its log-determinant and its inverse."""

    def __init__(self) -> None:
        super().__init__()
        self.nets = nn.ModuleList(mlp(8, 48, 16) for _ in range(3))
        for net in self.nets:
            nn.init.zeros_(net[2].weight)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        total = torch.zeros(len(x), dtype=x.dtype)
        for net in self.nets:
            a, b = x.chunk(2, -1)
            s, t = net(a).chunk(2, -1)
            x = torch.cat([b * torch.tanh(s).exp() + t, a], -1)
            total = total + torch.tanh(s).sum(-1)
        return x, total


class Quantised(nn.Module):
    """Nearest codes of a codebook, straight through."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = mlp(24, 48, 16), mlp(16, 48, 24)
        self.codes = nn.Embedding(40, 16)
        nn.init.normal_(self.codes.weight, std=0.2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        z = self.into(x)
        which = torch.cdist(z, self.codes.weight).argmin(-1)
        q = self.codes(which)
        return self.out(z + (q - z).detach()), which


class Argmax(nn.Module):
    """Integers are all that it puts out."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(24, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
        self.out = nn.Linear(64, 7)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.net(x)).argmax(-1)


class Low(nn.Module):
    """LoRA by hand: a frozen layer and a difference of low rank that starts at zero."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(32, 48)
        self.base.requires_grad_(False)
        self.A, self.B = nn.Linear(32, 4, bias=False), nn.Linear(4, 48, bias=False)
        nn.init.zeros_(self.B.weight)
        self.out = nn.Linear(48, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.relu(self.base(x) + 2 * self.B(self.A(x))))


class Hyper(nn.Module):
    """A network that makes the weights of another."""

    def __init__(self) -> None:
        super().__init__()
        self.make = mlp(6, 48, 10 * 16 + 16)
        self.out = nn.Linear(16, 3)

    def forward(self, x: Tensor, about: Tensor) -> Tensor:
        made = self.make(about)
        weight, bias = made[:, :160].view(-1, 16, 10), made[:, 160:]
        return self.out(torch.relu((weight @ x[..., None])[..., 0] + bias))


class Bilinear(nn.Module):
    """torch's own nn.Bilinear, a 1x1 convolution on vectors, lazy layers made before."""

    def __init__(self) -> None:
        super().__init__()
        self.pair = nn.Bilinear(12, 16, 32)
        self.lazy = nn.LazyLinear(48)
        self.out = nn.Linear(48, 4)

    def forward(self, one: Tensor, two: Tensor) -> Tensor:
        return self.out(torch.relu(self.lazy(torch.relu(self.pair(one, two)))))


def _bilinear() -> nn.Module:
    model = Bilinear()
    model(torch.zeros(2, 12), torch.zeros(2, 16))
    return model


class Pictures(nn.Module):
    """A small convolutional net in another precision or memory format."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.ReLU()
        )
        self.out = nn.Linear(32, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.body(x).mean((2, 3)))


class Mixed(nn.Module):
    """A body in bfloat16 between ends in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(24, 48)
        self.body = mlp(48, 64, 48).bfloat16()
        self.out = nn.Linear(48, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.body(self.first(x).bfloat16()).float())


def _edges() -> Call:
    return (), {"nodes": torch.randn(7, 24), "edges": torch.randint(0, 7, (2, 15))}


ENTRIES = (
    Entry("own/dlrm", Ranking, ("float32:1x8", "int64:1x3x2<20")),
    Entry("own/graph", Graph, example=_edges),
    Entry("own/pinn", Physics, ("2",)),
    Entry("own/regressor", Regressor, ("1",)),
    Entry("own/actor-critic", Actor, ("12",)),
    Entry("own/flow", Flow, ("16",)),
    Entry("own/vector-quantised", Quantised, ("24",)),
    Entry("own/argmax", Argmax, ("24",)),
    Entry("own/lora-by-hand", Low, ("32",)),
    Entry("own/hyper-network", Hyper, ("float32:1x10", "float32:1x6")),
    Entry("own/bilinear-lazy", _bilinear, ("float32:1x12", "float32:1x16")),
    Entry("own/double", lambda: Pictures().double(), ("3x12x12",)),
    Entry("own/half", lambda: Pictures().half(), ("3x12x12",)),
    Entry("own/bfloat16", lambda: Pictures().bfloat16(), ("3x12x12",)),
    Entry("own/mixed-precision", Mixed, ("24",)),
    Entry(
        "own/channels-last", lambda: Pictures().to(memory_format=torch.channels_last), ("3x12x12",)
    ),
)
