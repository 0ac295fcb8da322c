"""Passes that start where weights have changed give what whole passes give, in less work."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bp_convert.calibration.ahead import Ahead, beside
from bp_convert.calibration.gatherer import order_of
from bp_convert.calibration.norms import Norms
from bp_convert.calibration.replay import Replay
from bp_convert.calibration.sensitivity import Trials
from bp_convert.calibration.tap import Batches
from bp_convert.graph.clone import clone
from bp_convert.graph.walk import walk
from bp_convert.kron.metric import Plain


class Block(nn.Module):
    """Writes on what it was given by others, as residual blocks do."""

    def __init__(self, width: int, *, normed: bool = False) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(width, width), nn.Linear(width, width)
        self.norm = nn.BatchNorm1d(width) if normed else nn.Identity()
        self.act = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.two(self.act(self.one(x))))
        y += x
        return torch.relu_(y)


class Net(nn.Module):
    """Blocks in a row, one of which is called twice, and a layer that is read, not called."""

    def __init__(self, depth: int = 3, *, normed: bool = False) -> None:
        super().__init__()
        self.stem = nn.Linear(5, 12)
        self.blocks = nn.Sequential(*(Block(12, normed=normed) for _ in range(depth)))
        self.again = Block(12)
        self.head = nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.again(self.again(self.blocks(self.stem(x))))
        y *= 1.5
        made: Tensor = self.head(y)
        return made


class Hidden(nn.Module):
    """Returns what it got, and leaves word with another."""

    def __init__(self, other: list[int]) -> None:
        super().__init__()
        self.inner, self.other = nn.Linear(6, 6), other

    def forward(self, x: Tensor) -> Tensor:
        self.other.append(1)
        made: Tensor = self.inner(x)
        return made


class Leaky(nn.Module):
    """Hands words from layer to layer beside what they return."""

    def __init__(self) -> None:
        super().__init__()
        self.words: list[int] = []
        self.layers = nn.ModuleList(Hidden(self.words) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        self.words.clear()
        for layer in self.layers:
            x = layer(x) + len(self.words)
        return x


def _batches(width: int = 5, count: int = 4) -> Batches:
    return [((torch.randn(9, width),), {}) for _ in range(count)]


def _all_moments(
    model: nn.Module, changed: nn.Module, batches: Batches, replay: Replay
) -> list[dict[Any, Any]]:
    """Return what the layers of each stage see while one after the other changes."""
    sites = walk(model)
    order = order_of(clone(model, apart=True), sites, batches)
    stages = [[name] for name in order.calls]
    by_name = {site.name: site for site in sites}
    ahead = Ahead(clone(model, apart=True), stages, order.calls, batches)
    norms = Norms(model, changed, batches)
    found = []
    torch.manual_seed(1)
    for number, (name,) in enumerate(stages):
        found.append(
            beside(changed, [by_name[name]], order, batches, ahead.of(number), norms, replay)
        )
        with torch.no_grad():
            weight = changed.get_submodule(name).get_parameter("weight")
            weight.add_(0.1 * torch.randn_like(weight))
    return found


@contextmanager
def _counted(model: nn.Module) -> Iterator[Counter[str]]:
    """Count how often linear layers compute."""
    counts: Counter[str] = Counter()

    def counting(name: str, forward: Any) -> Any:
        def run(x: Tensor) -> Any:
            counts.update([name])
            return forward(x)

        return run

    layers = {name: one for name, one in model.named_modules() if isinstance(one, nn.Linear)}
    for name, one in layers.items():
        vars(one)["forward"] = counting(name, one.forward)
    yield counts
    for one in layers.values():
        del vars(one)["forward"]


@pytest.mark.parametrize("make", [Net, Leaky])
def test_layers_see_what_they_see_in_whole_passes(make: Any) -> None:
    torch.manual_seed(0)
    model = make().eval()
    batches = _batches(6 if make is Leaky else 5)
    changed, plain = (clone(model, apart=True) for _ in range(2))
    whole = Replay(plain)
    whole.on = False
    with _counted(plain) as all_calls:
        expected = _all_moments(model, plain, batches, whole)
    replay = Replay(changed)
    with _counted(changed) as calls:
        found = _all_moments(model, changed, batches, replay)
    for one, two in zip(expected, found, strict=True):
        for key, moments in one.items():
            for was, now in zip(moments, two[key], strict=True):
                torch.testing.assert_close(now.mean, was.mean, rtol=1e-6, atol=1e-7)
    if make is Leaky:  # noticed at once, by a pass from the beginning
        assert not replay.on
    else:
        assert replay.on
        assert calls["stem"] < all_calls["stem"] / 2  # the first batch's passes are compared
        assert sum(calls.values()) < 0.75 * sum(all_calls.values())


def test_norms_on_the_way_are_settled() -> None:
    torch.manual_seed(0)
    model = Net(normed=True)
    batches = _batches()
    for _ in range(20):
        model(torch.randn(64, 5))
    model.eval()
    changed = clone(model, apart=True)
    replay = Replay(changed)
    found = _all_moments(model, changed, batches, replay)
    assert replay.on
    plain = clone(model, apart=True)
    whole = Replay(plain)
    whole.on = False
    expected = _all_moments(model, plain, batches, whole)
    for one, two in zip(expected, found, strict=True):
        for key, moments in one.items():
            gap = float((two[key][0].mean - moments[0].mean).norm() / moments[0].mean.norm())
            assert gap < 0.1  # those of whole passes settle batch by batch


def test_what_comes_after_changed_weights_is_computed() -> None:
    torch.manual_seed(0)
    model = Net().eval()
    replay, x = Replay(model), torch.randn(9, 5)
    with torch.no_grad():
        with replay.upto([model.head]):
            model(x)
        first = model.blocks[0].one.weight
        first.mul_(2)
        with replay.upto([model.head]):
            changed = model(x)
        assert torch.equal(changed, model(x))
        with _counted(model) as counts, replay.upto([model.stem]):  # before what is kept
            assert torch.equal(model(x), changed)
        assert counts["stem"] == 1


def test_nothing_is_kept_where_there_is_no_room() -> None:
    model = Net().eval()
    replay, x = Replay(model, limit=100), torch.randn(9, 5)
    with torch.no_grad(), _counted(model) as counts:
        for _ in range(2):
            with replay.upto([model.head]):
                model(x)
    assert counts["stem"] == 2
    assert not replay.kept


def test_a_model_is_left_as_it_was() -> None:
    model = Net().eval()
    own = model.stem.forward
    model.stem.forward = lambda x: own(x)  # type: ignore[method-assign]
    mine = model.stem.forward
    replay = Replay(model)
    with torch.no_grad(), replay.upto([model.head]):
        model(torch.randn(2, 5))
    assert model.stem.forward is mine
    assert "forward" not in vars(model.head)
    assert not model.head._forward_pre_hooks


def test_trials_give_what_whole_passes_give() -> None:
    torch.manual_seed(0)
    model, batches = Net(depth=12).eval(), _batches()
    found: list[list[float]] = []
    for on in (True, False):
        copy = clone(model, apart=True)
        trials = Trials(copy, batches)
        trials.replay.on = on
        with torch.no_grad(), _counted(copy) as counts:
            found.append(
                [
                    trials.of(site, "weight", [Plain()], [torch.zeros(site.module.in_features)])
                    for site in walk(model)
                ]
            )
        if on:
            fewer = sum(counts.values())
    assert found[0] == pytest.approx(found[1], rel=1e-6)
    assert fewer < 0.8 * sum(counts.values())


def test_of_a_chain_the_last_output_alone_is_kept() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.ReLU()) for _ in range(5))).eval()
    last, x = model[4][0], torch.randn(9, 6)
    replay = Replay(model)
    with torch.no_grad():
        with replay.upto([last]):
            expected = model(x)
        (size,) = replay.sizes.values()
        assert size == x.nbytes
        with _counted(model) as counts, replay.upto([last]):
            assert torch.equal(model(x), expected)
        assert counts == {"4.0": 1}
        model[1][0].weight.mul_(2)  # what went into it is gone: all is computed
        with replay.upto([last]):
            changed = model(x)
        assert torch.equal(changed, model(x))
        shapes: list[Any] = []
        handle = model[2].register_forward_pre_hook(lambda _, args: shapes.append(args[0].shape))
        with replay.upto([last]):  # a hook that looks on is given what it always is
            model(x)
        with replay.upto([last]):
            assert torch.equal(model(x), changed)
        handle.remove()
        assert shapes == [x.shape] * 2


class Taken(nn.Module):
    """Takes from a list that a part of it returns."""

    def __init__(self) -> None:
        super().__init__()
        self.parts, self.last = _Parts(), nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        found = self.parts(x)
        for layer in self.last:
            x = layer(x) + found.pop()
        return x


class _Parts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> list[Tensor]:
        return [self.inner(x), x, 2 * x]


class Sulky(Leaky):
    """Fails where a layer was left out."""

    def forward(self, x: Tensor) -> Tensor:
        made = super().forward(x)
        assert len(self.words) == len(self.layers)
        return made


def test_what_is_taken_from_a_list_is_there_again() -> None:
    torch.manual_seed(0)
    model, x = Taken().eval(), torch.randn(9, 6)
    replay = Replay(model)
    with torch.no_grad():
        expected = model(x)
        for _ in range(3):
            with _counted(model) as counts, replay.upto([model.last[2]]):
                assert torch.equal(model(x), expected)
    assert counts == {"last.2": 1}


def test_a_model_that_fails_so_is_run_whole() -> None:
    model = Sulky().eval()
    trials = Trials(model, _batches(6))
    site = walk(model)[2]
    with torch.no_grad():
        trials.of(site, "weight", [Plain()], [torch.zeros(6)])
    assert not trials.replay.on
