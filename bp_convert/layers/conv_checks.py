"""Checks of a bilinear convolution's fields, at construction."""

from __future__ import annotations

from math import prod
from typing import Any

from bp_convert.errors import FactorError
from bp_convert.kron.conv_layout import aligned_axes
from bp_convert.layers.common import checked, wrong_pair
from bp_convert.values.factors import FactorSpec

_MODES = ("zeros", "reflect", "replicate", "circular")


def check_fields(layer: Any) -> None:
    """Refuse what torch refuses, and groups.

    Raises:
        FactorError: the field, what it is, and what it may be.
    """
    name = type(layer).__name__
    if layer.groups != 1:
        raise FactorError(
            where=name,
            found=f"groups={layer.groups}",
            allowed="groups=1: each group would need factors of its own",
            fix="keep grouped and depth-wise convolutions dense",
        )
    for field in ("kernel_size", "stride", "padding", "dilation"):
        value = getattr(layer, field)
        if isinstance(value, tuple) and len(value) != layer.AXES:
            raise FactorError(
                where=f"{name}, {field}",
                found=repr(value),
                allowed=f"one number, or {layer.AXES}",
                fix="give one number for each spatial axis",
            )
    if layer.padding_mode not in _MODES:
        raise FactorError(
            where=f"{name}, padding_mode",
            found=repr(layer.padding_mode),
            allowed=", ".join(_MODES),
            fix="name one of torch's padding modes",
        )
    if isinstance(layer.padding, str) and layer.padding not in ("same", "valid"):
        raise FactorError(
            where=f"{name}, padding",
            found=repr(layer.padding),
            allowed="numbers, 'same' or 'valid'",
            fix="name one of these",
        )
    if layer.padding == "same" and any(step != 1 for step in layer.stride):
        raise FactorError(
            where=f"{name}, padding='same'",
            found=f"stride={layer.stride}",
            allowed="stride 1, as in torch",
            fix="give the padding in numbers",
        )


def check_factors(layer: Any, spec: FactorSpec) -> FactorSpec:
    """Return ``spec`` with the owners of the kernel's axes, its rank cut to full rank.

    Raises:
        FactorError: pairs that do not fit, or that no layout of the kernel's axes can run.
    """
    name, channels, kernel = type(layer).__name__, layer.in_channels, layer.kernel_size
    found = aligned_axes(spec.inp, channels, kernel)
    axes = spec.axes or next(iter(found), ())
    spec = checked(
        name,
        spec.model_copy(update={"axes": axes}),
        inputs=channels * prod(kernel),
        outputs=layer.out_channels,
    )
    if len(axes) == len(kernel) and any(_alike(axes, other, kernel) for other in found):
        return spec
    raise wrong_pair(
        name,
        "in",
        spec.inp,
        f"(c1*s1, c2*s2) with c1*c2 = {channels} and s1, s2 whole axes of the kernel {kernel}",
    )


def _alike(axes: tuple[int, ...], other: tuple[int, ...], kernel: tuple[int, ...]) -> bool:
    """Return whether two layouts differ at most in who owns axes of length 1."""
    return all(
        mine == theirs or size == 1 for mine, theirs, size in zip(axes, other, kernel, strict=True)
    )
