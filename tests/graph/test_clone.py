"""Copies whose functions speak of the copy, and runs that leave nothing behind."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import bp_convert
from bp_convert.errors import PlanError
from bp_convert.graph.clone import clone
from bp_convert.graph.running import evaluating, in_mode, same_draws

FULL: dict[str, Any] = {"rank": 10**6, "convert_anyway": True, "convert_head": True}


class Tapped(nn.Module):
    """Reads what a hook on one of its parts has seen."""

    def __init__(self, seen: dict[str, Tensor] | None = None) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 12), nn.Tanh())
        self.seen: dict[str, Tensor] = {}
        self.body[1].register_forward_hook(lambda _, __, y: self.seen.update(y=y))
        outside = {} if seen is None else seen
        self.body[0].register_forward_hook(lambda _, __, y: outside.update(x=y))
        self.me = weakref.ref(self)
        self.lock = threading.Lock()

        def count(n: int) -> Any:
            return count(n - 1) if n else self

        self.count = count
        self.half = functools.partial(count, 2)
        self.note = self.seen.setdefault
        plain = self.body[0].forward
        self.body[0].forward = lambda x: 2 * plain(x)

    def forward(self, x: Tensor) -> Tensor:
        with self.lock:
            self.body(x)
        return self.seen["y"]


def test_functions_of_a_copy_reach_the_copy() -> None:
    outside: dict[str, Tensor] = {}
    model = Tapped(outside)
    copy = clone(model)
    assert copy.me() is copy
    assert copy.count(3) is copy
    assert copy.half() is copy
    assert copy.note.__self__ is copy.seen
    with torch.no_grad():
        copy.body[0].weight.zero_()
        copy.body[0].bias.fill_(0.25)
    assert torch.equal(copy(torch.ones(1, 8)), torch.full((1, 12), 0.5).tanh())
    assert not model.seen
    assert set(outside) == {"x"}  # what is the user's stays the user's
    assert model.count(3) is model


def test_a_copy_apart_reaches_nothing_outside() -> None:
    outside: dict[str, Tensor] = {}
    model = Tapped(outside)
    copy = clone(model, apart=True)
    assert copy(torch.ones(1, 8)).shape == (1, 12)
    assert not outside
    assert not model.seen


def test_tensors_with_a_graph_are_copied() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    model.kept = [model[0].weight * 2]
    copy = clone(model)
    assert torch.equal(copy.kept[0], model.kept[0])
    assert copy.kept[0] is not model.kept[0]


class Caching(nn.Module):
    """Caches on its class, in its Python module, and by a decorator."""

    tables: ClassVar[dict[int, Tensor]] = {}
    last: ClassVar[Any] = None

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 9), nn.Linear(9, 6)

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        if y.shape[-1] not in Caching.tables:
            Caching.tables[y.shape[-1]] = torch.linspace(0, 1, y.shape[-1], dtype=y.dtype)
        if Caching.last is None:
            Caching.last = y.new_ones(y.shape[-1])
        LIST.append(y.detach().sum())
        return self.b(y * Caching.tables[y.shape[-1]] * Caching.last * table(y.shape[-1]))


LIST: list[Tensor] = []


@functools.lru_cache
def table(size: int) -> Tensor:
    return torch.arange(size) / size


def test_nothing_without_data_is_left_outside_of_the_model() -> None:
    torch.manual_seed(0)
    model = Caching().eval()
    small, _ = bp_convert.convert(model, inputs=["6"], **FULL)
    for one in [*Caching.tables.values(), Caching.last, table(9), *LIST]:
        assert type(one) is Tensor
        assert not one.is_meta
    x = torch.randn(3, 6)
    torch.testing.assert_close(small(x), model(x), rtol=1e-4, atol=1e-5)


def test_what_cannot_be_copied_is_named_before_any_work() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4)))
    model[1].file = Path("/dev/null").open()  # noqa: SIM115
    with model[1].file, pytest.raises(PlanError, match="cannot be copied") as got:
        bp_convert.plan(model, inputs=["4"])
    assert got.value.where == "1.file"


class Odd(nn.Linear):
    """Its train and eval return nothing."""

    def train(self, mode: bool = True) -> Any:
        super().train(mode)


def test_modes_are_put_back_and_draws_are_equal() -> None:
    model = nn.Sequential(Odd(4, 4), nn.Dropout())
    model[1].training = False
    with in_mode(model, training=True):
        assert model[1].training
    assert model[0].training
    assert not model[1].training
    assert evaluating(Odd(2, 2)).training is False
    before = torch.random.get_rng_state()
    with same_draws(3):
        one = torch.rand(4)
    with same_draws(3):
        assert torch.equal(torch.rand(4), one)
    assert torch.equal(torch.random.get_rng_state(), before)
    small, _ = bp_convert.convert(Odd(9, 9), inputs=["9"], **FULL)
    assert isinstance(small, bp_convert.BPLinear)


@pytest.mark.parametrize(
    "make",
    [threading.Lock, threading.RLock, threading.Condition, threading.Event, threading.Semaphore,
     lambda: threading.Barrier(2), threading.local],
)  # fmt: skip
def test_what_threads_wait_for_is_shared(make: Callable[[], Any]) -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    model.wait = make()
    assert clone(model).wait is model.wait


def test_an_iterator_is_named_where_it_stands() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)))
    model[1][0].odd = (n for n in range(3))
    with pytest.raises(PlanError) as caught:
        clone(model)
    assert caught.value.where == "1.0.odd"
