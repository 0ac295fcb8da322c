"""A segment that is no block runs without what is before it where that gives the same."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bp_convert.reconstruction.bench import Bench, relay_of
from bp_convert.reconstruction.call_order import Segment


class Net(nn.Module):
    """Convolutions in a row, with norms and activations in place, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Conv2d(1, 6, 3)
        self.norm = nn.BatchNorm2d(6)
        self.two = nn.Conv2d(6, 8, 3)
        self.three = nn.Conv2d(8, 8, 3)
        self.head = nn.Linear(8, 4)
        self.calls = 0
        self.one.register_forward_hook(self.count)

    def count(self, *_: object) -> None:
        self.calls += 1

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu_(self.norm(self.one(x)))
        x = F.relu_(self.two(x))
        return self.head(self.late(x).mean((2, 3)))  # type: ignore[no-any-return]

    def late(self, x: Tensor) -> Tensor:
        return F.relu_(self.three(x))


class Across(Net):
    """What the last convolution puts out goes beside what came before it."""

    def late(self, x: Tensor) -> Tensor:
        return F.relu(self.three(x)) + x[..., 1:-1, 1:-1]


class Tied(Net):
    """The first and the last convolution share their bias."""

    def __init__(self) -> None:
        super().__init__()
        self.two = nn.Conv2d(6, 8, 3, padding=1)
        self.two.bias = self.three.bias


class Branching(Net):
    """How it goes on hangs on the first activations."""

    def late(self, x: Tensor) -> Tensor:
        return super().late(x) * (2.0 if float(x.detach().abs().sum()) > 0 else 1.0)


def bench_of(kind: type[Net], *names: str, behind: str | None = None) -> tuple[Bench, Net]:
    torch.manual_seed(0)
    source, small = kind().eval(), kind().eval()
    parameters = [p for name in names for p in small.get_submodule(name).parameters()]
    batches = tuple(((torch.randn(n, 1, 12, 12),), {}) for n in (5, 5, 3))
    return Bench(source, small, Segment(names, behind=behind), parameters, batches), small


@pytest.mark.parametrize(
    ("names", "behind"), [(("three",), "head"), (("two", "three"), "head"), (("three",), None)]
)
def test_layers_before_it_are_left_out_and_nothing_changes(
    names: tuple[str, ...], behind: str | None
) -> None:
    bench, small = bench_of(Net, *names, behind=behind)
    assert bench.front is not None
    assert len(bench.front.made) == 2  # noted once for each form of batches
    found = []
    for front in (bench.front, None):
        bench.front = front
        small.zero_grad()
        kept = small.one.weight.detach().clone()
        gap = torch.stack([bench.squares(number)[0].sum() for number in range(3)]).sum()
        gap.backward()
        found.append([gap.detach(), *(small.get_submodule(n).weight.grad for n in names)])  # type: ignore[union-attr]
        assert torch.equal(small.one.weight, kept)
    for late, whole in zip(*found, strict=True):
        assert torch.allclose(late, whole, rtol=1e-5)
    assert "forward" not in small.one.__dict__


def test_it_does_run_late() -> None:
    bench, small = bench_of(Net, "three", behind="head")
    assert bench.front is not None
    with torch.no_grad():
        small.one.weight.fill_(float("nan"))  # what is not run is not seen
    assert bench.error([0]) > 0
    bench.front = None
    assert torch.isnan(torch.tensor(bench.error([0])))
    bench.close()


@pytest.mark.parametrize("kind", [Across, Tied, Branching])
def test_the_whole_model_runs_where_more_of_it_goes_in(kind: type[Net]) -> None:
    bench, _ = bench_of(kind, "three", behind=None if kind is Across else "head")
    assert bench.front is None
    assert bench.error([0, 1, 2]) > 0


def test_nothing_is_left_out_before_the_first_layer() -> None:
    bench, _ = bench_of(Net, "one", "norm", behind="two")
    assert bench.front is None


class Counting(nn.Linear):
    runs = 0

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        return torch.tanh(super().forward(x)) + x


class Blocks(nn.Module):
    """Blocks in a row and what stands behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.blocks = nn.ModuleList(Counting(8, 8) for _ in range(3))
        self.pooler = nn.Linear(8, 8)
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        every = []
        for block in self.blocks:
            x = block(x)
            every.append(x)
        return self.head(torch.tanh(self.pooler(self.pooled(every))))  # type: ignore[no-any-return]

    def pooled(self, every: list[Tensor]) -> Tensor:
        return every[-1][:, 0]


class Mixed(Blocks):
    """What stands behind reads what all blocks put out."""

    def pooled(self, every: list[Tensor]) -> Tensor:
        return torch.stack(every).mean(0)[:, 0]


@pytest.mark.parametrize(("kind", "late"), [(Blocks, True), (Mixed, False)])
def test_what_is_behind_blocks_is_set_up_from_the_last_block_on(
    kind: type[Blocks], late: bool
) -> None:
    torch.manual_seed(0)
    source, small = kind().eval(), kind().eval()
    sizes = (5, 5, 5, 5, 5, 3)
    batches = tuple(((torch.randn(n, 3, 4),), {}) for n in sizes)
    relays = relay_of(source, batches), relay_of(small, batches)
    block = Segment(("blocks.2",), block=True)
    Bench(source, small, block, [*small.blocks[2].parameters()], batches, relays).close()
    for behind in ("head", None):  # the second time, too, nothing else has asked the relays
        with torch.no_grad():
            small.blocks[2].weight.mul_(1.5)  # type: ignore[operator, union-attr]
        tail = Segment(("pooler",), behind=behind)
        before = source.blocks[0].runs
        found = Bench(source, small, tail, [*small.pooler.parameters()], batches, relays)
        assert found.front is not None
        # A batch of each form; the one taken for the last is of a form of its own.
        assert source.blocks[0].runs - before == (2 if late else 2 + len(batches))  # type: ignore[operator]
        whole = Bench(source, small, tail, [*small.pooler.parameters()], batches)
        numbers = range(len(batches))
        assert found.error(numbers) == pytest.approx(whole.error(numbers), rel=1e-5)
        assert found.error(numbers) > 0.01
