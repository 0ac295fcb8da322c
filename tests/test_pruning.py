"""Channel pruning to a size: widths follow, the largest norms stay, what stays is unchanged."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from bp_convert.errors import PlanError
from bp_convert.models import build
from bp_convert.pruning import prune
from bp_convert.values.tensors import TensorSpec
from bp_convert.widths.narrow import narrow

IMAGE = (TensorSpec.parse("3x16x16"),)


class Residual(nn.Module):
    """Two convolutions added to each other, a norm, a concatenation, and a flatten."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.body = nn.Conv2d(8, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.depth = nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.side = nn.Conv2d(8, 6, 1)
        self.hidden = nn.Linear(14 * 16 * 16, 12)
        self.head = nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = torch.relu(self.norm(x + self.body(x)))
        x = torch.cat([torch.relu(self.depth(x)), torch.relu(self.side(x))], 1).flatten(1)
        out: Tensor = self.head(torch.relu(self.hidden(x)))
        return out


def _half_dead(model: Residual) -> list[int]:
    """Silence every other output of every layer; return those of the sum that live."""
    with torch.no_grad():
        for layer in (model.stem, model.body, model.depth, model.side, model.hidden):
            layer.weight[::2] = 0
            assert layer.bias is not None
            layer.bias[::2] = 0
        model.norm.bias[::2] = 0
    return [1, 3, 5, 7]


@pytest.mark.slow
def test_pruning_what_is_silent_changes_nothing() -> None:
    model = Residual().eval()
    living = _half_dead(model)
    x = torch.randn(3, 3, 16, 16)
    sizes = (27 * 4 + 4) + (36 * 4 + 4) + 8 + (9 * 4 + 4) + (4 * 3 + 3)
    sizes += (7 * 256 * 6 + 6) + (6 * 5 + 5)
    done, plan = prune(model, sizes, inputs=IMAGE)
    assert plan.params.after == sum(p.numel() for p in done.model.parameters()) == sizes
    torch.testing.assert_close(done.model(x), model(x), rtol=1e-4, atol=1e-5)
    assert [(one.name, one.params) for one in plan.others] == [("norm", (16, 8))]
    assert not done.random
    kept = done.model.get_submodule("stem").weight
    assert torch.equal(kept, model.stem.weight[living])
    # The test can fail: other outputs than those give another function.
    torch.manual_seed(1)
    other = Residual().eval()
    pruned, _ = prune(other, sizes, inputs=IMAGE)
    assert not torch.allclose(pruned.model(x), other(x), rtol=1e-2, atol=1e-2)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "params"), [("svgg", 88_726), ("squeezenet", 60_000)])
def test_a_size_is_kept_and_nearly_used(name: str, params: int) -> None:
    model = build(name)
    state = {key: one.clone() for key, one in model.state_dict().items()}
    done, plan = prune(model, params, init="random", seed=1)
    assert 0.93 * params < plan.params.after <= params
    assert plan.params.after == sum(p.numel() for p in done.model.parameters())
    assert done.model.train()(torch.randn(2, 3, 32, 32)).shape == (2, 10)
    assert all(torch.equal(one, state[key]) for key, one in model.state_dict().items())
    again, _ = prune(model, params, init="random", seed=1)
    for one, two in zip(done.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(one, two)


def test_an_lstm_loses_units_of_all_gates() -> None:
    model = build("captioner", vocabulary=40, features=32)
    done, plan = prune(
        model,
        300_000,
        inputs=(TensorSpec.parse("image=float32:1x32"), TensorSpec.parse("tokens=int64:1x5<40")),
    )
    assert plan.params.after <= 300_000
    tokens = torch.randint(0, 40, (2, 5))
    assert done.model(image=torch.randn(2, 32), tokens=tokens).shape == (2, 40)
    language = done.model.get_submodule("language")
    assert isinstance(language, nn.LSTM)
    assert language.hidden_size < 256
    rows = {tuple(row.tolist()) for row in model.get_submodule("language").bias_ih_l0.view(4, -1).T}
    for unit in language.bias_ih_l0.view(4, -1).T:
        assert tuple(unit.tolist()) in rows


def test_a_size_out_of_reach_is_refused() -> None:
    with pytest.raises(PlanError, match="one output a layer"):
        prune(Residual(), 20, inputs=IMAGE)
    args = (torch.randn(2, 3, 16, 16),)
    with pytest.raises(PlanError, match="one output a layer"):
        narrow(Residual(), args, {}, params=20, targets={"stem": "Conv2d"})
