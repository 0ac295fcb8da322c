"""The forms of a layer in a graph compute what the layer computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bp_convert.exporting.axes import FreeAxes
from bp_convert.exporting.forms import bilinear_layers, in_forms
from bp_convert.exporting.program import traced
from bp_convert.kron.conv_layout import every_factors
from bp_convert.kron.pairs import divisor_pairs
from bp_convert.layers import BPConv1d, BPConv2d, BPConv3d, BPEmbedding, BPLinear
from bp_convert.values.factors import FactorSpec
from bp_convert.values.literals import Form
from bp_convert.values.tensors import TensorSpec

LINEAR = [
    FactorSpec(out=out, inp=inp, rank=rank)
    for out in divisor_pairs(6)
    for inp in divisor_pairs(8)
    for rank in (1, 3)
]
CONVS: list[Any] = [
    (BPConv1d, {"kernel_size": 3, "padding": 1}, (7,)),
    (BPConv2d, {"kernel_size": 3, "padding": (1, 0), "stride": (1, 2)}, (6, 7)),
    (BPConv2d, {"kernel_size": (3, 2), "padding": "same"}, (6, 5)),
    (BPConv2d, {"kernel_size": 1, "stride": 2}, (5, 6)),
    (BPConv2d, {"kernel_size": (1, 3), "padding": 1, "padding_mode": "circular"}, (5, 6)),
    (BPConv3d, {"kernel_size": 2, "dilation": 2}, (5, 4, 4)),
]


def formed(layer: nn.Module, form: Form) -> nn.Module:
    made = in_forms(nn.Sequential(layer), {"0": form})
    # Nothing of the layer's own forward is left: it would pass any test here.
    assert form == "dense" or "forward" in vars(made[0])  # type: ignore[index]
    return made


def check(layer: nn.Module, x: Tensor) -> None:
    with torch.no_grad():
        wanted = layer(x)
        for form in ("factors", "built", "dense"):
            torch.testing.assert_close(formed(layer, form)(x), wanted)


@pytest.mark.parametrize("spec", LINEAR, ids=str)
def test_a_linear_of_every_pair(spec: FactorSpec) -> None:
    layer = BPLinear(8, 6, bias=spec.rank > 1, factors=spec, dtype=torch.float64)
    check(layer, torch.randn(2, 3, 8, dtype=torch.float64))
    check(layer, torch.randn(4, 8, dtype=torch.float64))


@pytest.mark.filterwarnings("ignore:Using padding='same'")  # torch's own convolution
@pytest.mark.parametrize(("kind", "fields", "size"), CONVS)
def test_a_convolution_of_every_layout(
    kind: Any, fields: dict[str, Any], size: tuple[int, ...]
) -> None:
    kernel = kind(1, 1, **fields).kernel_size
    specs = [one for rank in (1, 2) for one in every_factors(4, divisor_pairs(6), kernel, rank)]
    for spec in specs:
        layer = kind(4, 6, bias=spec.rank > 1, factors=spec, dtype=torch.float64, **fields)
        check(layer, torch.randn(2, 4, *size, dtype=torch.float64))
    check(layer, torch.randn(4, *size, dtype=torch.float64))


def test_groups_are_built_or_compute_as_they_do() -> None:
    layer = BPConv2d(4, 6, 3, groups=2, rank=2).double()
    x = torch.randn(2, 4, 5, 5, dtype=torch.float64)
    with torch.no_grad():
        torch.testing.assert_close(formed(layer, "built")(x), layer(x))
        factors = in_forms(nn.Sequential(layer), {"0": "factors"})
        torch.testing.assert_close(factors(x), layer(x))


def test_an_embedding_is_built() -> None:
    layer = BPEmbedding(10, 6, padding_idx=1, rank=2).double()
    x = torch.tensor([[1, 2], [9, 0]])
    with torch.no_grad():
        torch.testing.assert_close(formed(layer, "built")(x), layer(x))


def test_the_source_stays_as_it_is() -> None:
    model = nn.Sequential(BPLinear(8, 6), nn.ReLU(), BPLinear(6, 4)).train()
    before = {name: one.clone() for name, one in model.state_dict().items()}
    made = in_forms(model, {"0": "factors", "2": "dense"})
    assert [*bilinear_layers(model)] == ["0", "2"]
    assert isinstance(made.get_submodule("2"), nn.Linear)
    assert not made.training
    assert model.training
    assert "forward" not in vars(model[0])
    assert before.keys() == model.state_dict().keys()


def test_a_laid_out_linear_leaves_the_batch_free() -> None:
    made = in_forms(nn.Sequential(BPLinear(288, 240, rank=4)), {"0": "factors"})
    program, axes = traced(made, FreeAxes((TensorSpec(shape=(288,)),)))
    assert axes.words == ("batch",)
    assert program.module()(torch.randn(9, 288)).shape == (9, 240)
