from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from bp_convert.calibration.gatherer import gather, order_of
from bp_convert.calibration.sensitivity import FEWEST, LOST, MOST, Trials, truncated
from bp_convert.graph.walk import walk
from bp_convert.kron.metric import Full
from tests.oracles import spread_moment
from tests.search.models import Words, cnn, images, mlp, vectors


class Weighed(nn.Module):
    """Two branches, of which the second counts a hundredth."""

    def __init__(self) -> None:
        super().__init__()
        self.loud, self.quiet = nn.Linear(24, 16), nn.Linear(24, 16)
        self.lost = nn.Linear(24, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.loud(x) + 0.01 * self.quiet(x) + 0 * self.lost(x)


def _sensitivities(model: nn.Module, x: Tensor) -> dict[tuple[str, str], float]:
    batches = [((part,), {}) for part in x.split(32)]
    sites = walk(model)
    moments = gather(model, sites, batches, order_of(model, sites, batches))
    trials = Trials(model, batches)
    found = {}
    for site in sites:
        for role in site.kind.choices(site.module, site.kind.widths(site.module)):
            own = moments[site.name, role]
            count = 2 if getattr(site.module, "bidirectional", False) else 1
            own = [own[i * len(own) // count] for i in range(count)] if len(own) > 1 else own
            found[site.name, role] = trials.of(
                site, role, [one.metric() for one in own], [one.mean for one in own]
            )
    return found


def test_what_counts_more_is_more_sensitive() -> None:
    torch.manual_seed(1)
    found = _sensitivities(Weighed(), vectors(128, 24))
    loud, quiet, lost = (found[name, "weight"] for name in ("loud", "quiet", "lost"))
    assert loud > 5 * quiet
    assert quiet >= lost == FEWEST


@pytest.mark.parametrize("make", [lambda: (mlp(24, 36, 8), vectors(64, 24)), lambda: (
    cnn(8), images(32)), lambda: (Words(), torch.randint(1, 90, (16, 9)))])  # fmt: skip
def test_the_copy_is_left_as_it_was_and_bounds_hold(make: object) -> None:
    model, x = make()  # type: ignore[operator]
    before = {n: t.clone() for n, t in model.state_dict().items()}
    found = _sensitivities(model, x)
    assert all(FEWEST <= one <= MOST for one in found.values())
    assert all(torch.equal(before[n], t) for n, t in model.state_dict().items())
    assert len(set(found.values())) > 1
    again = _sensitivities(model, x)
    assert found == again


def test_a_weight_of_zeros_and_data_of_zeros_count_alike() -> None:
    model = mlp(24, 36, 8)
    with torch.no_grad():
        model.get_parameter("0.weight").zero_()
    assert _sensitivities(model, vectors(32, 24))["0", "weight"] == 1
    found = _sensitivities(mlp(24, 36, 8), torch.zeros(32, 24))
    assert all(FEWEST <= one <= MOST for one in found.values())


def test_the_weights_come_back_after_an_error() -> None:
    model = mlp(24, 36, 8)
    x = vectors(32, 24)
    batches = [((x,), {})]
    sites = walk(model)
    moments = gather(model, sites, batches, order_of(model, sites, batches))
    trials = Trials(model, batches)
    before = {n: t.clone() for n, t in model.state_dict().items()}

    def fail(*_: object) -> None:
        raise ZeroDivisionError

    model[1].register_forward_hook(fail)  # type: ignore[operator]
    (moment,) = moments["0", "weight"]
    with pytest.raises(Exception, match="ZeroDivisionError"):
        trials.of(sites[0], "weight", [moment.metric()], [moment.mean])
    assert all(torch.equal(before[n], t) for n, t in model.state_dict().items())


class Cut(nn.Module):
    """Puts out a scalar, and as many rows as its values say."""

    def __init__(self, *, scalar: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(24, 16)
        self.scalar = scalar

    def forward(self, x: Tensor) -> list[Tensor]:
        y = self.layer(x)
        kept = y[y[:, 0] > y.mean(1)]
        return [y.square().mean(), kept] if self.scalar else [kept]


@pytest.mark.parametrize("scalar", [True, False])
def test_outputs_of_values_own_lengths(scalar: bool) -> None:
    (found,) = _sensitivities(Cut(scalar=scalar), vectors(64, 24)).values()
    assert FEWEST <= found <= MOST


@pytest.mark.parametrize("size", [1e-20, 1e15])
def test_the_size_of_the_numbers_does_not_matter(size: float) -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(24, 16), nn.Linear(16, 8))
    x = vectors(64, 24)
    plain = _sensitivities(model, x)
    with torch.no_grad():
        model[0].weight.mul_(size)
        for layer in model:
            layer.bias.mul_(size)
    for key, found in _sensitivities(model, x).items():
        assert found == pytest.approx(plain[key], rel=1e-2)


@pytest.mark.parametrize(("rows", "columns"), [(96, 32), (32, 96), (40, 40)])
def test_what_is_cut_off_is_the_weakest_part_of_the_output(rows: int, columns: int) -> None:
    """Against singular values, from either side."""
    torch.manual_seed(0)
    matrix = torch.randn(rows, columns) * torch.logspace(0, -2, columns) * 1e-9
    metric = Full(spread_moment(columns, 1e2).float())
    left, values, right = torch.linalg.svd(metric.root(matrix * 1e9), full_matrices=False)
    energies = values.square()
    cut = int((energies.flip(0).cumsum(0) <= LOST * energies.sum()).sum())
    assert 0 < cut < len(values) - 1
    kept = len(values) - cut
    wanted = metric.unroot((left[:, :kept] * values[:kept]) @ right[:kept]) * 1e-9
    found = truncated(matrix, metric)
    assert float((found - wanted).norm() / wanted.norm()) < 1e-4
