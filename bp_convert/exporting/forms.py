"""The forms in which a bilinear layer can stand in an exported graph, and a model laid out in them.

``factors`` are products at run time, as the layer itself computes: two layers in a row where that
is what they come to. ``built`` holds the factors in the file and builds the weight from them by
constant operations, which a runtime folds when it loads the file: small on disk, dense in speed.
``dense`` holds the weight.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from operator import attrgetter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bp_convert.graph.clone import clone
from bp_convert.graph.running import evaluating
from bp_convert.groups.tied_linear import BPTiedLinear
from bp_convert.kinds import is_twin
from bp_convert.kron.contract import w2_first
from bp_convert.kron.conv_layout import first_factor, layout_of, split_padding
from bp_convert.layers import BPConv1d, BPConv2d, BPConv3d, BPLinear
from bp_convert.values.literals import Form

Forward = Callable[..., Any]
_CONVS = (BPConv1d, BPConv2d, BPConv3d)


def none(layer: object) -> None:
    """Return that nothing special computes a layer."""


def bilinear_layers(model: nn.Module) -> dict[str, Any]:
    """Return the bilinear layers of a model by their first names."""
    return {name: one for name, one in model.named_modules() if is_twin(one)}


def is_recurrent(layer: nn.Module) -> bool:
    """Return whether a layer steps through a sequence: runtimes have an operator of their own for
    it, which wants the weight."""
    return hasattr(layer, "all_weights")


def in_forms(
    model: nn.Module,
    forms: Mapping[str, Form],
    special: Callable[[Any], Forward | None] = none,
    *,
    lay_out: bool = True,
) -> nn.Module:
    """Copy a model with each bilinear layer in its form; the source stays as it is.

    Args:
        forms: by the names of ``bilinear_layers``; what is not named stays as it is.
        special: returns what computes a layer, bilinear or not, by an operator of the target's;
            such a layer's weights are built in any form but ``dense``.
        lay_out: lay factors out before; else layers compute on them as they do themselves.
    """
    layers = bilinear_layers(model)
    dense = {layers[name]: layers[name].to_dense() for name in forms if forms[name] == "dense"}
    made = evaluating(clone(model, dense, apart=True))
    for name, one in [*made.named_modules()]:
        layer: Any = one
        forward = special(layer)
        if forward is None and forms.get(name, "dense") != "dense":
            forward = _forward_of(layer, forms[name], lay_out=lay_out)
        if forward is not None:  # the layer keeps its class, attributes and hooks
            layer.forward = forward
    return made


def _forward_of(layer: Any, form: Form, *, lay_out: bool) -> Forward | None:
    """Return what computes a layer in a form; None for what it does itself."""
    if form == "built":
        return None if is_recurrent(layer) else _built(layer)
    if not lay_out or getattr(layer, "groups", 1) > 1:
        return None
    if isinstance(layer, BPLinear) and not isinstance(layer, BPTiedLinear):
        return _linear(layer)
    return _conv(layer) if isinstance(layer, _CONVS) else None


# Weights that are built


def _built(layer: Any) -> Forward | None:
    """Compute the dense layer on the weight that the factors make; None where the layer does not
    have all of the dense one's tensors."""
    dense = layer.to_dense()
    names = [name for name, _ in dense.named_parameters()]
    names += [name for name, _ in dense.named_buffers()]
    dense.to("meta").eval()
    held = [attrgetter(name) for name in names]
    try:
        for one in held:
            one(layer)
    except AttributeError:
        return None

    def forward(*args: Any, **kwargs: Any) -> Any:
        weights = {name: one(layer) for name, one in zip(names, held, strict=True)}
        return torch.func.functional_call(dense, weights, args, kwargs)

    return forward


# Products on factors that are laid out once, so that the graph holds them as it uses them


def _held(layer: nn.Module, **laid: Tensor) -> None:
    """Keep tensors with a layer under the names ``laid_...``."""
    for name, tensor in laid.items():
        own = tensor.detach().clone(memory_format=torch.contiguous_format)
        layer.register_buffer(f"laid_{name}", own)


def _linear(layer: Any) -> Forward:
    """Compute a Linear as ``kron.contract.bilinear`` does; low rank comes to two Linears."""
    (k1, k2), (d1, d2), terms = layer.factors.out, layer.factors.inp, layer.factors.rank
    second_first = w2_first(k1, k2, d1, d2)
    with torch.no_grad():
        if second_first:
            left = layer.w1.permute(1, 2, 0).reshape(k1, d1 * terms)
            right = layer.w2.permute(0, 2, 1).reshape(terms * k2, d2)  # (R*k2, d2)
        else:
            left = layer.w1.transpose(0, 1).reshape(k1 * terms, d1)
            right = layer.w2.reshape(terms * d2, k2).t()  # (k2, R*d2)
        _held(layer, left=left, right=right)

    def forward(input: Tensor) -> Any:
        left, right = layer.laid_left, layer.laid_right
        if second_first:
            t = F.linear(input if d1 == 1 else input.reshape(-1, d2), right)  # (N*d1, R*k2)
            if (d1, k2) == (1, 1):
                return F.linear(t, left, layer.bias)
            y = _on_each(left, t.reshape(-1, d1 * terms, k2))  # (N, k1, k2)
        else:
            if d2 == 1:
                t = F.linear(input, left)  # (..., k1*R)
                if k1 == 1:
                    return F.linear(t, right, layer.bias)
            else:
                t = _on_each(left, input.reshape(-1, d1, d2))  # (N, k1*R, d2)
            y = F.linear(t.reshape(-1, terms * d2), right)  # (N*k1, k2)
        y = y.reshape(*input.shape[:-1], k1 * k2)
        return y if layer.bias is None else y + layer.bias

    return forward


def _on_each(left: Tensor, rows: Tensor) -> Tensor:
    """Multiply each matrix of a batch from the left; ``matmul`` would ask for the batch's size, and
    so bound it."""
    return torch.bmm(left.expand(rows.shape[0], -1, -1), rows)


def _conv(layer: Any) -> Forward:
    """Compute a convolution as its layer does, every product as a thin convolution; low rank, and
    channels mixed into few that are convolved, come to two convolutions in a row."""
    spec, kernel, axes = layer.factors, layer.kernel_size, layer.AXES
    lay, (k1, k2), terms = layout_of(spec, kernel), spec.out, spec.rank
    c1, c2, s1 = lay.c1, lay.c2, lay.s1
    mix_first = first_factor(spec, kernel, layer.stride) == 1
    point = prod(kernel) == 1
    front, left = split_padding(kernel, layer.padding, layer.dilation, layer.padding_mode)
    pads = [side for pair in reversed(front) for side in pair]
    mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
    own, steps = [], []
    for factor in (1, 2):
        mine = [owner == factor and not point for owner in spec.axes]
        own.append([n if one else 1 for n, one in zip(kernel, mine, strict=True)])
        steps.append(
            [
                [n if one else other for n, one in zip(values, mine, strict=True)]
                for values, other in ((layer.stride, 1), (left, 0), (layer.dilation, 1))
            ]
        )
    with torch.no_grad():
        if mix_first:
            one = layer.w1.transpose(0, 1).reshape(k1 * terms, c1, *own[0])
            two = layer.w2.permute(2, 0, 1).reshape(k2, terms * c2, *own[1])
        else:
            one = layer.w1.view(terms, k1, c1, s1).permute(1, 2, 0, 3)
            one = one.reshape(k1, c1 * terms, *own[0])
            two = layer.w2.transpose(1, 2).reshape(terms * k2, c2, *own[1])
        _held(layer, one=one, two=two)
    conv, last = type(layer).CONV, (k1 if mix_first else k2) == 1

    def mixed(x: Tensor, passive: int, bias: Tensor | None) -> Any:
        """Apply factor 1 to (N, C, P, *size), in any split of the first three: (N, K, P, *out)
        as (N, K, P*out, ...), or where its kernel is no point as (N, K*P, *out)."""
        w, size = layer.laid_one, x.shape[2:]
        columns = w.shape[1]
        if passive == 1:
            x = x if x.shape[1] == columns else x.reshape(-1, columns, *size)
            return conv(x, w, bias, *steps[0])
        if s1 == 1:
            y = conv(x.reshape(-1, columns, passive * size[0], *size[1:]), w, bias, *steps[0])
            return y.reshape(-1, w.shape[0] * passive, *size)
        x = x.reshape(-1, columns, passive, *size).transpose(1, 2)
        y = conv(x.reshape(-1, columns, *size), w, bias, *steps[0])  # (N*P, K, *out)
        y = y.reshape(-1, passive, w.shape[0], *y.shape[2:]).transpose(1, 2)
        return y.reshape(-1, w.shape[0] * passive, *y.shape[3:])

    def forward(input: Tensor) -> Any:
        single = input.dim() == axes + 1
        x = input.unsqueeze(0) if single else input
        x = F.pad(x, pads, mode=mode) if any(pads) else x
        if point:
            for axis, step in enumerate(layer.stride, 2):
                x = x if step == 1 else x[(slice(None),) * axis + (slice(None, None, step),)]
        bias = layer.bias if last else None
        if mix_first:
            t = mixed(x, c2, None)  # (N, k1*R*c2, *size)
            t = t if k1 == 1 else t.reshape(-1, terms * c2, *t.shape[2:])
            y = conv(t, layer.laid_two, bias, *steps[1])  # (N*k1, k2, *out)
        else:
            x = x if c1 == 1 else x.reshape(-1, c2, *x.shape[2:])
            y = mixed(conv(x, layer.laid_two, None, *steps[1]), k2, bias)
        y = y if y.shape[1] == k1 * k2 else y.reshape(-1, k1 * k2, *y.shape[2:])
        if layer.bias is not None and not last:
            y = y + layer.bias.view(-1, *[1] * axes)
        return y.squeeze(0) if single else y

    return forward
