"""What layers get in the source, caught for several stages in one pass."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bp_convert.calibration.ahead import Ahead
from bp_convert.calibration.tap import Tap


class _Net(nn.Module):
    """Four layers; ``inplace`` writes on what the second got."""

    def __init__(self, *, inplace: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.inplace = inplace
        self.passes = 0

    def forward(self, x: Tensor) -> Tensor:
        self.passes += 1
        for number, layer in enumerate(self.layers):
            before, x = x, layer(x).tanh()
            if self.inplace and number == 1:
                before.mul_(2)
        return x


STAGES = [[f"layers.{n}"] for n in range(4)]
CALLS = {f"layers.{n}": 1 for n in range(4)}


def _batches() -> list[Any]:
    draw = torch.Generator().manual_seed(1)
    return [((torch.randn(8, 6, generator=draw),), {}) for _ in range(3)]


def _expected(model: nn.Module, stage: int) -> list[Tensor]:
    with Tap(model, STAGES[stage], CALLS) as tap:
        return [tap.run(b, n)[STAGES[stage][0]][0].clone() for n, b in enumerate(_batches())]


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("limit", [0, 3 * 8 * 6 * 4 * 2, 10**9])
def test_every_stage_gets_what_it_got_alone(limit: int, inplace: bool) -> None:
    model = _Net(inplace=inplace).eval()
    ahead = Ahead(model, STAGES, CALLS, _batches(), limit)
    for stage in range(4):
        found = [one[STAGES[stage][0]][0] for one in ahead.of(stage)]
        assert all(map(torch.equal, found, _expected(model, stage)))


@pytest.mark.parametrize(("limit", "groups"), [(0, 4), (3 * 8 * 6 * 4 * 2, 2), (10**9, 1)])
def test_one_run_serves_as_many_stages_as_fit(limit: int, groups: int) -> None:
    model = _Net().eval()
    ahead = Ahead(model, STAGES, CALLS, _batches(), limit)
    for stage in range(4):
        ahead.of(stage)
        ahead.of(stage)  # a second round of the same
    assert model.passes == groups * (1 + 3)  # one that tells the sizes, and one for each batch


def test_what_is_written_on_later_is_copied_in_a_second_run() -> None:
    model = _Net(inplace=True).eval()
    ahead = Ahead(model, STAGES, CALLS, _batches(), 10**9)
    for stage in range(4):
        ahead.of(stage)
    assert model.passes == 2 * 1 + (3 + 1)


def test_longer_batches_than_the_first_count() -> None:
    model = _Net().eval()
    sorted_ones = [((torch.zeros(rows, 6),), {}) for rows in (1, 8, 8)]
    ahead = Ahead(model, STAGES, CALLS, sorted_ones, 3 * 6 * 4 * 4)  # as if all were like the first
    ahead.of(0)
    assert set(ahead.held) == {0}


class _First(nn.Module):
    """Layers that get one token of many: views of a tensor that is much larger."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        made = [layer((x + number)[:, 0]) for number, layer in enumerate(self.layers)]
        return torch.stack(made)


def test_a_view_counts_as_what_it_is_a_part_of() -> None:
    batches: list[Any] = [((torch.zeros(8, 20, 6),), {})]
    ahead = Ahead(_First().eval(), STAGES, CALLS, batches, 4 * 8 * 6 * 4)
    ahead.of(0)
    assert set(ahead.held) == {0}
