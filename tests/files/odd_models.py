"""Models that pickle in unusual ways; importable, so that another process can load them.

python -m tests.files.odd_models FOLDER   loads what FOLDER/index.json lists, and says what it saw
"""

from __future__ import annotations

import enum
import functools
import json
import logging
import re
import sys
import uuid
import warnings
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, prune

Pair = namedtuple("Pair", "left right")


class Colour(enum.Enum):
    RED = 1


@dataclass
class Config:
    width: int = 3


class Notes(dict[str, Any]):
    """A dictionary of its own class, with attributes."""


class Steps(list[Any]):
    """The same of a list."""


class Counts(OrderedDict[str, int]):
    """The same of an ordered dictionary."""


class Outer(nn.Module):
    class Inner(nn.Module):
        class Deep(nn.Linear):
            pass

        def __init__(self) -> None:
            super().__init__()
            self.fc = self.Deep(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.fc(x)
            return out

    def __init__(self) -> None:
        super().__init__()
        self.inner = self.Inner()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x)
        return out


class Bound(nn.Module):
    """Keeps methods: as attributes, as hooks, and in partial functions."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.run = self.fc.forward
        self.twice = functools.partial(self.times, 2.0)
        self.make = Bound.shifted
        self.handle = self.fc.register_forward_hook(self.hook)
        self.fc.register_forward_pre_hook(double)
        self.register_load_state_dict_pre_hook(self.before)
        self._register_state_dict_hook(Bound.after)

    def hook(self, module: nn.Module, args: Any, out: Tensor) -> Tensor:
        return self.twice(out)

    def before(self, *args: Any) -> None: ...

    @staticmethod
    def after(module: nn.Module, state: Any, prefix: str, metadata: Any) -> Any:
        return state

    @classmethod
    def shifted(cls, x: Tensor) -> Tensor:
        return x + 1

    def times(self, by: float, x: Tensor) -> Tensor:
        return by * x

    def forward(self, x: Tensor) -> Tensor:
        return self.make(self.fc(x) + self.run(x))


def double(module: nn.Module, args: Any) -> Any:
    return (2 * args[0],)


class Holds(nn.Module):
    """Keeps a value, and shows it when it runs."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.value = value

    def forward(self, x: Tensor) -> tuple[Tensor, str]:
        return self.fc(x), shown(self.value)


class Calls(Holds):
    """Keeps a function of tensors."""

    def forward(self, x: Tensor) -> tuple[Tensor, str]:
        return self.value(self.fc(x)), ""


def shown(value: Any) -> str:
    kind = type(value).__name__
    if isinstance(value, np.ndarray):
        return f"{kind} {value.dtype} {value.shape} {value.tolist()}"
    if isinstance(value, torch.Generator):
        return str(torch.rand(3, generator=value).tolist())
    if isinstance(value, Tensor):
        return str(value.tolist())
    more = vars(value) if isinstance(value, Notes | Steps | Counts) else ""
    return re.sub(" at 0x[0-9a-f]+", "", f"{kind} {value!r} {more}")


def with_attributes(value: Any) -> Any:
    value.note = "kept"
    return value


class Cached(nn.Module):
    """Keeps what its last forward computed, with its graph."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.weight_used: Tensor = self.fc.weight * 2

    def forward(self, x: Tensor) -> Tensor:
        self.weight_used = self.fc.weight * 2
        return x @ self.weight_used


class Forgetful(nn.Linear):
    """Leaves a weight out of its pickle."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.register_buffer("scale", torch.ones(2))

    def __getstate__(self) -> dict[str, Any]:
        state = dict(vars(self))
        state["_buffers"] = {}
        return state


def normed(how: Any, *args: Any) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the old ones are deprecated, and much used
        return nn.Sequential(nn.Conv1d(4, 4, 1), how(nn.Conv1d(4, 4, 1), *args))


def seeded() -> torch.Generator:
    generator = torch.Generator()
    generator.manual_seed(3)
    torch.rand(5, generator=generator)
    return generator


def compiled() -> nn.Module:
    model: Any = torch.compile(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), backend="eager")
    return nn.Sequential(model, nn.Linear(4, 4))


def shared() -> nn.Module:
    """Slices of one buffer, twice the same slice, and an alias of a module."""
    flat = torch.randn(100)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].weight = nn.Parameter(flat[:16].view(4, 4))
    model[1].weight = nn.Parameter(flat[16:32].view(4, 4))
    model[2].weight = nn.Parameter(flat[16:32].view(4, 4))
    model.append(model[0])
    return model


def two_hooked() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4))
    model[0].register_forward_pre_hook(double)
    model[0].register_forward_pre_hook(double)
    return model


VALUES: dict[str, Any] = {
    "array": lambda: np.arange(6.0).reshape(2, 3),
    "array of words": lambda: np.array(["a", "bc"]),
    "array without elements": lambda: np.zeros((0, 3), np.int16),
    "array in another order": lambda: np.asfortranarray(np.arange(6, dtype=">i4").reshape(2, 3)),
    "number": lambda: np.float32(1.5),
    "numbers in a dict": lambda: {"p": [np.float64(0.1), np.int64(3), np.bool_(True)]},
    "dtype": lambda: np.dtype("float16"),
    "numpy's class": lambda: np.float32,
    "defaultdict": lambda: defaultdict(list, {"a": [1]}),
    "nested defaultdict": lambda: defaultdict(
        functools.partial(defaultdict, int), {1: Counter("a")}
    ),
    "deque": lambda: deque([1, 2], maxlen=3),
    "dict subclass": lambda: with_attributes(Notes(a=1, b=[2])),
    "list subclass": lambda: with_attributes(Steps([1, 2])),
    "ordered subclass": lambda: with_attributes(Counts(a=1)),
    "namedtuple": lambda: Pair(1, (2, 3)),
    "enum": lambda: Colour.RED,
    "dataclass": lambda: Config(5),
    "namespace": lambda: SimpleNamespace(a=1),
    "sets": lambda: [frozenset({1}), {2}],
    "plain": lambda: [slice(1, 2), range(3), ..., NotImplemented, type(None), 1j, b"b", 10**30],
    "classes": lambda: [int, float, nn.ReLU, Colour, Outer.Inner],
    "logger": lambda: logging.getLogger("odd"),
    "pattern": lambda: re.compile("a+"),
    "uuid": lambda: uuid.UUID(int=3),
    "torch's values": lambda: [torch.bfloat16, torch.device("cpu"), torch.Size([2]), torch.strided],
    "memory format": lambda: torch.channels_last,
    "generator": seeded,
    "complex": lambda: torch.ones(2, dtype=torch.complex64),
    "sparse": lambda: torch.eye(2).to_sparse().coalesce().values(),
}
FUNCTIONS: dict[str, Any] = {
    "relu": F.relu,
    "torch.relu": torch.relu,
    "torch.square": torch.square,
    "interpolate": functools.partial(F.interpolate, scale_factor=2.0),
    "softmax": functools.partial(F.softmax, dim=-1),
    "fft": functools.partial(torch.fft.fft, dim=-1),
    "normalize": F.normalize,
    "own": functools.partial(torch.add, other=1),
}
MODELS: dict[str, Any] = {
    "nested": Outer,
    "bound": Bound,
    "cached": Cached,
    "shared": shared,
    "hooks": two_hooked,
    "compiled": compiled,
    "old weight norm": lambda: normed(nn.utils.weight_norm),
    "old spectral norm": lambda: normed(nn.utils.spectral_norm),
    "weight norm": lambda: normed(parametrizations.weight_norm),
    "spectral norm": lambda: normed(parametrizations.spectral_norm),
    "orthogonal": lambda: nn.Sequential(parametrizations.orthogonal(nn.Linear(4, 4))),
    "pruned": lambda: normed(prune.l1_unstructured, "weight", 0.5),
    "pruned twice": lambda: normed(
        lambda one: prune.random_unstructured(prune.l1_unstructured(one, "bias", 1), "weight", 0.3)
    ),
    "parametrized lstm": lambda: parametrizations.weight_norm(nn.LSTM(4, 4), "weight_hh_l0"),
    **{f"function: {name}": functools.partial(Calls, one) for name, one in FUNCTIONS.items()},
}
MODELS.update(
    {
        f"value: {name}": functools.partial(lambda make: Holds(make()), one)
        for name, one in VALUES.items()
    }
)


def outcome(name: str, model: nn.Module) -> list[str]:
    """Run a model; return what came out, as words that two processes can compare."""
    shape = {"interpolate": (1, 2, 4)}.get(name.partition(": ")[2], (4, 4))
    x = torch.linspace(-1, 1, int(np.prod(shape))).view(shape)
    model.eval()
    with torch.no_grad():
        out = model(x)
    flat = out if isinstance(out, tuple) else (out,)
    return [str(one.tolist()) if isinstance(one, Tensor) else str(one) for one in flat]


def main(folder: Path) -> None:
    import bp_convert

    torch.set_num_threads(1)
    seen: dict[str, Any] = {}
    for name, (file, trust) in json.loads((folder / "index.json").read_text()).items():
        try:
            seen[name] = outcome(name, bp_convert.load(folder / file, trust=trust))
        except Exception as problem:
            seen[name] = [f"{type(problem).__name__}: {problem}"]
    (folder / "seen.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
