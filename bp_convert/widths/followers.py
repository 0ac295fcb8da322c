"""How the tensors of modules that are re-dimensioned, not replaced, follow the channels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bp_convert.kinds import Spread
from bp_convert.torch_private import BatchNormBase, ConvBase, InstanceNormBase
from bp_convert.widths.width_forms import is_turned

_NORMS = (
    BatchNormBase,
    InstanceNormBase,
    nn.GroupNorm,
    nn.PReLU,
)


@dataclass(frozen=True)
class Follow:
    """One tensor's new axes: for each axis the old index of every new one, None for no change.

    ``shared`` is the axis along which a weight is shared among repeats (inputs that are summed),
    ``scale`` a factor per new index of axis 0.
    """

    axes: tuple[Tensor | None, ...]
    shared: int | None = None
    scale: Tensor | None = None

    def apply(self, old: Tensor) -> Tensor:
        """Return the tensor at its new shape."""
        new = old
        for axis, index in enumerate(self.axes):
            if index is None:
                continue
            one = Spread(index, index)
            new = one.columns(new, axis) if axis == self.shared else one.rows(new, axis)
        if self.scale is not None:
            new = new * self.scale.to(new.dtype).view(-1, *[1] * (new.dim() - 1))
        return new


def interleave(before: int, after: int, block: int = 1) -> Tensor:
    """Return the old channel of each new one: every block of channels is repeated in place.

    Repeats lie side by side, so that equal parts stay equal parts: heads of attention, groups of
    a GroupNorm and halves of a split keep their members.
    """
    blocks = torch.arange(after // block) * (before // block) // (after // block)
    return (blocks[:, None] * block + torch.arange(block)).flatten()  # (after,)


def in_place(before: tuple[int, ...], after: tuple[int, ...]) -> tuple[Tensor | None, ...]:
    """Return the new axes of a tensor of which every axis that grows repeats in place."""
    pairs = zip(before, after, strict=True)
    return tuple(None if old == new else interleave(old, new) for old, new in pairs)


def channel_axis(module: nn.Module) -> int | None:
    """Return the axis of a follower's input that its one-axis tensors run along, or None."""
    if isinstance(module, _NORMS):
        return 1
    if isinstance(module, nn.LayerNorm | nn.RMSNorm | nn.MultiheadAttention):
        return -1
    if isinstance(module, ConvBase):
        return -1 - len(module.kernel_size)
    if is_turned(module):
        return -1
    return None


def axis_of(module: nn.Module, axis: int, shape: tuple[int, ...]) -> int:
    """Return the channel axis on an input of this shape; layer norms of images have it second."""
    if not isinstance(module, nn.LayerNorm) or type(module).forward is nn.LayerNorm.forward:
        return axis
    width = module.normalized_shape[-1]
    return 1 if len(shape) == 4 and shape[1] == width and axis == -1 else axis


def mixes(module: nn.Module) -> bool:
    """Return whether a follower sums over its input channels, so that its output is new."""
    if isinstance(module, ConvBase):
        return module.groups != module.in_channels
    return is_turned(module)


def follow(
    module: nn.Module, name: str, before: tuple[int, ...], after: tuple[int, ...], inputs: Tensor
) -> Follow | None:
    """Say how tensor ``name`` of ``module`` follows, given the old channel of each new input.

    Returns None where this module type is not known well enough.
    """
    rule = _rule(module, name, before, after, inputs)
    if rule is None:
        return None
    pairs = zip(before, rule.axes, strict=True)
    sizes = tuple(old if index is None else len(index) for old, index in pairs)
    return rule if sizes == after else None  # a tensor that a subclass has of its own


def _rule(
    module: nn.Module, name: str, before: tuple[int, ...], after: tuple[int, ...], inputs: Tensor
) -> Follow | None:
    plain = in_place(before, after)
    if isinstance(module, nn.MultiheadAttention):
        return _attention(module, name, plain, inputs)
    if isinstance(module, _NORMS):
        return Follow((inputs,)) if after == tuple(inputs.shape) else Follow(plain)
    if isinstance(module, nn.LayerNorm | nn.RMSNorm):
        return Follow((*plain[:-1], None if before[-1] == after[-1] else inputs))
    if isinstance(module, ConvBase):
        return _conv(module, name, plain, after, inputs)
    if is_turned(module):
        return Follow((inputs, plain[1]), shared=0) if name == "weight" else Follow(plain)
    return None


def _conv(
    module: ConvBase,
    name: str,
    plain: tuple[Tensor | None, ...],
    after: tuple[int, ...],
    inputs: Tensor,
) -> Follow | None:
    rest = plain[2:]
    if module.groups == module.in_channels:
        times = after[0] // len(inputs)  # outputs of each input channel
        own = inputs.repeat_interleave(times) * times + torch.arange(times).repeat(len(inputs))
        return Follow((own, *plain[1:]))
    if name != "weight":  # a bias, or a gain of a subclass
        return Follow(plain)
    if module.transposed:
        return Follow((inputs, plain[1], *rest), shared=0) if module.groups == 1 else None
    if module.groups == 1:
        return Follow((plain[0], inputs, *rest), shared=1)
    if torch.equal(inputs, interleave(module.in_channels, len(inputs))):
        return Follow(plain, shared=1)
    return None


def _attention(
    module: nn.MultiheadAttention, name: str, plain: tuple[Tensor | None, ...], inputs: Tensor
) -> Follow:
    """Keep the scores: q.k grows with the head's width, its root in the scale only by half."""
    ratio = len(inputs) / module.embed_dim
    rows = plain[0]
    size = 0 if rows is None else len(rows)
    scale: Any = None
    if name.startswith("in_proj") and rows is not None:
        scale = torch.ones(size, dtype=torch.float64)
        scale[: size // 3] = ratio**-0.5
    elif name == "q_proj_weight" and rows is not None:
        scale = torch.full((size,), ratio**-0.5, dtype=torch.float64)
    if name == "in_proj_weight" or name == "q_proj_weight":
        return Follow((rows, inputs), shared=1, scale=scale)
    if name in ("k_proj_weight", "v_proj_weight"):
        return Follow(plain, shared=1)
    return Follow(plain, scale=scale)
