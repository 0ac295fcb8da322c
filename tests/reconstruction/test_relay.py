"""Blocks are handed what they are given by the block before, where that gives the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bp_convert.reconstruction.bench import Bench, relay_of
from bp_convert.reconstruction.call_order import Segment
from bp_convert.reconstruction.relay import Relay


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.runs = 0

    def forward(self, x: Tensor, mask: Tensor, times: int = 1) -> tuple[Tensor, None]:
        self.runs += 1
        return torch.tanh(self.linear(x)) * mask * times + x, None


class Chain(nn.Module):
    """Blocks that stand behind each other."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.blocks = nn.ModuleList(Masked() for _ in range(4))
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        mask = (x[..., :1] > 0).float()
        x = self.first(x)
        for number, block in enumerate(self.blocks):
            x = self.between(x, number)
            x, _ = block(x, mask, times=self.times(x))
        return self.head(x)  # type: ignore[no-any-return]

    def between(self, x: Tensor, number: int) -> Tensor:
        return x

    def times(self, x: Tensor) -> int:
        return 1


class Scaled(Chain):
    def between(self, x: Tensor, number: int) -> Tensor:
        return 2 * x


class Counted(Chain):
    """What it is given besides tensors hangs on the batch."""

    def times(self, x: Tensor) -> int:
        return len(x)


BATCHES: Any = tuple(((torch.randn(n, 3, 4),), {}) for n in (5, 5, 4))


def _relay(kind: type[Chain]) -> tuple[Relay, Chain]:
    torch.manual_seed(0)
    model = kind().eval()
    return relay_of(model, BATCHES), model


def _given(relay: Relay, name: str) -> list[Any]:
    cases = relay.inputs_of(name)
    return [cases[number] for number in range(len(BATCHES))]


@pytest.mark.parametrize("kind", [Chain, Scaled, Counted])
def test_what_a_block_is_given_is_what_its_model_gives_it(kind: type[Chain]) -> None:
    relay, model = _relay(kind)
    for number in range(4):
        name = f"blocks.{number}"
        found = _given(relay, name)
        alone, _ = relay_of(model, BATCHES), None
        for one, two in zip(found, _given(alone, name), strict=True):
            (x, mask), (y, other) = one[0], two[0]
            assert torch.equal(x, y)
            assert torch.equal(mask, other)
            assert one[1] == two[1]
        with torch.no_grad():
            model.blocks[number].linear.weight.mul_(1.5)  # type: ignore[union-attr, operator]
    relay.close()


@pytest.mark.parametrize(("kind", "late"), [(Chain, True), (Scaled, False), (Counted, False)])
def test_only_the_block_before_runs_where_that_is_enough(kind: type[Chain], late: bool) -> None:
    relay, model = _relay(kind)
    relay.inputs_of("blocks.0")
    relay.inputs_of("blocks.1")
    runs = model.blocks[0].runs
    relay.inputs_of("blocks.2")
    more = model.blocks[0].runs - runs  # type: ignore[operator]
    assert more == (2 if late else len(BATCHES) + (1 if kind is Scaled else 2))


def test_a_block_that_is_left_out_is_no_help_to_the_next() -> None:
    relay, model = _relay(Chain)
    relay.inputs_of("blocks.0")
    found = _given(relay, "blocks.2")
    for one, two in zip(found, _given(relay_of(model, BATCHES), "blocks.2"), strict=True):
        assert torch.equal(one[0][0], two[0][0])


def test_a_bench_wants_what_the_source_puts_out() -> None:
    torch.manual_seed(0)
    source, small = Chain().eval(), Chain().eval()
    relays = relay_of(source, BATCHES), relay_of(small, BATCHES)
    for number in range(4):
        block = small.blocks[number]
        segment = Segment((f"blocks.{number}",), block=True)
        late = Bench(source, small, segment, [*block.parameters()], BATCHES, relays)
        whole = Bench(source, small, segment, [*block.parameters()], BATCHES)
        assert late.alone
        assert late.error([0, 1, 2]) == pytest.approx(whole.error([0, 1, 2]), rel=1e-5)
        assert late.error([0, 1, 2]) > 0.01
