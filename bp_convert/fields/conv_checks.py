"""Checks of a bilinear convolution's fields, at construction."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from bp_convert.errors import FactorError
from bp_convert.kron.conv_layout import aligned_axes
from bp_convert.kron.fits import checked, wrong_pair
from bp_convert.kron.transposed_layout import transposed_sizes
from bp_convert.values.factors import FactorSpec

_MODES = ("zeros", "reflect", "replicate", "circular")


def check_fields(layer: Any) -> None:
    """Refuse what torch refuses.

    Raises:
        FactorError: the field, what it is, and what it may be.
    """
    name = type(layer).__name__
    if layer.groups < 1 or any(n % layer.groups for n in (layer.in_channels, layer.out_channels)):
        raise FactorError(
            where=name,
            found=f"groups={layer.groups}",
            allowed=f"a divisor of {layer.in_channels} and of {layer.out_channels} channels",
            fix="give a number of groups that divides both",
        )
    for field in ("kernel_size", "stride", "padding", "dilation", "output_padding"):
        value = getattr(layer, field, ())
        if value and isinstance(value, tuple) and len(value) != layer.AXES:
            raise FactorError(
                where=f"{name}, {field}",
                found=repr(value),
                allowed=f"one number, or {layer.AXES}",
                fix="give one number for each spatial axis",
            )
    modes = _MODES[:1] if layer.transposed else _MODES
    if layer.padding_mode not in modes:
        raise FactorError(
            where=f"{name}, padding_mode",
            found=repr(layer.padding_mode),
            allowed=", ".join(modes),
            fix="name one of torch's padding modes",
        )
    words = () if layer.transposed else ("same", "valid")
    if isinstance(layer.padding, str) and layer.padding not in words:
        raise FactorError(
            where=f"{name}, padding",
            found=repr(layer.padding),
            allowed="numbers" + "".join(f" or {word!r}" for word in words),
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
    name, kernel = type(layer).__name__, layer.kernel_size
    channels = layer.in_channels // layer.groups
    found = aligned_axes(spec.inp, channels, kernel)
    axes = spec.axes or next(iter(found), ())
    spec = checked(
        name,
        spec.model_copy(update={"axes": axes}),
        inputs=channels * prod(kernel),
        outputs=layer.out_channels // layer.groups,
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


def output_padding_for(
    layer: Any, in_size: Sequence[int], output_size: Sequence[int]
) -> tuple[int, ...]:
    """Return what a transposed convolution pads its output with, so that it has the size asked for.

    Raises:
        ValueError: a size that the stride cannot give, as torch's layer says it.
    """
    axes = layer.AXES
    wanted = tuple(output_size[-axes:])
    least = transposed_sizes(
        in_size, layer.kernel_size, layer.stride, layer.padding, layer.dilation, (0,) * axes
    )
    most = tuple(n + step - 1 for n, step in zip(least, layer.stride, strict=True))
    fits = all(a <= n <= b for a, n, b in zip(least, wanted, most, strict=False))
    if len(output_size) not in (axes, axes + 1, axes + 2) or not fits:
        raise ValueError(
            f"{type(layer).__name__} cannot give the size {tuple(output_size)} for an input of "
            f"{tuple(in_size)}: from {least} to {most} can be had"
        )
    return tuple(n - low for n, low in zip(wanted, least, strict=True))
