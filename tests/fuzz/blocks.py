"""Parts of random architectures: each keeps the form of what it is given, but for its width."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Residual(nn.Module):
    """Adds what a part makes to what it was given."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, x: Tensor) -> Tensor:
        return x + self.part(x)


class Branches(nn.Module):
    """Two parts side by side: concatenated, multiplied or added."""

    def __init__(self, one: nn.Module, two: nn.Module, how: str, axis: int) -> None:
        super().__init__()
        self.one, self.two = one, two
        self.how, self.axis = how, axis

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.one(x), self.two(x)
        if self.how == "cat":
            return torch.cat([a, b], self.axis)
        return a * torch.sigmoid(b) if self.how == "gate" else a + b


class Twice(nn.Module):
    """One part, called twice and held under two names."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part
        self.again = part

    def forward(self, x: Tensor) -> Tensor:
        return self.again(torch.tanh(self.part(x)))


class Tied(nn.Module):
    """Two layers with one weight."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(width, width), nn.Linear(width, width, bias=False)
        self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x)))


class Transposed(nn.Module):
    """A layer, and its weight read again by hand, the other way round."""

    def __init__(self, width: int, middle: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, middle)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(torch.tanh(self.layer(x)), self.layer.weight.t())


class ByType(nn.Module):
    """Asks a layer for its type."""

    def __init__(self, layer: nn.Module, kind: type[nn.Module]) -> None:
        super().__init__()
        self.layer, self.kind = layer, kind

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        return y * 2 if isinstance(self.layer, self.kind) else y - 1


class ReadsWidth(nn.Module):
    """Uses attributes of the layer that it holds."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) / self.layer.in_features + self.layer.out_features


class Louder(nn.Linear):
    """A Linear of the user's own class."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class Keyword(nn.Module):
    """Calls what it holds by keyword."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(input=x)


class Cached(nn.Module):
    """Makes a table at its first call and keeps it, as an attribute or as a buffer."""

    def __init__(self, part: nn.Module, as_buffer: bool) -> None:
        super().__init__()
        self.part = part
        if as_buffer:
            self.register_buffer("table", None)
        else:
            self.table: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None or self.table.shape != x.shape[1:]:
            count = x[0].numel()
            self.table = torch.linspace(0.5, 1.5, count, dtype=x.dtype).view(x.shape[1:])
        return self.part(x * self.table)


class Counts(nn.Module):
    """Counts its calls in a buffer and in plain Python."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.log: list[tuple[int, ...]] = []

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.log.append(tuple(x.shape))
        return self.part(x)


class Tapped(nn.Module):
    """Goes on with what a hook has seen; the hook closes over the part itself."""

    def __init__(self, part: nn.Module, after: nn.Module) -> None:
        super().__init__()
        self.part, self.after = part, after
        self.seen: dict[str, Tensor] = {}
        self.part.register_forward_hook(lambda m, i, o: self.seen.update(out=o))

    def forward(self, x: Tensor) -> Tensor:
        self.part(x)
        return self.after(self.seen["out"])


class Halved:
    """A hook that is an object: halves what a layer puts out."""

    def __call__(self, module: nn.Module, inputs: Any, output: Any) -> Any:
        return output / 2 if isinstance(output, Tensor) else output


class Noise(nn.Module):
    """Draws in train mode, or always."""

    def __init__(self, always: bool) -> None:
        super().__init__()
        self.always = always

    def forward(self, x: Tensor) -> Tensor:
        if self.training or self.always:
            return x + 0.1 * torch.randn(x.shape, dtype=x.dtype)
        return x


class Drop(nn.Module):
    """Leaves its part out by chance in train mode."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, x: Tensor) -> Tensor:
        return x if self.training and torch.rand(()) < 0.5 else x + self.part(x)


class Quiet(nn.Module):
    """Runs its part without gradients."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            return self.part(x)


class Routed(nn.Module):
    """Rows go to one of two parts, as a router says."""

    def __init__(self, width: int, one: nn.Module, two: nn.Module) -> None:
        super().__init__()
        self.router = nn.Linear(width, 2)
        self.parts = nn.ModuleList([one, two])

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        which = self.router(flat).argmax(-1)
        made = torch.zeros_like(flat)
        for number, part in enumerate(self.parts):
            rows = (which == number).nonzero()[:, 0]
            if len(rows):
                made = made.index_add(0, rows, part(flat[rows]))
        return made.view_as(x)


class Unpacked(nn.Module):
    """A recurrent layer, from steps to steps, with the batch on either axis."""

    def __init__(self, layer: nn.RNNBase, packed: bool) -> None:
        super().__init__()
        self.layer, self.packed = layer, packed

    def forward(self, x: Tensor) -> Tensor:
        first = self.layer.batch_first
        if self.packed:
            lengths = torch.arange(x.shape[0]) % x.shape[1] + 1
            rolled = nn.utils.rnn.pack_padded_sequence(
                x if first else x.transpose(0, 1), lengths, first, enforce_sorted=False
            )
            made, _ = nn.utils.rnn.pad_packed_sequence(
                self.layer(rolled)[0], first, total_length=x.shape[1]
            )
        else:
            made = self.layer(x if first else x.transpose(0, 1))[0]
        return made if first else made.transpose(0, 1)


class Swapped(nn.Module):
    """Runs a part with the last two axes exchanged."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, x: Tensor) -> Tensor:
        return self.part(x.transpose(1, 2)).transpose(1, 2)


class Attend(nn.Module):
    """nn.MultiheadAttention over its own steps."""

    def __init__(self, width: int, weights: bool) -> None:
        super().__init__()
        self.layer = nn.MultiheadAttention(width, 2, batch_first=True)
        self.weights = weights

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x, x, x, need_weights=self.weights)[0]


class Mean(nn.Module):
    """From steps or maps to one row an example."""

    def __init__(self, axes: tuple[int, ...]) -> None:
        super().__init__()
        self.axes = axes

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(self.axes)


class InFunctions(nn.Module):
    """Keeps its part where torch does not look: in a partial, a list, a dictionary, a closure."""

    def __init__(self, part: nn.Module, how: str) -> None:
        super().__init__()
        self.part = part
        self.how = how
        holders: dict[str, Any] = {
            "partial": functools.partial(part),
            "list": [part],
            "dictionary": {"part": part},
            "closure": lambda x: part(x),
            "method": part.forward,
        }
        self.held = holders[how]

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "list":
            return self.held[0](x)
        return self.held["part"](x) if self.how == "dictionary" else self.held(x)


class Recomputed(nn.Module):
    """Checkpoints its part in train mode."""

    def __init__(self, part: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.part, self.reentrant = part, reentrant

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return self.part(x)
        return checkpoint(self.part, x, use_reentrant=self.reentrant)


class InPlace(nn.Module):
    """Writes into what its part made."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, x: Tensor) -> Tensor:
        y = self.part(x) + 0
        y[:1] = 0
        return y.mul_(0.5)


class Exits(nn.Module):
    """Goes one way or the other by what it sees."""

    def __init__(self, one: nn.Module, two: nn.Module) -> None:
        super().__init__()
        self.one, self.two = one, two

    def forward(self, x: Tensor) -> Tensor:
        return self.one(x) if float(x.detach().mean()) > 0.013 else self.two(x)


class Sliced(nn.Module):
    """Runs the beginning of a row of layers, then the rest by their names."""

    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.row = nn.Sequential(*parts)

    def forward(self, x: Tensor) -> Tensor:
        x = self.row[:1](x)
        for name, part in self.row.named_children():
            if name != "0":
                x = part(x)
        return x


class Delegates(nn.Module):
    """Finds in its part what it lacks itself."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.inner = nn.ModuleDict({"layer": part})

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


class Functional(nn.Module):
    """Reads the weight of a layer that it never calls."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.layer.weight.t() + self.layer.bias


class Own(nn.Module):
    """A weight of its own, and a complex buffer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mix = nn.Parameter(torch.randn(width, width) / width**0.5)
        self.register_buffer("phase", torch.randn(width, dtype=torch.cfloat))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.mix) * self.phase.abs().to(x.dtype)


@dataclass
class Answer:
    """What a model puts out."""

    scores: Tensor
    more: Tensor


class Pair(NamedTuple):
    """What a model puts out."""

    scores: Tensor
    more: Tensor


WRAPPERS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "tensor": lambda y, x: y,
    "tuple": lambda y, x: (y, x),
    "list": lambda y, x: [y, [x, None]],
    "dict": lambda y, x: {"scores": y, "more": {"x": x}},
    "dataclass": lambda y, x: Answer(scores=y, more=x),
    "named tuple": lambda y, x: Pair(y, x),
    "integers": lambda y, x: {"scores": y, "best": y.argmax(-1)},
}


class Net(nn.Module):
    """Parts in a row, then a head; its output in one of several structures."""

    def __init__(self, parts: list[nn.Module], head: nn.Module, wrapped: str) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)
        self.head = head
        self.wrapped = wrapped

    def forward(self, x: Tensor) -> Any:
        for part in self.parts:
            x = part(x)
        return WRAPPERS[self.wrapped](self.head(x), x)


class ByKeyword(Net):
    """Takes its input by keyword only."""

    def forward(self, *, x: Tensor) -> Any:
        return super().forward(x)
