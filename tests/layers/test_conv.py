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
from tests.ops import VIEWS, Ops
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


def _told(layer: Any, size: tuple[int, ...]) -> int:
    """Return the predicted multiply-adds of one example."""
    return conv_macs(
        layer.factors,
        in_size=size,
        kernel_size=layer.kernel_size,
        stride=layer.stride,
        padding=layer.padding,
        dilation=layer.dilation,
        padding_mode=layer.padding_mode,
    )


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


def test_an_axis_of_length_one_may_be_given_to_either_factor() -> None:
    x = torch.randn(2, 4, 7, 8)
    layers = [
        BPConv2d(4, 6, (1, 3), factors=FactorSpec(out=(2, 3), inp=(2, 6), axes=axes))
        for axes in ((2, 2), (1, 2))
    ]
    layers[1].load_state_dict(layers[0].state_dict())
    assert_near(layers[1](x), layers[0](x))


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
@pytest.mark.parametrize("mode", ["zeros", "reflect", "replicate", "circular"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_every_combination_of_fields(kernel: tuple[int, ...], mode: str) -> None:
    """Each against torch's own layer on a weight built entry by entry; layouts take turns."""
    axes = len(kernel)
    mixed = tuple(range(1, axes + 1))  # another number for each axis
    pads: list[Any] = ["valid", "same", 0, 1, tuple(p - 1 for p in mixed)]
    x = torch.randn(2, 4, *SIZE[:axes], dtype=torch.float64)
    specs = _specs(4, 6, kernel, 1)[::3] + _specs(4, 6, kernel, 2)[1::3]
    steps = sorted({(1,) * axes, (2,) * axes, mixed})
    for turn, (stride, padding, dilation) in enumerate(product(steps, pads, steps)):
        if padding == "same" and max(stride) > 1:
            continue
        if any(d * (k - 1) >= n for d, k, n in zip(dilation, kernel, SIZE, strict=False)):
            continue
        spec = specs[turn % len(specs)]
        fields = (kernel, stride, padding, dilation, 1, turn % 3 > 0, mode)
        layer = LAYERS[axes](4, 6, *fields, factors=spec, dtype=torch.float64)
        dense = DENSE[axes](4, 6, *fields, dtype=torch.float64)
        lay = layout_of(spec, kernel)
        with torch.no_grad():
            dense.weight.copy_(conv_weight(layer.w1, layer.w2, (lay.c1, lay.c2), kernel, spec.axes))
            if dense.bias is not None:
                dense.bias.copy_(layer.bias)
        with FlopCounterMode(display=False) as counter:
            y = layer(x)
        assert counter.get_total_flops() == 2 * 2 * _told(layer, SIZE[:axes])
        assert_near(y, dense(x))


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
        assert counter.get_total_flops() == 2 * 3 * _told(layer, size)


@pytest.mark.parametrize("kernel", [(3, 3), (1, 3), (1, 1)])
def test_two_products_whatever_the_layout_and_the_rank(kernel: tuple[int, int]) -> None:
    """No loop over terms and no im2col: two products, and nothing larger than what they need."""
    for rank in (1, 3):
        for spec in _specs(8, 6, kernel, rank):
            layer = BPConv2d(8, 6, kernel, factors=spec)
            lay, terms = layout_of(spec, kernel), layer.factors.rank
            between = terms * max(spec.out[0] * lay.c2, lay.c1 * spec.out[1])
            with torch.no_grad(), Ops() as ops:
                layer(torch.randn(2, 8, 9, 9))
            names = [name for name, _ in ops.seen]
            assert sum(name in ("bmm", "mm", "convolution") for name in names) == 2, names
            assert max(size for _, size in ops.seen) <= 2 * 81 * max(8, 6, between)


def test_one_term_on_views_copies_nothing() -> None:
    layer, x = BPConv2d(64, 64, 3, padding=1), torch.randn(1, 64, 8, 8)
    with torch.no_grad(), Ops() as ops:
        layer(x)
    work = [name for name, _ in ops.seen if name not in VIEWS]
    assert work == ["bmm", "convolution", "add_"]


@pytest.mark.parametrize(
    ("out", "inp", "kernel", "calls"),
    [
        ((64, 1), (1, 64 * 9), 3, ["convolution", "bmm", "add_"]),
        ((1, 64), (64, 9), 3, ["bmm", "convolution", "add_"]),
        ((64, 1), (1, 64), 1, ["bmm", "bmm", "add_"]),
    ],
)
def test_low_rank_on_views_copies_nothing(out: Any, inp: Any, kernel: int, calls: Any) -> None:
    spec = FactorSpec(out=out, inp=inp, rank=5, axes=(2, 2))
    layer = BPConv2d(64, 64, kernel, padding=kernel // 2, factors=spec)
    x = torch.randn(2, 64, 8, 8)
    with torch.no_grad(), Ops() as ops:
        y = layer(x)
    assert [name for name, _ in ops.seen if name not in VIEWS] == calls
    assert_near(y, layer.to_dense()(x))


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


@pytest.mark.parametrize("rank", [1, 2])
def test_an_empty_batch_passes_through_every_layout(rank: int) -> None:
    x = torch.zeros(0, 4, 7, 8, requires_grad=True)
    for kernel in ((3, 3), (1, 3), (1, 1)):
        for spec in _specs(4, 6, kernel, rank):
            y = BPConv2d(4, 6, kernel, factors=spec)(x)
            assert y.shape == (0, 6, 8 - kernel[0], 9 - kernel[1])
            y.sum().backward()


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


@pytest.mark.parametrize("trained", [True, False])
def test_flags_are_carried_there_and_back(trained: bool) -> None:
    dense = nn.Conv2d(4, 6, 3).train(trained)
    dense.weight.requires_grad_(trained)
    assert dense.bias is not None
    dense.bias.requires_grad_(not trained)
    layer = BPConv2d.from_dense(dense)
    back = layer.to_dense()
    for one in (layer, back):
        assert one.training == trained
        assert one.bias.requires_grad == (not trained)
    assert back.weight.requires_grad == trained
    assert back.bias.data_ptr() != layer.bias.data_ptr()  # type: ignore[union-attr]


@pytest.mark.parametrize("rank", [1, 4])
def test_a_fresh_layer_varies_like_a_fresh_dense_one(rank: int) -> None:
    layer, dense = BPConv2d(64, 144, 3, rank=rank), nn.Conv2d(64, 144, 3)
    assert layer.weight.var().item() == pytest.approx(dense.weight.var().item(), rel=0.25)


def test_a_fresh_bias_starts_as_a_fresh_dense_one() -> None:
    layer = BPConv2d(4, 3000, 3)
    assert layer.bias is not None
    bound = (4 * 9) ** -0.5
    assert 0.99 * bound < float(layer.bias.detach().abs().max()) <= bound
    assert float(layer.bias.detach().std()) == pytest.approx(bound / 3**0.5, rel=0.05)


def test_the_repr_tells_what_is_not_the_default() -> None:
    spec = FactorSpec(out=(2, 3), inp=(2, 18), rank=2, axes=(2, 2))
    plain = BPConv2d(4, 6, 3, factors=spec).extra_repr()
    assert plain == "4, 6, kernel_size=(3, 3), stride=(1, 1), out=2x3, in=2*1x2*9, rank=2"
    options: Any = {"padding": "same", "dilation": 2, "bias": False, "padding_mode": "reflect"}
    other = BPConv2d(4, 6, 3, **options, factors=spec).extra_repr()
    for part in ("padding='same'", "dilation=(2, 2)", "bias=False", "padding_mode='reflect'"):
        assert part in other


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
        ({"groups": 3}, "groups=3"),
        ({"padding": (1,)}, "one number, or 2"),
        ({"stride": (1, 2, 1)}, "stride"),
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
    x = torch.randn(2, 4, 7, 8, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
    assert y.dtype == torch.bfloat16
    assert layer.bias is not None
    assert_near(y, F.conv2d(x, layer.weight.float(), layer.bias.float()), torch.bfloat16)
    y.sum().backward()
    assert layer.w1.grad is not None
    assert layer.w1.grad.dtype == own


def test_export_with_a_free_batch_runs_at_another_batch() -> None:
    model = nn.Sequential(BPConv2d(4, 6, 3, rank=2), nn.ReLU(), BPConv2d(6, 4, 1)).eval()
    free = {0: torch.export.Dim("batch")}
    exported = torch.export.export(model, (torch.randn(3, 4, 7, 8),), dynamic_shapes=(free,))
    x = torch.randn(5, 4, 7, 8)
    assert_near(exported.module()(x), model(x))


@pytest.mark.slow
@pytest.mark.parametrize("axes", [(2, 2), (2, 1), (1, 1)])
def test_export_with_a_free_batch_and_size(axes: Any) -> None:
    s1 = 3 ** axes.count(1)
    spec = FactorSpec(out=(2, 3), inp=(2 * s1, 2 * 9 // s1), axes=axes)
    model = BPConv2d(4, 6, 3, padding=1, factors=spec).eval()
    free = {axis: torch.export.Dim(name, max=64) for axis, name in ((0, "n"), (2, "h"), (3, "w"))}
    exported = torch.export.export(model, (torch.randn(3, 4, 7, 8),), dynamic_shapes=(free,))
    for shape in ((5, 4, 9, 6), (1, 4, 12, 12)):
        x = torch.randn(shape)
        assert_near(exported.module()(x), model(x))
