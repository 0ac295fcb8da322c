"""Second moments of the model's slopes at its layers' outputs, against exact Jacobians."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from bp_convert.calibration.slopes import gather_slopes
from bp_convert.graph.clone import clone
from bp_convert.graph.walk import walk
from bp_convert.kron.metric import Full


def _batches(model: nn.Module, x: Tensor) -> list[tuple[tuple[Tensor], dict[str, Tensor]]]:
    return [((part,), {}) for part in x.split(250)]


def test_they_are_those_of_the_exact_jacobian() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4)).eval()
    x = torch.randn(4000, 6)
    found = gather_slopes(clone(model, apart=True), walk(model), _batches(model, x))
    hidden = model[0](x)
    inner = 1 - hidden.tanh().square()  # (N, 5), the slope of tanh
    slope = model[2].weight[None] * inner[:, None]  # (N, 4, 5)
    exact = (slope.transpose(1, 2) @ slope).mean(0).detach()
    (form,) = found["0", "weight"].forms(1)
    assert isinstance(form, Full)
    gap = (form.matrix - exact).norm() / exact.norm()
    assert gap < 0.1
    turned = (form.matrix - exact.flip(0)).norm() / exact.norm()
    assert turned > 0.3
    (last,) = found["2", "weight"].forms(1)
    assert isinstance(last, Full)
    assert (last.matrix - torch.eye(4)).norm() < 0.1 * 2


class Closed(nn.Module):
    """Records no gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            out: Tensor = self.layer(x)
        return out


class Written(nn.Module):
    """Writes on what its gradient hangs on."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x).sigmoid()
        z = y * 1
        y.mul_(2)
        return z + y.exp_()


def test_models_without_slopes_have_none() -> None:
    x = torch.randn(500, 6)
    for model in (Closed(), Written()):
        found = gather_slopes(clone(model, apart=True), walk(model), _batches(model, x))
        assert found == {}


def test_no_layer_asks_for_no_pass() -> None:
    def never(*_: object) -> Tensor:
        raise AssertionError

    model = nn.Linear(3, 3)
    vars(model)["forward"] = never
    assert gather_slopes(model, [], [((torch.ones(2, 3),), {})]) == {}
