"""Another dtype for what is floating point, and for nothing else."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import bp_convert
from bp_convert.graph.reshape import cast

DTYPES = ("float16", "bfloat16", "float32", "float64")


class _Rotary(nn.Module):
    """Keeps a table of rotations, as models of language do, and steps counted."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.last = nn.Linear(64, 64), nn.Linear(64, 4)
        self.register_buffer("turns", torch.polar(torch.ones(32), torch.arange(32.0)))
        self.register_buffer("count", torch.tensor(3))
        self.register_buffer("mask", torch.ones(4, dtype=torch.bool))
        self.register_buffer("scale", torch.ones(64))

    def forward(self, x: Tensor) -> Tensor:
        pairs = torch.view_as_complex(self.inner(x).float().unflatten(-1, (32, 2)).contiguous())
        turned = torch.view_as_real(pairs * self.turns).flatten(-2).to(x.dtype)
        return self.last(turned * self.scale)

    def to(self, *args: object, **kwargs: object) -> None:  # type: ignore[override]
        """Return nothing, as some classes do."""
        super().to(*args, **kwargs)  # type: ignore[call-overload]


@pytest.mark.parametrize("name", DTYPES)
def test_only_floating_tensors_are_cast(name: str) -> None:
    model = _Rotary()
    turns = model.turns.clone()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cast(model, getattr(torch, name))
    assert {p.dtype for p in model.parameters()} == {getattr(torch, name)}
    assert model.scale.dtype == getattr(torch, name)
    assert torch.equal(model.turns, turns)
    assert (model.count.dtype, model.mask.dtype) == (torch.int64, torch.bool)


@pytest.mark.parametrize("name", DTYPES)
def test_a_result_of_another_dtype_keeps_its_rotations(name: str, tmp_path: Path) -> None:
    model = _Rotary().eval()
    small, _ = bp_convert.convert(
        model, inputs=["64"], rank=10**6, convert_anyway=True, dtype=name, device="cpu"
    )
    assert torch.equal(small.turns, model.turns)
    x = torch.randn(3, 64)
    found = small(x.to(getattr(torch, name))).float()
    torch.testing.assert_close(found, model(x), rtol=0.1, atol=0.05)
    bp_convert.save(small, tmp_path / "s.safetensors")
    again = bp_convert.load(tmp_path / "s.safetensors", model=_Rotary)
    assert torch.equal(again.turns, model.turns)
    assert again.inner.w1.dtype == getattr(torch, name)


@pytest.mark.parametrize("name", ["int8", "float8_e4m3fn", "complex64", "nonsense", "nn"])
def test_another_dtype_is_refused_before_any_work(name: str) -> None:
    def worked(*_: object) -> None:
        pytest.fail("worked")

    with pytest.raises(bp_convert.PlanError, match="float32, bfloat16"):
        bp_convert.convert(_Rotary(), inputs=["64"], dtype=name, progress=worked)
