"""Library models made small without leaving their class: fewer repeated blocks, fewer channels."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torchvision.ops import FrozenBatchNorm2d

LEAST = 16  # narrower layers keep their width
_BATCH_NORMS = (nn.modules.batchnorm._BatchNorm, FrozenBatchNorm2d)


def shallow(model: nn.Module, keep: int = 1) -> nn.Module:
    """Drop blocks that repeat the one before them: same type, same shapes of all weights.

    Args:
        keep: how many of a run of equal blocks stay.
    """
    for module in list(model.modules()):
        if isinstance(module, nn.Sequential | nn.ModuleList):
            _drop_repeats(module, keep)
    return model


def _drop_repeats(blocks: nn.Sequential | nn.ModuleList, keep: int) -> None:
    before: object = None
    count = 0
    dropped = []
    for name, block in blocks.named_children():
        form = (type(block), [(key, one.shape) for key, one in block.state_dict().items()])
        count = count + 1 if form == before and form[1] else 1
        before = form
        if count > keep:
            dropped.append(name)
    kept = [(name, one) for name, one in blocks._modules.items() if name not in dropped]
    if dropped:
        blocks._modules.clear()
        numbered = all(name.isdecimal() for name, _ in kept)
        blocks._modules.update(
            (str(number) if numbered else name, one) for number, (name, one) in enumerate(kept)
        )


def thin(model: nn.Module, by: int, heads: tuple[str, ...] = ()) -> nn.Module:
    """Divide the widths of convolutions, linear layers and norms, in place.

    A width becomes a function of itself, so that what agreed still agrees: a ``by``-th where it is
    at least ``LEAST`` and divisible.

    Args:
        heads: ends of names of the layers that keep the number of their outputs.
    """

    def less(width: int) -> int:
        return width // by if width >= LEAST and width % by == 0 else width

    for name, module in model.named_modules():
        fixed = bool(heads) and name.endswith(heads)
        if isinstance(module, nn.modules.conv._ConvNd):
            outputs = module.out_channels
            _thin_conv(module, less(module.in_channels), outputs if fixed else less(outputs))
        elif isinstance(module, nn.Linear):
            outputs = module.out_features if fixed else less(module.out_features)
            module.in_features, module.out_features = less(module.in_features), outputs
            _cut(module, weight=(outputs, module.in_features))
            _cut(module, bias=(outputs,))
        elif isinstance(module, _BATCH_NORMS):
            size = (less(len(module.running_mean)),)
            if hasattr(module, "num_features"):
                (module.num_features,) = size
            _cut(module, weight=size, bias=size, running_mean=size, running_var=size)
        elif isinstance(module, nn.GroupNorm):
            module.num_channels = less(module.num_channels)
            module.num_groups = min(module.num_groups, module.num_channels)
            _cut(module, weight=(module.num_channels,), bias=(module.num_channels,))
        elif isinstance(module, nn.LayerNorm) and len(module.normalized_shape) == 1:
            module.normalized_shape = (less(module.normalized_shape[0]),)
            _cut(module, weight=module.normalized_shape, bias=module.normalized_shape)
        elif isinstance(module, nn.PReLU):
            module.num_parameters = less(module.num_parameters)
            _cut(module, weight=(module.num_parameters,))
    return model


def _thin_conv(conv: Any, inputs: int, outputs: int) -> None:
    if conv.groups == conv.in_channels:  # depth-wise
        conv.groups = inputs
    conv.in_channels, conv.out_channels = inputs, outputs
    first, second = (inputs, outputs) if conv.transposed else (outputs, inputs)
    size = (first, second // conv.groups, *conv.kernel_size)
    _cut(conv, weight=size, bias=(outputs,))


def _cut(module: nn.Module, **sizes: tuple[int, ...]) -> None:
    """Keep the first entries of weights along each axis, scaled up to the same output variance."""
    for name, size in sizes.items():
        old = getattr(module, name, None)
        if old is None or tuple(old.shape) == size:
            continue
        new = old.detach()[tuple(slice(0, n) for n in size)].clone()
        if new.dim() > 1:
            new *= (old[0].numel() / new[0].numel()) ** 0.5
        if isinstance(old, nn.Parameter):
            module.register_parameter(name, nn.Parameter(new, old.requires_grad))
        else:
            module.register_buffer(name, new)


def lively(model: nn.Module) -> nn.Module:
    """Give zeros and tiny scales values, as training does, so that outputs tell something.

    Fresh models hide whole branches behind a zero: a layer scale of 1e-6, a last norm of zero.
    """
    for module in model.modules():
        weight = module.weight if isinstance(module, _BATCH_NORMS) else None
        if weight is not None and weight.detach().abs().mean() < 0.1:
            weight.detach().uniform_(0.7, 1.4)
        for name, one in module.named_parameters(recurse=False):
            if one.is_floating_point() and one.abs().max() < 1e-3:
                scale = 0.5 if one.dim() < 2 and name != "bias" else 0.05
                one.data.normal_(0, scale)
        for name, one in module.named_buffers(recurse=False):
            if "embed" in name and one.is_floating_point() and not one.any():  # a codebook
                one.normal_(0, 0.5)
    return model


def settle(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Give batch norms the statistics of one batch: deep fresh models ignore their input else."""
    trial = copy.deepcopy(model)
    norms = [one for one in trial.modules() if isinstance(one, nn.modules.batchnorm._BatchNorm)]
    for one in norms:
        one.train()
        one.momentum = 1.0
    with torch.no_grad():
        trial(*args, **kwargs)
    state = model.state_dict()
    for name, one in trial.state_dict().items():
        if name.endswith(("running_mean", "running_var")):
            state[name].copy_(one)
