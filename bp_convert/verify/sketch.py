"""Plain layers of a widened model whose weights are not built: what each answers is held against
what its weight gives, by random mixes of the outputs.

Alpha 3 makes a convolution's weight 81 times as large, and running a model on such weights takes
minutes. A plain layer here is one of torch's own type with its bias, its hooks and a weight of
``nan`` that takes no memory. What it gives out is computed by a bilinear layer made anew from the
factors. On every call, a few random sums over all its outputs are compared with what torch's own
dense layer gives on the same sums of the weight's rows. Where an output is wrong the sums differ
but for draws of probability 0 (Freivalds, 1977, Probabilistic machines can use less running time).

A sum in which (i1, i2) has the weight p[a, i1] * q[b, i2] keeps a Kronecker sum what it is:
``w1`` becomes ``p w1``, ``w2`` becomes ``w2 q^T``; the mixed weight comes from ``to_dense`` like
the whole.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import inf, isnan, prod
from typing import Any

import torch
from torch import Tensor, nn

from bp_convert.fields.carry import blank, fields_of
from bp_convert.layers.conv import BPConv1d, BPConv2d, BPConv3d
from bp_convert.layers.linear import BPLinear
from bp_convert.verify.compare import relative

LARGEST = 2**22  # numbers of all such weights, up to which a model runs on the weights themselves
SIDE = 4  # sums over either side of a layer's outputs
SEED = 1977
# With the axis of the outputs, and the field of their number.
_KINDS: dict[type[nn.Module], tuple[int, str]] = {
    BPLinear: (-1, "out_features"),
    BPConv1d: (-2, "out_channels"),
    BPConv2d: (-3, "out_channels"),
    BPConv3d: (-4, "out_channels"),
}


def too_large(layers: Iterable[Any]) -> bool:
    """Return whether the weights that bilinear layers stand for are not to be built."""
    size = 0
    for one in layers:
        if type(one) in _KINDS:
            groups = getattr(one, "groups", 1)
            size += groups * prod((*one.factors.out, *one.factors.inp))
    return size > LARGEST


class Sketch:
    """What a plain layer answers in place of the product with its weight.

    Attributes:
        layer: the plain layer.
        error: largest relative difference of a sum so far from what the weight gives.
    """

    def __init__(self, twin: Any, small: Any, mixes: tuple[Tensor, Tensor]) -> None:
        self.axis, _ = _KINDS[type(twin)]
        self.groups: int = getattr(twin, "groups", 1)
        self.mixes = mixes  # (m1, k1), (m2, k2)
        self.error = 0.0
        fields = fields_of(twin, twin.FIELDS)
        with torch.device("meta"):
            self.layer: Any = twin.DENSE(**fields)
        nothing = twin.w1.new_full((), float("nan")).expand(self.layer.weight.shape)
        self.layer.weight = nn.Parameter(nothing, requires_grad=twin.w1.requires_grad)
        if twin.bias is not None:
            held = twin.bias.detach().clone()
            self.layer.bias = nn.Parameter(held, requires_grad=twin.bias.requires_grad)
        self.layer.train(twin.training)
        self.layer.forward = self
        # Computes what the layer gives out; a twin's own forward, caches and hooks are not in it.
        fields["bias"] = False
        self.fresh = blank(type(twin), {**fields, "factors": twin.factors}, twin.w1)
        self.fresh.requires_grad_(False)
        self.small = small
        self.take(twin)

    @torch.no_grad()
    def take(self, twin: Any) -> None:
        """Take over the factors of a bilinear layer."""
        one, two = self.mixes
        for made, w1, w2 in (
            (self.fresh, twin.w1, twin.w2),
            (self.small, one @ twin.w1, twin.w2 @ two.t()),
        ):
            made.w1.copy_(w1)
            made.w2.copy_(w2)
        self.dense = self.small.to_dense()

    def __call__(self, input: Tensor) -> Tensor:
        """Map what the layer maps, compare, and let a gradient lead to the layer's parameters."""
        y: Tensor = self.fresh(input)
        with torch.no_grad():
            gap = relative(self.dense(input.detach()), self._mixed(y.detach()))
        self.error = max(self.error, inf if isnan(gap) else gap)
        weight, bias = self.layer.weight, self.layer.bias
        never = torch.zeros((), dtype=torch.bool, device=y.device)
        y = torch.where(never, weight[(0,) * weight.dim()].to(y.dtype), y)
        if bias is not None:
            y = y + bias.to(y.dtype).view(-1, *[1] * (-1 - self.axis))
        return y

    def _mixed(self, y: Tensor) -> Tensor:
        """Return sums over outputs: (..., G*k1*k2, *size) to (..., G*m1*m2, *size)."""
        one, two = self.mixes
        axis = y.dim() + self.axis
        outer, inner = prod(y.shape[:axis]), prod(y.shape[axis + 1 :])
        rows = y.reshape(outer, self.groups, one.shape[1], two.shape[1], inner)
        sums = torch.einsum("ai,ngijp->ngajp", one, rows)
        sums = torch.einsum("bj,ngajp->ngabp", two, sums)
        return sums.reshape(*y.shape[:axis], -1, *y.shape[axis + 1 :])


def sketch_of(twin: Any) -> Sketch | None:
    """Return what answers for the plain layer of a bilinear one; None where its weight is needed,
    as of other kinds, and of more terms than the sums could tell apart."""
    if type(twin) not in _KINDS or twin.w1.dtype not in (torch.float32, torch.float64):
        return None
    spec, (_, field) = twin.factors, _KINDS[type(twin)]
    draws = torch.Generator().manual_seed(SEED)
    mixes = [torch.randn(min(SIDE, k), k, generator=draws) / k**0.5 for k in spec.out]
    one, two = (mix.to(twin.w1) for mix in mixes)
    sides = len(one), len(two)
    mixed = spec.model_copy(update={"out": sides})
    if mixed.full_rank < spec.rank:
        return None
    fields = {**fields_of(twin, twin.FIELDS), "bias": False}
    fields[field] = getattr(twin, "groups", 1) * prod(sides)
    small = blank(type(twin), {**fields, "factors": mixed}, twin.w1)
    return Sketch(twin, small, (one, two))
