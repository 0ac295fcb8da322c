"""Our own models that are called, answer, or are written in ways of their own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.zoo.entry import Call, Entry, mlp


@dataclass
class Answer:
    """What a model puts out."""

    scores: Tensor
    features: Tensor | None = None


class Pair(NamedTuple):
    """What a model puts out."""

    mean: Tensor
    spread: Tensor


@dataclass(kw_only=True)
class Question:
    """What a model takes in."""

    words: Tensor
    numbers: Tensor


class Dataclasses(nn.Module):
    """A dataclass in, a dataclass out."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(60, 24)
        self.layers, self.out = mlp(24 + 8, 48, 32), nn.Linear(32, 4)

    def forward(self, question: Question) -> Answer:
        x = torch.cat([self.words(question.words).mean(1), question.numbers], -1)
        features = self.layers(x)
        return Answer(scores=self.out(features), features=features)


class KeywordOnly(nn.Module):
    """Takes keywords only, and calls its own layers by keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(24, 48), nn.LayerNorm(48), nn.Linear(48, 6)

    def forward(self, *, image: Tensor, scale: float = 1.0) -> Pair:
        x = self.norm(input=self.a(input=image))
        return Pair(mean=self.b(input=torch.relu(x)) * scale, spread=x.std(-1))


class Lists(nn.Module):
    """Takes a list of tensors of several widths and gives a nested structure back."""

    def __init__(self) -> None:
        super().__init__()
        self.sides = nn.ModuleList(nn.Linear(width, 32) for width in (16, 24, 40))
        self.out = nn.ModuleDict({"small": nn.Linear(32, 4), "large": nn.Linear(32, 48)})

    def forward(self, levels: list[Tensor]) -> dict[str, Any]:
        x = torch.stack([side(one) for side, one in zip(self.sides, levels, strict=True)])
        x = x.relu().sum(0)
        return {
            "heads": [head(x) for head in self.out.values()],
            "size": len(levels),
            "x": (x, None),
        }


class Mapping(nn.Module):
    """Takes a dictionary as its one argument."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 32), nn.Linear(24, 32)
        self.out = nn.Linear(32, 4)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return self.out(torch.tanh(self.a(batch["left"]) + self.b(batch["right"])))


class ByType(nn.Module):
    """Asks its layers what type they are."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            [nn.Linear(24, 48), nn.ReLU(), nn.Linear(48, 48), nn.Linear(48, 6)]
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
            if isinstance(layer, nn.Linear) and x.shape[-1] == 48:
                x = x + 1
        return x


class Subclass(nn.Linear):
    """A Linear that does more."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).clamp(min=-1) * 2


class Subclasses(nn.Module):
    """Layers of the user's own classes beside torch's."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = Subclass(24, 48), nn.Linear(48, 48), nn.Linear(48, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(torch.relu(self.b(self.a(x))))


class Functional(nn.Module):
    """Reads weights without calling the layers that hold them."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(24, 48), nn.Linear(48, 48), nn.Linear(48, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(F.linear(x, self.a.weight, self.a.bias))
        x = x @ self.b.weight.t() + self.b.bias
        if x.sum() > 1e9:
            x = x * 2
        return self.c(x)


class TrainsQuietly(nn.Module):
    """Its train() keeps norms in eval mode and returns nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.out = nn.Conv2d(16, 8, 3, padding=1)
        self.last = nn.Conv2d(8, 2, 1)

    def train(self, mode: bool = True) -> None:  # type: ignore[override]
        super().train(mode)
        self.norm.eval()

    def eval(self) -> None:  # type: ignore[override]
        super().train(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.out(torch.relu(self.norm(self.conv(x))))))


class Delegates(nn.Module):
    """Looks up what it lacks in what it wraps; class attributes and properties beside."""

    widths: ClassVar[dict[str, int]] = {"into": 24, "middle": 48}
    scale = 0.5

    def __init__(self) -> None:
        super().__init__()
        self.inner = Functional()
        self.head = nn.Linear(6, 24)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)

    @property
    def last(self) -> nn.Linear:
        """The last layer of what is wrapped."""
        return self.inner.c

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.a(x)) * self.scale
        return self.head(self.last(torch.relu(self.b(x))))


class ExtraState(nn.Module):
    """A tensor as extra state, a counter in plain Python."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(24, 48), nn.Linear(48, 6)
        self.shift = torch.linspace(-1, 1, 48)
        self.calls = 0

    def get_extra_state(self) -> Tensor:
        return self.shift

    def set_extra_state(self, state: Tensor) -> None:
        self.shift = state

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.b(torch.relu(self.a(x) + self.shift))


class Collections(nn.Module):
    """ParameterList and ParameterDict, and buffers of every dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList([torch.ones(48), torch.randn(48)])
        self.by_name = nn.ParameterDict({"shift": torch.randn(6), "mix": torch.randn(6, 6)})
        self.a, self.b = nn.Linear(24, 48), nn.Linear(48, 6)
        self.register_buffer("keep", torch.rand(48) > 0.2)
        self.register_buffer("phase", torch.randn(48, dtype=torch.cfloat))
        self.register_buffer("order", torch.randperm(48))
        self.register_buffer("shade", torch.rand(48).half(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)[:, self.order] * self.scales[0] + self.scales[1]
        x = torch.where(self.keep, (x * self.phase).abs(), x) + self.shade.to(x.dtype)
        return self.b(x) @ self.by_name["mix"] + self.by_name["shift"]


class Generates(nn.Module):
    """Yields its parts; forward is made of them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(i): nn.Linear(24, 24) for i in range(3)})

    def parts(self, x: Tensor) -> Iterator[Tensor]:
        """Yield what each layer makes."""
        for layer in self.layers.values():
            x = torch.tanh(layer(x))
            yield x

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(self.parts(x))


class InPlace(nn.Module):
    """Writes into its input and into what its layers made."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(24, 48), nn.Linear(48, 48), nn.Linear(48, 6)

    def forward(self, x: Tensor) -> Tensor:
        x.mul_(2).add_(1)
        y = self.a(x).relu_()
        y[:, :10] = 0
        return self.c(F.relu(self.b(y), inplace=True))


class Widths(nn.Module):
    """Attributes that disagree with the weights, as after pruning by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(24, 64), nn.Linear(64, 48), nn.Linear(48, 6)
        self.a.weight = nn.Parameter(self.a.weight[:48].detach().clone())
        self.a.bias = nn.Parameter(self.a.bias[:48].detach().clone())
        self.b.weight = nn.Parameter(self.b.weight[:, :48].detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        return self.c(torch.relu(self.b(torch.relu(self.a(x)))))


def _question() -> Call:
    words, numbers = torch.randint(0, 60, (3, 5)), torch.randn(3, 8)
    return (Question(words=words, numbers=numbers),), {}


def _levels() -> Call:
    return ([torch.randn(3, width) for width in (16, 24, 40)],), {}


def _batch() -> Call:
    return ({"left": torch.randn(3, 16), "right": torch.randn(3, 24)},), {}


def _keywords() -> Call:
    return (), {"image": torch.randn(3, 24), "scale": 2.0}


ENTRIES = (
    Entry("own/dataclasses", Dataclasses, example=_question),
    Entry("own/keyword-only", KeywordOnly, ("image=float32:1x24",)),
    Entry("own/keyword-with-number", KeywordOnly, example=_keywords),
    Entry("own/list-of-tensors", Lists, example=_levels),
    Entry("own/dictionary-in", Mapping, example=_batch),
    Entry("own/isinstance", ByType, ("24",)),
    Entry("own/subclasses", Subclasses, ("24",)),
    Entry("own/weights-read", Functional, ("24",)),
    Entry("own/train-returns-none", TrainsQuietly, ("3x8x8",)),
    Entry("own/getattr-delegates", Delegates, ("24",)),
    Entry("own/extra-state", ExtraState, ("24",)),
    Entry("own/parameter-collections", Collections, ("24",)),
    Entry("own/generator-forward", Generates, ("24",)),
    Entry("own/in-place", InPlace, ("24",)),
    Entry("own/stale-widths", Widths, ("24",)),
)
