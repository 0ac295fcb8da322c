"""One small model per topology, with the inputs that it takes.

Widths are all different where they may be, so that a mistaken equality shows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence


class Chain(nn.Module):
    """Linear layers in a row, a norm between."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 12)
        self.norm = nn.LayerNorm(12)
        self.second = nn.Linear(12, 20)
        self.head = nn.Linear(20, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.second(self.norm(torch.relu(self.first(x))))))


class Residual(nn.Module):
    """Two convolutions whose outputs are added share a width; batch norms follow."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.inner = nn.Conv2d(8, 12, 3, padding=1)
        self.outer = nn.Conv2d(12, 8, 1)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.stem(x)))
        x = x + self.outer(torch.relu(self.inner(x)))
        return self.head(x.mean((2, 3)))


class Concat(nn.Module):
    """Two branches side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Conv2d(3, 8, 1)
        self.right = nn.Conv2d(3, 12, 3, padding=1)
        self.joined = nn.Conv2d(20, 16, 1)
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        both = torch.cat([self.left(x), self.right(x)], 1)
        return self.head(self.joined(both).amax((2, 3)))


class Flatten(nn.Module):
    """A convolution, flattened into a linear layer, as in the paper's S-VGG."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.hidden = nn.Linear(8 * 4 * 4, 24)
        self.head = nn.Linear(24, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.hidden(self.conv(x).relu().flatten(1))))


class Mixed(nn.Module):
    """A convolution and a linear layer that are added must share one factor."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(3, 8, 1)
        self.linear = nn.Linear(3, 8)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:  # (N, 3, T)
        return self.head(self.conv(x).mean(2) + self.linear(x.mean(2)))


class Depthwise(nn.Module):
    """A depthwise convolution grows with its input."""

    def __init__(self) -> None:
        super().__init__()
        self.expand = nn.Conv2d(3, 12, 1, bias=False)
        self.depth = nn.Conv2d(12, 12, 3, padding=1, groups=12, bias=False)
        self.norm = nn.BatchNorm2d(12)
        self.project = nn.Conv2d(12, 8, 1)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.project(self.norm(self.depth(self.expand(x)))).mean((2, 3)))


class Grouped(nn.Module):
    """A grouped convolution keeps its groups and its own width; its input grows."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 1)
        self.grouped = nn.Conv2d(8, 12, 3, padding=1, groups=2)
        self.last = nn.Conv2d(12, 16, 1)
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.last(self.grouped(self.stem(x)).relu()).mean((2, 3)))


class Shared(nn.Module):
    """One module under two names, called on its own output."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(6, 12)
        self.once = nn.Linear(12, 12)
        self.again = self.once
        self.head = nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.again(self.once(self.stem(x)).relu()))


class Tied(nn.Module):
    """A language model whose decoder is its word table."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(30, 12)
        self.inner = nn.Linear(12, 20)
        self.outer = nn.Linear(20, 12)
        self.decoder = nn.Linear(12, 30, bias=False)
        self.decoder.weight = self.words.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.decoder(self.outer(self.inner(self.words(tokens)).relu()))


class Recurrent(nn.Module):
    """Embedding, LSTM of two layers in both directions, head."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(30, 12)
        self.lstm = nn.LSTM(12, 10, num_layers=2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(20, 5)

    def forward(self, tokens: Tensor) -> Tensor:
        states, _ = self.lstm(self.words(tokens))
        return self.head(states[:, -1])


class Packed(nn.Module):
    """An LSTM over packed sequences with an initial state made in the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = 10
        self.words = nn.Embedding(30, 12)
        self.lstm = nn.LSTM(12, self.hidden, batch_first=True)
        self.head = nn.Linear(self.hidden, 5)

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        start = torch.zeros(1, len(tokens), self.hidden)
        packed = pack_padded_sequence(
            self.words(tokens), lengths, batch_first=True, enforce_sorted=False
        )
        states, _ = self.lstm(packed, (start, start))
        padded, _ = pad_packed_sequence(states, batch_first=True)
        return self.head(padded.sum(1))


class Projected(nn.Module):
    """A GRU, and a cell that makes its last state one more step."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(6, 12)
        self.gru = nn.GRU(12, 10, batch_first=True)
        self.cell = nn.GRUCell(10, 8)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:  # (N, T, 6)
        states, _ = self.gru(self.stem(x))
        return self.head(self.cell(states[:, -1]))


class TwoInputs(nn.Module):
    """Image features added to words, as in the paper's captioner."""

    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Linear(7, 12)
        self.words = nn.Embedding(30, 16)
        self.language = nn.LSTM(16, 10, batch_first=True)
        self.meaning = nn.Linear(10, 12)
        self.head = nn.Linear(12, 30)

    def forward(self, image: Tensor, tokens: Tensor) -> Tensor:
        states, _ = self.language(self.words(tokens))
        return self.head(self.image(image).relu()[:, None] + self.meaning(states))


class Keyword(nn.Module):
    """Integer input by keyword, a mask that decides the way, a dictionary as output."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(30, 12)
        self.places = nn.Parameter(torch.zeros(1, 16, 12))
        self.inner = nn.Linear(12, 20)
        self.head = nn.Linear(20, 5)

    def forward(self, *, tokens: Tensor, mask: Tensor | None = None) -> dict[str, Tensor]:
        x = self.words(tokens) + self.places[:, : tokens.shape[1]]
        if mask is not None and not bool(mask.all()):
            x = x * mask[..., None]
        inner = self.inner(x).relu()
        return {"logits": self.head(inner.mean(1))}


class Unknown(nn.Module):
    """An operation that only works at one width: the layers around it keep theirs."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 12)
        self.second = nn.Linear(12, 16)
        self.third = nn.Linear(16, 20)
        self.head = nn.Linear(20, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(self.first(x).relu())
        table = torch.ones(16, 16)
        x = x @ table
        return self.head(self.third(x).relu())


class Branching(nn.Module):
    """A forward that depends on the values it computes cannot be followed."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 12)
        self.head = nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if x.sum() > 0:
            x = x * 2
        return self.head(x)


class Normed(nn.Module):
    """GroupNorm, PReLU, InstanceNorm and a transposed convolution follow."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.group = nn.GroupNorm(2, 8)
        self.slope = nn.PReLU(8)
        self.up = nn.ConvTranspose2d(8, 6, 2, 2)
        self.instance = nn.InstanceNorm2d(6, affine=True)
        self.head = nn.Conv2d(6, 5, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.instance(self.up(self.slope(self.group(self.conv(x))))))


class Split(nn.Module):
    """Halves of a layer go two ways, then channels are shuffled."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 1)
        self.side = nn.Conv2d(4, 4, 3, padding=1)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        left, right = self.stem(x).chunk(2, dim=1)
        x = torch.cat([left, self.side(right)], 1)
        n, c, h, w = x.shape
        x = x.view(n, 2, c // 2, h, w).transpose(1, 2).reshape(n, c, h, w)
        return self.head(x.mean((2, 3)))


class HardView(nn.Module):
    """A view with numbers in it fixes the layer before."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.hidden = nn.Linear(128, 24)
        self.head = nn.Linear(24, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        x = x.view(-1, 128)
        return self.head(self.hidden(x).relu())


class Attention(nn.Module):
    """Self-attention written out: heads stay, each head grows, a scale is a plain number."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.head_dim = 3, 8
        self.stem = nn.Linear(6, 24)
        self.qkv = nn.Linear(24, 72)
        self.out = nn.Linear(24, 24)
        self.head = nn.Linear(24, 5)

    def forward(self, x: Tensor) -> Tensor:  # (N, T, 6)
        x = self.stem(x)
        n, t, width = x.shape
        qkv = self.qkv(x).reshape(n, t, 3, self.num_heads, self.head_dim)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v)
        x = x + self.out(mixed.transpose(1, 2).reshape(n, t, width))
        return self.head(x.mean(1))


class Fused(nn.Module):
    """nn.MultiheadAttention uses the weight of its projection without calling it."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(6, 24)
        self.attention = nn.MultiheadAttention(24, 3, batch_first=True)
        self.mlp = nn.Linear(24, 24)
        self.head = nn.Linear(24, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return self.head((x + self.mlp(x)).mean(1))


class Functional(nn.Module):
    """The weight of one layer is used without calling the layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 12)
        self.used = nn.Linear(12, 12)
        self.head = nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.head(x + F.linear(x, self.used.weight, self.used.bias))


class Sides(nn.Module):
    """A second output in train mode only, and a layer that is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(6, 12)
        self.side = nn.Linear(12, 20)
        self.extra = nn.Linear(20, 5)
        self.spare = nn.Linear(12, 7)
        self.head = nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        x = self.stem(x).relu()
        if self.training:
            return self.head(x), self.extra(self.side(x))
        return self.head(x)


class Stateful(nn.Module):
    """A forward that writes on its module, as caches and counters do."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(6, 12)
        self.head = nn.Linear(12, 5)
        self.calls = 0
        self.history: list[Tensor] = []
        self.register_buffer("mean", torch.zeros(12))
        self.mean: Tensor

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        self.calls += 1
        self.history.append(x)
        self.mean = self.mean * 0.9 + x.mean(0) * 0.1
        return self.head(x - self.mean)


@dataclass(frozen=True)
class Tiny:
    """A model's class and its inputs: shapes of floats, or bounds of integers behind them."""

    make: type[nn.Module]
    floats: tuple[tuple[int, ...], ...] = ()
    tokens: tuple[int, ...] | None = None
    keyword: str | None = None

    def inputs(self, batch: int = 2) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
        """Draw example inputs."""
        args = [torch.randn(batch, *shape) for shape in self.floats]
        kwargs = {}
        if self.tokens is not None:
            ids = torch.randint(0, 30, (batch, *self.tokens))
            if self.keyword is None:
                args.append(ids)
            else:
                kwargs[self.keyword] = ids
        if self.make is Packed:
            args.append(torch.tensor([self.tokens[0], *[3] * (batch - 1)]))  # type: ignore[index]
        if self.make is Keyword:
            kwargs["mask"] = torch.ones(batch, *self.tokens, dtype=torch.bool)  # type: ignore[misc]
        return tuple(args), kwargs


_IMAGE = ((3, 4, 4),)
TINY: dict[str, Tiny] = {
    "chain": Tiny(Chain, ((6,),)),
    "residual": Tiny(Residual, _IMAGE),
    "concat": Tiny(Concat, _IMAGE),
    "flatten": Tiny(Flatten, _IMAGE),
    "mixed": Tiny(Mixed, ((3, 9),)),
    "depthwise": Tiny(Depthwise, _IMAGE),
    "grouped": Tiny(Grouped, _IMAGE),
    "shared": Tiny(Shared, ((6,),)),
    "tied": Tiny(Tied, tokens=(7,)),
    "recurrent": Tiny(Recurrent, tokens=(7,)),
    "packed": Tiny(Packed, tokens=(7,)),
    "projected": Tiny(Projected, ((7, 6),)),
    "two inputs": Tiny(TwoInputs, ((7,),), tokens=(5,)),
    "keyword": Tiny(Keyword, tokens=(9,), keyword="tokens"),
    "unknown": Tiny(Unknown, ((6,),)),
    "branching": Tiny(Branching, ((6,),)),
    "normed": Tiny(Normed, _IMAGE),
    "split": Tiny(Split, _IMAGE),
    "hard view": Tiny(HardView, _IMAGE),
    "attention": Tiny(Attention, ((7, 6),)),
    "fused": Tiny(Fused, ((7, 6),)),
    "functional": Tiny(Functional, ((6,),)),
    "sides": Tiny(Sides, ((6,),)),
    "stateful": Tiny(Stateful, ((6,),)),
}
