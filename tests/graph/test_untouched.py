"""Analysis leaves the model, torch and the random state as they were, whatever happens."""

from __future__ import annotations

import math
import random
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bp_convert
from bp_convert.graph.walk import walk
from bp_convert.verify import fingerprint_of_data
from bp_convert.widths.widen import widen
from tests.tiny_models import TINY, Stateful


def state(model: nn.Module) -> list[Any]:
    """List everything that a model holds, by identity."""
    found: list[Any] = []
    for name, module in model.named_modules():
        found.append((name, id(module), module.training, sorted(vars(module))))
        found += [
            (key, id(t), t._version) for key, t in module._parameters.items() if t is not None
        ]
        found += [(key, id(t), t._version) for key, t in module._buffers.items() if t is not None]
        found += [
            (key, value) for key, value in vars(module).items() if isinstance(value, int | str)
        ]
        found += [len(module._forward_hooks), len(module._forward_pre_hooks)]
    return found


@pytest.mark.parametrize("name", TINY)
def test_model_is_only_read(name: str) -> None:
    tiny = TINY[name]
    model = tiny.make()
    model.eval()
    next(model.children()).train()  # a mixture of modes
    args, kwargs = tiny.inputs()
    values = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    before = state(model)
    targets = {site.name: site.kind.name for site in walk(model)}
    widen(model, args, kwargs, alpha=2, targets=targets)
    assert state(model) == before
    for key, tensor in model.state_dict().items():
        torch.testing.assert_close(tensor, values[key], rtol=0, atol=0)


def test_caches_and_counters_stay_empty() -> None:
    model = Stateful()
    mean = model.mean
    widen(model, (torch.randn(2, 6),), {}, alpha=2, targets={"stem": "Linear"})
    assert model.calls == 0
    assert model.history == []
    assert model.mean is mean


@pytest.mark.parametrize("name", ["chain", "branching"])
def test_torch_and_random_state_are_left_alone(name: str) -> None:
    tiny = TINY[name]
    args, kwargs = tiny.inputs()
    model = tiny.make()
    torch.manual_seed(3)
    random.seed(3)
    wanted = (torch.rand(2), random.random())
    torch.manual_seed(3)
    random.seed(3)
    root = math.sqrt
    widen(model, args, kwargs, alpha=2, targets={})
    torch.testing.assert_close(torch.rand(2), wanted[0])
    assert random.random() == wanted[1]
    assert math.sqrt is root
    assert "__float__" not in vars(torch.SymInt)
    assert torch.backends.mha.get_fastpath_enabled()
    assert torch.is_grad_enabled()
    assert type(torch.empty(1)) is torch.Tensor


def test_inputs_are_not_written_on() -> None:
    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(6, 5)

        def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
            ids.add_(1)
            return self.head(x.mul_(2)) * ids[:, None]

    x, ids = torch.ones(2, 6), torch.zeros(2, dtype=torch.long)
    widen(InPlace(), (x, ids), {}, alpha=2, targets={"head": "Linear"})
    assert bool((x == 1).all())
    assert bool((ids == 0).all())


def test_no_weight_is_needed() -> None:
    """A model on the meta device has shapes only, and that is enough."""
    tiny = TINY["residual"]
    with torch.device("meta"):
        model = tiny.make()
    args, kwargs = tiny.inputs()
    plan = widen(model, args, kwargs, alpha=2, targets={"stem": "Conv2d", "outer": "Conv2d"})
    assert plan.failure is None
    assert plan.targets["stem"].outputs[1] == 32


class Counts(nn.Module):
    """Counts its calls in a buffer and keeps a running mean, in eval mode too."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = nn.Linear(16, 24), nn.Linear(24, 16), nn.Linear(16, 4)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(24))
        self.log: list[Any] = []
        log = self.log
        self.two.register_forward_hook(lambda _, __, y: log.append(y.shape))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.one(x).relu()
        self.calls += 1
        self.mean.mul_(0.9).add_(hidden.detach().mean(0), alpha=0.1)
        return self.three(self.two(hidden).tanh())


class Some(Counts):
    """Gives out as many rows as its numbers say."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.one(x)
        return self.three(self.two(hidden[hidden.sum(-1) > 0]))


class Scripted(Counts):
    """Holds parts that are scripted."""

    def __init__(self) -> None:
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.act = torch.jit.script(nn.ReLU())
            self.two = torch.jit.script(nn.Linear(24, 16))

    def forward(self, x: Tensor) -> Tensor:
        return self.three(self.two(self.act(self.one(x))))


class Rescaled(Counts):
    """Divides a weight of its own once, in eval mode, as RWKV does."""

    done = False

    def forward(self, x: Tensor) -> Tensor:
        if not self.training and not self.done:
            with torch.no_grad():
                self.two.weight.div_(4)
            self.done = True
        return self.three(4 * self.two(self.one(x)).tanh())


@pytest.mark.parametrize("make", [Counts, Some, Scripted, Rescaled])
def test_widening_writes_on_no_model(make: type[Counts]) -> None:
    torch.manual_seed(0)
    model = make().eval()
    before = fingerprint_of_data(model), len(model.log)
    written = ["two"] if make is Rescaled else []
    small, report = bp_convert.convert(
        model, inputs=["16"], alpha=2, convert_anyway=True, exclude=written
    )
    assert (fingerprint_of_data(model), len(model.log)) == before
    assert any(layer.action == "replaced" for layer in report.layers)
    assert small(torch.randn(5, 16)).shape[1] == 4
    assert all(one.is_leaf for one in small.parameters())
