"""Whether two layers compute the same: both are run on inputs that tell, in every way.

Inputs are random, zero, large and negative, of several shapes and dtypes; the modes are train and
eval. The layer must also leave its buffers and its input as they are, and give the same again.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from bp_convert.graph.clone import all_weights, clone
from bp_convert.graph.reshape import cast
from bp_convert.graph.running import draws_kept, in_mode
from bp_convert.graph.tree import tensors_in
from bp_convert.kinds import Kind
from bp_convert.torch_private import ConvBase

ROUNDING = {torch.float64: 1e-5, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 5e-2}
EXACT = 1e-10  # in float64, of weights that are the same
LARGE = 1e3


def near(kind: Kind, layer: nn.Module, plain: nn.Module) -> bool:
    """Return whether two layers give the same on one random input in eval mode."""
    copies = clone(layer, apart=True), clone(plain)
    x = draw(kind, plain)[0]
    one, two = (in_mode(copy, training=False) for copy in copies)
    with draws_kept(layer), torch.no_grad(), one, two:
        return not parted(_outputs(copies[0], x), _outputs(copies[1], x), x)


def differs(
    kind: Kind, layer: nn.Module, plain: nn.Module, *, training: bool = True, exact: bool = False
) -> str:
    """Say where a layer does something else than the plain layer that is to stand for it; empty
    where it does the same throughout.

    Args:
        training: look at train mode, too; a weight that is computed may be another there.
        exact: both hold the same weights.
    """
    further = _further_inputs(layer, plain)
    if further:
        return f"its forward takes further inputs ({', '.join(further)})"
    own = next(plain.parameters()).dtype
    for dtype in dict.fromkeys((own, torch.float64, torch.float32, torch.bfloat16)):
        one, two = clone(layer, apart=True), clone(plain)
        if dtype != own:
            cast(one, dtype)
            cast(two, dtype)
        for mode in (False, True) if training and dtype == own else (False,):
            with draws_kept(one), in_mode(one, training=mode), in_mode(two, training=mode):
                said = _compared(kind, one, two, full=dtype == own, exact=exact)
            if said:
                return f"{said} {'in train mode' if mode else 'in eval mode'}"
    return ""


def code_of(layer: nn.Module) -> object:
    """Return what is equal for two layers of the same code, structure and settings, whatever their
    weights: one of them need be tried. It is a layer's own where that holds more than settings."""
    found = []
    try:
        for name, module in layer.named_modules():
            held = {key: one for key, one in vars(module).items() if key != "_modules"}
            found.append((name, type(module), _frozen(held)))
    except TypeError:
        return id(layer)
    return tuple(found)


def _frozen(value: object) -> object:
    """Return settings in a form that can be compared.

    Raises:
        TypeError: they are no plain values.
    """
    kind = type(value)
    if value is None or isinstance(value, bool | int | float | str | torch.dtype | torch.device):
        return kind, value
    if isinstance(value, Tensor):
        return kind, tuple(value.shape), value.dtype
    if isinstance(value, dict):
        return kind, tuple((key, _frozen(one)) for key, one in value.items())
    if isinstance(value, tuple | list):
        return kind, tuple(map(_frozen, value))
    if isinstance(value, set):
        return kind, frozenset(value)
    if isinstance(value, nn.Module):
        raise TypeError(kind)
    if kind.__module__.startswith("torch.") and hasattr(value, "__dict__"):  # a hook of torch's
        return kind, _frozen(vars(value))
    raise TypeError(kind)


def draw(kind: Kind, plain: Any) -> list[Tensor]:
    """Return inputs of several shapes for a plain layer, in its dtype and on its device."""
    weight = next(plain.parameters())
    generator = torch.Generator().manual_seed(0)
    if kind.lookup:
        rows = kind.widths(plain)[0]
        found = [torch.randint(rows, shape, generator=generator) for shape in ((2, 3), (5,), ())]
        return [one.to(weight.device) for one in found]
    return [
        torch.randn(shape, generator=generator, dtype=torch.float64).to(weight)
        for shape in _shapes(kind, plain)
    ]


def _shapes(kind: Kind, plain: Any) -> list[tuple[int, ...]]:
    if not isinstance(plain, ConvBase):
        inputs = getattr(plain, kind.fields[0])
        return [(3, inputs), (2, 3, inputs), (inputs,)]
    pad = max(_sides(plain))
    spans = [
        max(d * (k - 1) + 1, pad + 1)
        for k, d in zip(plain.kernel_size, plain.dilation, strict=True)
    ]
    # Padding that is computed from the input may be right for some sizes: all rests are tried.
    sizes = [tuple(span + more for span in spans) for more in range(max(2, *plain.stride))]
    channels = plain.in_channels
    return [
        (2, channels, *sizes[0]),
        *((1, channels, *one) for one in sizes[1:]),
        (channels, *sizes[1]),
    ]


def _sides(plain: Any) -> Sequence[int]:
    return (0,) if isinstance(plain.padding, str) else tuple(plain.padding)


def _compared(kind: Kind, layer: nn.Module, plain: nn.Module, *, full: bool, exact: bool) -> str:
    """Run both on every input; return what is wrong, in words.

    Args:
        full: on large, small and negative inputs and on each shape; else on one.
    """
    inputs = draw(kind, plain)
    if not kind.lookup:
        first = inputs[0][:1]
        inputs += [torch.zeros_like(first), LARGE * first, -first.abs()]
    before = {name: one.detach().clone() for name, one in all_weights(layer).items()}
    for number, x in enumerate(inputs if full else inputs[:1]):
        closely = number == 0
        slopes = closely and x.is_floating_point()
        given, wanted = (x.clone().requires_grad_(slopes) for _ in range(2))
        with torch.set_grad_enabled(slopes):
            try:
                expected = _outputs(plain, wanted)
            except Exception:  # not in this precision, or not of this shape
                continue
            try:
                got = _outputs(layer, given)
                again = _outputs(layer, x.clone()) if closely else got
            except Exception as problem:
                return f"it stops ({type(problem).__name__}) on an input of {tuple(x.shape)}"
        said = parted(got, expected, x, exact)
        if said:
            return said
        if any(not torch.equal(a, b) for a, b in zip(got, again, strict=True)):
            return "it gives another output at each call"
        if not torch.equal(given.detach(), x):
            return "it writes on its input"
        if slopes and parted(_slopes(got, given), _slopes(expected, wanted), x, exact):
            return "its gradient is another"
    after = all_weights(layer)
    changed = [name for name, one in before.items() if not torch.equal(one, after[name])]
    return f"it changes its {changed[0]}" if changed else ""


def _outputs(layer: nn.Module, x: Tensor) -> list[Tensor]:
    return tensors_in(layer(x))


def _slopes(outputs: Sequence[Tensor], x: Tensor) -> list[Tensor]:
    draws = torch.Generator().manual_seed(1)
    parts = [
        (one * torch.rand(one.shape, generator=draws, dtype=torch.float64).to(one)).sum()
        for one in outputs
        if one.requires_grad
    ]
    if not parts:
        return []
    return [torch.autograd.grad(torch.stack(parts).sum(), x, allow_unused=True)[0]]


def parted(
    got: Sequence[Tensor], expected: Sequence[Tensor], x: Tensor, exact: bool = False
) -> str:
    """Say how two lists of outputs on an input differ."""
    if len(got) != len(expected):
        return "it gives another number of outputs"
    for mine, due in zip(got, expected, strict=True):
        if mine is None or due is None or mine.shape != due.shape:
            return f"its output has another shape on an input of shape {tuple(x.shape)}"
        if mine.dtype != due.dtype:
            return f"its output is {str(mine.dtype).removeprefix('torch.')}"
        if not due.numel():
            continue
        size = float(due.detach().abs().max()) or 1.0
        gap = float((mine - due).detach().abs().max())
        held = EXACT if exact and due.dtype == torch.float64 else ROUNDING.get(due.dtype, 1e-4)
        if not gap <= held * size:
            return "it computes something else"
    return ""


def _further_inputs(layer: nn.Module, plain: nn.Module) -> list[str]:
    own = inspect.signature(type(layer).forward).parameters
    base = inspect.signature(type(plain).forward).parameters
    return list(own)[len(base) :]
