"""A layer of low rank as two plain torch layers in a row, which are as small as its factors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from bp_convert.fields.carry import blank
from bp_convert.kron.conv_layout import layout_of
from bp_convert.layers.conv import BPConv1d, BPConv2d, BPConv3d
from bp_convert.layers.embedding import BPEmbedding
from bp_convert.layers.linear import BPLinear
from bp_convert.layers.turned import BPConv1D

M = TypeVar("M", bound=nn.Module)


def in_two(layer: nn.Module) -> nn.Sequential | None:
    """Return two plain layers that together compute what ``layer`` does; nothing is shared.

    Where one factor of each pair is 1, a term is the outer product of a column and a row: the
    layer is a matrix (D, R) and one (R, K), or a convolution to R channels and one from them.

    Returns:
        None for layers whose factors have no such form.
    """
    make = _MAKERS.get(type(layer))
    with torch.no_grad():
        pair = None if make is None else make(layer)
    if pair is None:
        return None
    trained = any(one.requires_grad for one in layer.parameters())
    return nn.Sequential(*pair).requires_grad_(trained).train(layer.training)


def _linears(layer: Any) -> list[nn.Module] | None:
    (k1, k2), (d1, d2) = layer.factors.out, layer.factors.inp
    if k2 == d1 == 1:  # w1 (R, K, 1), w2 (R, D, 1)
        first, last = layer.w2.flatten(1), layer.w1.flatten(1)
    elif k1 == d2 == 1:  # w1 (R, 1, D), w2 (R, 1, K)
        first, last = layer.w1.flatten(1), layer.w2.flatten(1)
    else:
        return None
    return [_linear(first), _linear(last.t(), layer.bias)]


def _convs(layer: Any) -> list[nn.Module] | None:
    """A factor convolves along the axes of the kernel that it owns."""
    (k1, k2), lay = layer.factors.out, layout_of(layer.factors, layer.kernel_size)
    if layer.padding_mode != "zeros" or isinstance(layer.padding, str) or layer.groups != 1:
        return None
    w1 = layer.w1.reshape(-1, k1, lay.c1, *_along(layer, 1))
    w2 = layer.w2.reshape(-1, lay.c2, *_along(layer, 2), k2).movedim(-1, 1)  # (R, k2, c2, *own)
    if k2 == lay.c1 == 1:
        return [
            _conv(layer, 2, w2.squeeze(1)),
            _conv(layer, 1, w1.squeeze(2).transpose(0, 1), True),
        ]
    if k1 == lay.c2 == 1:
        return [
            _conv(layer, 1, w1.squeeze(1)),
            _conv(layer, 2, w2.squeeze(2).transpose(0, 1), True),
        ]
    return None


def _tables(layer: Any) -> list[nn.Module] | None:
    (e1, _), (v1, v2) = layer.factors.out, layer.factors.inp
    if not (v2 == e1 == 1 and v1 == layer.num_embeddings):  # w1 (R, V, 1), w2 (R, 1, E)
        return None
    rows = layer.w1.flatten(1).t().clone()  # (V, R)
    if layer.padding_idx is not None:
        if layer.padding_row.any():  # it stands apart, and need not be in the factors' span
            return None
        rows[layer.padding_idx] = 0
    fields = (*rows.shape, layer.padding_idx)
    names = ("num_embeddings", "embedding_dim", "padding_idx")
    table = blank(nn.Embedding, dict(zip(names, fields, strict=True)), rows)
    table.weight.copy_(rows)
    return [table, _linear(layer.w2.flatten(1).t())]


def _linear(weight: Tensor, bias: Tensor | None = None) -> nn.Linear:
    rows, columns = weight.shape
    fields = {"in_features": columns, "out_features": rows, "bias": bias is not None}
    return _filled(blank(nn.Linear, fields, weight), weight, bias)


def _conv(layer: Any, factor: int, weight: Tensor, last: bool = False) -> nn.Module:
    def own(values: tuple[int, ...], other: int) -> tuple[int, ...]:
        pairs = zip(values, layer.factors.axes, strict=True)
        return tuple(value if owner == factor else other for value, owner in pairs)

    fields = {
        "in_channels": weight.shape[1],
        "out_channels": weight.shape[0],
        "kernel_size": own(layer.kernel_size, 1),
        "stride": own(layer.stride, 1),
        "padding": own(layer.padding, 0),
        "dilation": own(layer.dilation, 1),
        "bias": last and layer.bias is not None,
    }
    dense: type[nn.Module] = layer.DENSE
    return _filled(blank(dense, fields, weight), weight, layer.bias if last else None)


def _along(layer: Any, factor: int) -> tuple[int, ...]:
    pairs = zip(layer.kernel_size, layer.factors.axes, strict=True)
    return tuple(size if owner == factor else 1 for size, owner in pairs)


def _filled(made: M, weight: Tensor, bias: Tensor | None) -> M:
    plain: Any = made
    plain.weight.copy_(weight)
    if bias is not None:
        plain.bias.copy_(bias)
    return made


_MAKERS: dict[type[nn.Module], Callable[[Any], list[nn.Module] | None]] = {
    BPLinear: _linears,
    BPConv1D: _linears,
    BPConv1d: _convs,
    BPConv2d: _convs,
    BPConv3d: _convs,
    BPEmbedding: _tables,
}
