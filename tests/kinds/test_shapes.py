"""Layers whose tensors were cut or grown by hand: sizes are the tensors', and they stay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

import bp_convert
from bp_convert.kinds import Kind, kind_of
from bp_convert.kinds.shapes import shape_of
from tests.contract.cases import CASES, Case, kind

P = nn.Parameter


def _cut(module: nn.Module, name: str, rows: int | None = None, columns: int | None = None) -> None:
    held = getattr(module, name).detach()
    held = held[:rows] if columns is None else held[:rows, :columns]
    setattr(module, name, P(held.clone()))


def _linear() -> nn.Module:
    module = nn.Linear(32, 64)
    _cut(module, "weight", 48)
    _cut(module, "bias", 48)
    return module


def _one_bias() -> nn.Module:
    module = nn.Linear(32, 64)
    _cut(module, "bias", 1)  # torch spreads it
    return module


def _conv() -> nn.Module:
    module = nn.Conv2d(8, 16, 3, padding=1)
    _cut(module, "weight", None, 6)
    return module


def _kernel() -> nn.Module:
    module = nn.Conv1d(8, 16, 3)
    module.weight = P(torch.randn(16, 8, 5))
    return module


def _volume() -> nn.Module:
    module = nn.Conv3d(4, 6, 2)
    _cut(module, "weight", 3)
    _cut(module, "bias", 3)
    return module


def _table() -> nn.Module:
    module = nn.Embedding(50, 16)
    module.weight = P(torch.randn(64, 16))
    return module


def _narrow_table() -> nn.Module:
    module = nn.Embedding(50, 16)
    _cut(module, "weight", None, 12)
    return module


def _lstm() -> nn.Module:
    module = nn.LSTM(12, 16, 2, bidirectional=True)
    _cut(module, "weight_ih_l0", None, 10)
    return module


def _packed() -> nn.Module:
    module = nn.Linear(16, 16)
    module.weight = P(torch.zeros(128, 1, dtype=torch.uint8), requires_grad=False)
    return module


CUT: dict[str, tuple[Callable[[], nn.Module], tuple[int, int], str]] = {
    "Linear": (_linear, (32, 48), "its weight is 48 x 32 while its attributes say 64 x 32"),
    "bias": (_one_bias, (32, 64), "its bias is 1 while its attributes say 64"),
    "Conv2d": (_conv, (6, 16), "its weight is 16 x 6 x 3 x 3 while its attributes say 16 x 8"),
    "kernel": (_kernel, (8, 16), "its weight is 16 x 8 x 5 while its attributes say 16 x 8 x 3"),
    "Conv3d": (_volume, (4, 3), "its weight is 3 x 4 x 2 x 2 x 2 while its attributes say 6 x 4"),
    "Embedding": (_table, (64, 16), "its weight is 64 x 16 while its attributes say 50 x 16"),
    "columns": (_narrow_table, (50, 12), "its weight is 50 x 12 while its attributes say 50 x 16"),
    "LSTM": (_lstm, (10, 16), "its weight_ih_l0 is 64 x 10 while its attributes say 64 x 12"),
    "packed": (_packed, (1, 128), "its weight is 128 x 1 while its attributes say 16 x 16"),
}


def _kind(module: nn.Module) -> Kind:
    found = kind_of(module)
    assert found is not None
    return found


@pytest.mark.parametrize("name", CUT)
def test_sizes_are_those_of_the_tensors_and_the_reason_says_what_disagrees(name: str) -> None:
    make, widths, reason = CUT[name]
    module = make()
    one = _kind(module)
    assert one.widths(module) == widths
    assert (one.refuse(module) or "").startswith(reason)
    if name not in ("bias", "packed", "LSTM"):
        held = sum(p.numel() for p in module.parameters())
        assert one.params(module, widths) == held


@pytest.mark.parametrize("case", CASES, ids=str)
def test_layers_as_they_were_made_are_not_refused(case: Case) -> None:
    module, one = case.make(), kind(case)
    assert one.refuse(module) is None
    assert case.unsupported is None or one.refuse(case.unsupported()) is not None


def test_a_weight_that_is_computed_is_not_asked_for() -> None:
    """Looking at a spectral norm's weight moves its state; sizes are those of the attributes."""
    module = parametrizations.spectral_norm(nn.Linear(12, 16)).train()
    before = {name: t.clone() for name, t in module.state_dict().items()}
    assert parametrize.is_parametrized(module)
    one = _kind(nn.Linear(1, 1))
    assert shape_of(module, "weight") is None
    assert one.widths(module) == (12, 16)
    assert one.refuse(module) is None
    assert all(torch.equal(before[name], t) for name, t in module.state_dict().items())


def test_a_lazy_layer_has_the_sizes_that_it_was_given() -> None:
    module = nn.LazyLinear(16)
    one = _kind(nn.Linear(1, 1))
    assert shape_of(module, "weight") is None
    assert one.widths(module) == (0, 16)


class Around(nn.Module):
    """Layers before and behind one whose attributes are stale."""

    def __init__(self, stale: nn.Module, before: nn.Module, behind: nn.Module) -> None:
        super().__init__()
        self.before, self.stale, self.behind = before, stale, behind

    def forward(self, x: Tensor) -> Tensor:
        x = self.stale(self.before(x))
        return self.behind(x.mean((2, 3)) if x.dim() > 3 else x)


AROUND: dict[str, tuple[Callable[[], nn.Module], Tensor, str]] = {
    "linear": (
        lambda: Around(_linear(), nn.Linear(24, 32), nn.Linear(48, 24)),
        torch.randn(64, 24),
        "24",
    ),
    "conv": (
        lambda: Around(_conv(), nn.Conv2d(4, 6, 3, padding=1), nn.Linear(16, 24)),
        torch.randn(32, 4, 6, 6),
        "4x6x6",
    ),
    "table": (
        lambda: Around(_table(), nn.Identity(), nn.Linear(16, 24)),
        torch.randint(0, 50, (40, 6)),
        "int64:1x6<50",
    ),
}
WAYS: dict[str, dict[str, Any]] = {
    "share": {"rank": 0.5},
    "full rank": {"rank": 10**6},
    "target": {"target": "params=0.9"},
    "excluded": {"target": "params=0.9", "exclude": ["stale"]},
}


@pytest.mark.parametrize("name", AROUND)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("by_data", [False, True], ids=["weights", "data"])
def test_the_rest_of_a_model_is_converted_around_it(name: str, way: str, by_data: bool) -> None:
    make, x, inputs = AROUND[name]
    model = make().eval()
    asked = {"convert_anyway": True, "convert_head": True, "inputs": [inputs], **WAYS[way]}
    if by_data:
        asked["calibrate"] = x
    small, report = bp_convert.convert(model, **asked)
    rows = {row.name: row for row in report.layers}
    assert rows["stale"].action == "kept"
    assert way == "excluded" or "while its attributes say" in str(rows["stale"].reason)
    assert any(row.action == "replaced" for row in report.layers)
    with torch.no_grad():
        gap = float((small(x) - model(x)).norm() / model(x).norm())
    assert gap < (1e-4 if way == "full rank" else 1.0)
