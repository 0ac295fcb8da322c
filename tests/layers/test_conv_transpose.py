"""Transposed and grouped convolutions on their own, against torch's of the same weight."""

from __future__ import annotations

from itertools import product
from math import prod
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from bp_convert.errors import FactorError
from bp_convert.kinds import Ask, kind_of
from bp_convert.kron.conv_layout import every_axes
from bp_convert.kron.pairs import divisor_pairs
from bp_convert.layers import BPConv2d, BPConvTranspose1d, BPConvTranspose2d, BPConvTranspose3d
from bp_convert.layers.conv_transpose import turned
from bp_convert.seen.pick import Pick, conv_rows
from bp_convert.values.factors import FactorSpec
from tests.tolerances import assert_near

LAYERS: dict[int, Any] = {1: BPConvTranspose1d, 2: BPConvTranspose2d, 3: BPConvTranspose3d}
DENSE: dict[int, Any] = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}
SIZE = (4, 3, 5)
FIELDS: list[dict[str, Any]] = [
    {},
    {"stride": 2},
    {"stride": 2, "padding": 1, "output_padding": 1},
    {"stride": 3, "output_padding": 2, "bias": False},
    {"dilation": 2, "padding": 1},
    {"stride": 2, "groups": 2},
]
KERNELS = [(3,), (1,), (2, 3), (1, 1), (4, 1), (2, 1, 3)]


def _specs(channels: int, outputs: int, kernel: tuple[int, ...], rank: int) -> list[FactorSpec]:
    found = []
    for axes, (c1, c2), out in product(
        every_axes(kernel), divisor_pairs(channels), divisor_pairs(outputs)
    ):
        s1 = prod(n for n, owner in zip(kernel, axes, strict=True) if owner == 1)
        inp = (c1 * s1, c2 * prod(kernel) // s1)
        found.append(FactorSpec(out=out, inp=inp, rank=rank, axes=axes))
    return found


@pytest.mark.parametrize("fields", FIELDS, ids=str)
@pytest.mark.parametrize("kernel", KERNELS, ids=str)
def test_every_field_does_what_it_does_in_torch(
    kernel: tuple[int, ...], fields: dict[str, Any]
) -> None:
    axes, groups = len(kernel), fields.get("groups", 1)
    if fields.get("padding") and kernel == (1,) * axes:
        fields = {**fields, "padding": 0}
    x = torch.randn(2, 4, *SIZE[:axes], dtype=torch.float64)
    for rank in (1, 2):
        for spec in _specs(4 // groups, 6 // groups, kernel, rank)[:: 3 if rank > 1 else 2]:
            layer = LAYERS[axes](4, 6, kernel, **fields, factors=spec, dtype=torch.float64)
            dense = layer.to_dense()
            assert type(dense) is DENSE[axes]
            with FlopCounterMode(display=False) as counter:
                y = layer(x)
            assert_near(y, dense(x))
            assert_near(layer(x[0]), dense(x[0]))
            kind = kind_of(dense)
            assert kind is not None
            told = kind.macs(dense, kind.widths(dense), {"weight": layer.factors}, [tuple(x.shape)])
            assert counter.get_total_flops() == 2 * told
            assert_near(LAYERS[axes].from_dense(dense, factors=spec)(x), y)


@pytest.mark.parametrize("fields", FIELDS, ids=str)
def test_patches_times_the_turned_weight_are_the_output(fields: dict[str, Any]) -> None:
    for kernel in ((3,), (3, 2), (2, 1, 3)):
        groups = fields.get("groups", 1)
        dense = DENSE[len(kernel)](4, 6, kernel, **{**fields, "bias": False}, dtype=torch.float64)
        x = torch.randn(2, 4, *SIZE[: len(kernel)], dtype=torch.float64)
        flat = dense(x).flatten(2).transpose(1, 2).flatten(0, 1)  # (n, K)
        parts = conv_rows(dense, x, Pick(10**9)).chunk(groups, 1)
        weights = turned(dense.weight, groups).flatten(1).chunk(groups)
        found = [rows @ weight.t() for rows, weight in zip(parts, weights, strict=True)]
        assert_near(torch.cat(found, 1), flat)
        few = conv_rows(dense, x, Pick(6, 1))
        assert len(few) < len(flat)
        held = torch.cat(parts, 1).tolist()
        assert all(row in held for row in few.tolist())


@pytest.mark.parametrize("kernel", [(3,), (4, 3), (1, 3)], ids=str)
def test_an_output_size_is_given_in_the_call(kernel: tuple[int, ...]) -> None:
    axes = len(kernel)
    x = torch.randn(2, 4, *SIZE[:axes], dtype=torch.float64)
    for spec in _specs(4, 6, kernel, 2)[::3]:
        layer = LAYERS[axes](4, 6, kernel, 3, factors=spec, dtype=torch.float64)
        dense = layer.to_dense()
        least = dense(x).shape[2:]
        for more in range(3):
            size = [n + more for n in least]
            assert_near(layer(x, size), dense(x, size))
            assert_near(layer(x, output_size=(2, 6, *size)), dense(x, (2, 6, *size)))
            assert_near(layer(x[0], size), dense(x[0], size))
        for bad in ([n + 3 for n in least], [n - 1 for n in least], [1, 2, 3, 4, 5, 6]):
            with pytest.raises(ValueError, match="size"):
                layer(x, bad)


def test_gradients() -> None:
    for options in ({}, {"groups": 2}):
        groups = options.get("groups", 1)
        for spec in _specs(4 // groups, 4 // groups, (3, 2), 2)[::7]:
            layer = BPConvTranspose2d(
                4, 4, (3, 2), 2, 1, **options, factors=spec, dtype=torch.float64
            )
            x = torch.randn(1, 4, 3, 2, dtype=torch.float64, requires_grad=True)
            assert torch.autograd.gradcheck(
                lambda x, *p, layer=layer: torch.func.functional_call(
                    layer, dict(zip(("w1", "w2", "bias"), p, strict=True)), (x,)
                ),
                (x, layer.w1, layer.w2, layer.bias),
            )


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"padding_mode": "reflect"}, "reflect"),
        ({"padding": "same"}, "same"),
        ({"output_padding": (1,)}, "one number, or 2"),
        ({"groups": 4}, "groups=4"),
    ],
)
def test_bad_fields_are_refused_at_construction(options: dict[str, Any], word: str) -> None:
    with pytest.raises(FactorError, match=word):
        BPConvTranspose2d(4, 6, 3, **options)


# Groups


@pytest.mark.parametrize("kernel", [(3, 3), (1, 1), (1, 3)], ids=str)
@pytest.mark.parametrize("fields", [{}, {"stride": 2, "padding": 1, "padding_mode": "circular"}])
def test_each_group_has_factors_of_its_own(kernel: tuple[int, int], fields: dict[str, Any]) -> None:
    x = torch.randn(2, 12, 5, 6, dtype=torch.float64)
    for rank in (1, 2):
        for spec in _specs(4, 2, kernel, rank):
            layer = BPConv2d(12, 6, kernel, groups=3, factors=spec, dtype=torch.float64, **fields)
            assert layer.w1.shape == (3, layer.factors.rank, spec.out[0], spec.inp[0])
            dense = layer.to_dense()
            assert_near(layer(x), dense(x))
            one = BPConv2d(4, 2, kernel, factors=spec, dtype=torch.float64, **fields)
            one.load_state_dict({n: p.chunk(3)[1].view(q.shape) for (n, p), q in zip(
                layer.state_dict().items(), one.state_dict().values(), strict=True)})  # fmt: skip
            assert_near(one(x[:, 4:8]), dense(x)[:, 2:4])


def test_a_share_is_spent_before_the_image_grows() -> None:
    """A transposed convolution of R channels is less work than one to R, of a larger image."""
    dense = nn.ConvTranspose2d(128, 64, 4, 2, 1)
    kind = kind_of(dense)
    assert kind is not None
    spec = kind.factor(dense, (128, 64), Ask(rank=0.25))["weight"]
    assert (spec.out, spec.inp) == ((1, 64), (128, 16))
    assert 0.2 < spec.params / dense.weight.numel() <= 0.25
