from __future__ import annotations

import copy
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from bp_convert.errors import FactorError
from bp_convert.kron.conv_layout import conv_macs, every_axes, layout_of
from bp_convert.kron.pairs import divisor_pairs
from bp_convert.layers.conv import BPConv1d, BPConv2d, BPConv3d
from bp_convert.values.factors import FactorSpec
from tests.oracles import conv_weight
from tests.tolerances import assert_near

LAYERS: dict[int, Any] = {1: BPConv1d, 2: BPConv2d, 3: BPConv3d}
DENSE: dict[int, Any] = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
CONV: dict[int, Any] = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
SIZE = (7, 8, 6)
KERNELS = [(3,), (1,), (2,), (3, 3), (1, 1), (2, 3), (1, 3), (3, 1), (2, 1, 3), (1, 1, 1)]
FIELDS = [
    {"padding": 1},
    {"stride": 2},
    {"stride": 2, "padding": 2},
    {"stride": 2, "padding": 1, "dilation": 2},
    {"padding": "same"},
    {"padding": "same", "dilation": 2, "padding_mode": "reflect"},
    {"padding": "valid", "padding_mode": "circular"},
    {"padding": 1, "padding_mode": "circular", "stride": 2},
    {"padding": 1, "padding_mode": "replicate"},
    {"padding": 1, "padding_mode": "reflect", "dilation": 2},
]


def _specs(channels: int, outputs: int, kernel: tuple[int, ...], rank: int) -> list[FactorSpec]:
    found = []
    for axes, (c1, c2), out in product(
        every_axes(kernel), divisor_pairs(channels), divisor_pairs(outputs)
    ):
        s1 = s2 = 1
        for size, owner in zip(kernel, axes, strict=True):
            s1, s2 = (s1 * size, s2) if owner == 1 else (s1, s2 * size)
        found.append(FactorSpec(out=out, inp=(c1 * s1, c2 * s2), rank=rank, axes=axes))
    return found


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("rank", [1, 2, 3])
def test_the_weight_is_the_definition_entry_by_entry(kernel: tuple[int, ...], rank: int) -> None:
    for spec in _specs(4, 6, kernel, rank):
        layer = LAYERS[len(kernel)](4, 6, kernel, factors=spec, dtype=torch.float64)
        lay = layout_of(spec, kernel)
        dense = conv_weight(layer.w1, layer.w2, (lay.c1, lay.c2), kernel, spec.axes)
        assert_near(layer.weight, dense)
        x = torch.randn(2, 4, *SIZE[: len(kernel)], dtype=torch.float64)
        assert_near(layer(x), CONV[len(kernel)](x, dense, layer.bias))


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
@pytest.mark.parametrize("fields", FIELDS, ids=str)
@pytest.mark.parametrize("kernel", KERNELS)
def test_every_field_does_what_it_does_in_torch(
    kernel: tuple[int, ...], fields: dict[str, Any]
) -> None:
    axes = len(kernel)
    x = torch.randn(2, 4, *SIZE[:axes], dtype=torch.float64)
    for spec in _specs(4, 6, kernel, 2)[::5]:
        layer = LAYERS[axes](4, 6, kernel, **fields, factors=spec, dtype=torch.float64)
        dense = layer.to_dense()
        assert type(dense) is DENSE[axes]
        assert_near(layer(x), dense(x))
        fitted = LAYERS[axes].from_dense(dense, factors=spec)
        assert_near(fitted(x), dense(x))
        for name in ("kernel_size", "stride", "padding", "dilation", "padding_mode"):
            assert getattr(layer, name) == getattr(dense, name)


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
@pytest.mark.parametrize("fields", FIELDS, ids=str)
@pytest.mark.parametrize("kernel", KERNELS)
def test_predicted_multiply_adds_are_the_counted_ones(
    kernel: tuple[int, ...], fields: dict[str, Any]
) -> None:
    size = SIZE[: len(kernel)]
    for spec in _specs(4, 6, kernel, 2)[::3]:
        layer = LAYERS[len(kernel)](4, 6, kernel, **fields, factors=spec, device="meta")
        with FlopCounterMode(display=False) as counter:
            layer(torch.empty(3, 4, *size, device="meta"))
        told = conv_macs(
            layer.factors,
            in_channels=4,
            out_channels=6,
            in_size=size,
            kernel_size=layer.kernel_size,
            stride=layer.stride,
            padding=layer.padding,
            dilation=layer.dilation,
            padding_mode=layer.padding_mode,
        )
        assert counter.get_total_flops() == 2 * 3 * told


def test_gradients() -> None:
    for spec in _specs(4, 4, (3, 2), 2)[::4]:
        layer = BPConv2d(4, 4, (3, 2), 2, 1, factors=spec, dtype=torch.float64)
        x = torch.randn(1, 4, 5, 4, dtype=torch.float64, requires_grad=True)
        assert torch.autograd.gradcheck(
            lambda x, *p, layer=layer: torch.func.functional_call(
                layer, dict(zip(("w1", "w2", "bias"), p, strict=True)), (x,)
            ),
            (x, layer.w1, layer.w2, layer.bias),
        )


@pytest.mark.parametrize("axes", [1, 2, 3])
def test_full_rank_is_exact(axes: int) -> None:
    dense = DENSE[axes](6, 10, 3, padding=1)
    layer = LAYERS[axes].from_dense(dense, rank=10**6)
    x = torch.randn(2, 6, *SIZE[:axes])
    assert layer.factors.rank == layer.factors.full_rank
    assert_near(layer(x), dense(x))


@pytest.mark.parametrize("shape", [(4, 7, 8), (0, 4, 7, 8), (3, 4, 7, 8)])
def test_single_examples_and_empty_batches(shape: tuple[int, ...]) -> None:
    layer = BPConv2d(4, 6, 3, padding=1, rank=2)
    expected = layer.to_dense()(torch.zeros(shape)).shape
    assert layer(torch.randn(shape)).shape == expected


@pytest.mark.parametrize("form", ["channels_last", "sliced", "transposed"])
def test_inputs_that_are_not_contiguous(form: str) -> None:
    x = torch.randn(2, 8, 9, 10)
    if form == "channels_last":
        x = x.contiguous(memory_format=torch.channels_last)
    elif form == "sliced":
        x = torch.randn(2, 16, 9, 20)[:, ::2, :, ::2]
    else:
        x = x.transpose(2, 3)
    for spec in _specs(8, 6, (3, 3), 2)[::7]:
        layer = BPConv2d(8, 6, 3, factors=spec)
        assert_near(layer(x), layer(x.contiguous()))


def test_from_dense_carries_everything_and_shares_nothing() -> None:
    dense = nn.Conv2d(4, 6, 3, 2, 1, bias=False, dtype=torch.float64).eval()
    dense.weight.requires_grad_(False)
    layer = BPConv2d.from_dense(dense, rank=2)
    assert layer.bias is None
    assert layer.w1.dtype == torch.float64
    assert [layer.training, layer.w1.requires_grad, layer.w2.requires_grad] == [False] * 3
    error = BPConv2d(4, 6, 3, rank=2, dtype=torch.float64).fit_(dense.weight)
    gap = ((layer.weight - dense.weight).norm() / dense.weight.norm()).detach()
    assert error == pytest.approx(float(gap), rel=1e-6)
    biased = nn.Conv2d(4, 6, 3)
    twin = BPConv2d.from_dense(biased)
    assert twin.bias is not None
    assert biased.bias is not None
    assert torch.equal(twin.bias, biased.bias)
    assert twin.bias.data_ptr() != biased.bias.data_ptr()


@pytest.mark.parametrize("rank", [1, 4])
def test_a_fresh_layer_varies_like_a_fresh_dense_one(rank: int) -> None:
    layer, dense = BPConv2d(64, 144, 3, rank=rank), nn.Conv2d(64, 144, 3)
    assert layer.weight.var().item() == pytest.approx(dense.weight.var().item(), rel=0.25)


def test_state_and_copies() -> None:
    layer, x = BPConv2d(4, 6, 3, rank=2), torch.randn(2, 4, 7, 8)
    other = BPConv2d(4, 6, 3, rank=2)
    other.load_state_dict(layer.state_dict())
    for twin in (other, copy.deepcopy(layer)):
        assert torch.equal(twin(x), layer(x))
    assert "rank=2" in repr(layer)


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"groups": 2}, "groups=2"),
        ({"rank": 0}, "rank"),
        ({"padding_mode": "mirror"}, "mirror"),
        ({"padding": "full"}, "full"),
        ({"padding": "same", "stride": 2}, "stride"),
        ({"factors": FactorSpec(out=(2, 3), inp=(5, 7))}, "pair in"),
        ({"factors": FactorSpec(out=(2, 2), inp=(4, 9))}, "pair out"),
        ({"factors": FactorSpec(out=(2, 3), inp=(4, 9), axes=(1, 1))}, "pair in"),
    ],
)
def test_bad_fields_are_refused_at_construction(options: dict[str, Any], word: str) -> None:
    with pytest.raises(FactorError, match=word):
        BPConv2d(4, 6, 3, **options)


def test_wrong_channels_fail_as_in_torch() -> None:
    with pytest.raises(RuntimeError, match="4 channels"):
        BPConv2d(4, 6, 3)(torch.randn(2, 5, 7, 8))


@pytest.mark.parametrize("own", [torch.float32, torch.bfloat16])
def test_autocast_takes_factors_of_either_width(own: torch.dtype) -> None:
    layer = BPConv2d(4, 6, 3, rank=2, dtype=own)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(torch.randn(2, 4, 7, 8))
    assert y.dtype == torch.bfloat16


def test_export_with_a_free_batch_runs_at_another_batch() -> None:
    model = nn.Sequential(BPConv2d(4, 6, 3, rank=2), nn.ReLU(), BPConv2d(6, 4, 1)).eval()
    free = {0: torch.export.Dim("batch")}
    exported = torch.export.export(model, (torch.randn(3, 4, 7, 8),), dynamic_shapes=(free,))
    x = torch.randn(5, 4, 7, 8)
    assert_near(exported.module()(x), model(x))
