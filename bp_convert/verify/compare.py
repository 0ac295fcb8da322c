"""Outputs of two models compared, tensor by tensor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bp_convert.graph.running import describe
from bp_convert.graph.tree import named_tensors

FLAT = 1e-4  # of an output's size, the least that its own variation counts as


@dataclass(frozen=True)
class Difference:
    """What two outputs of equal structure differ by.

    Attributes:
        size: relative Frobenius difference of the tensor that differs most; 0 where none does.
        where: that tensor.
        form: how the structures differ, in words; empty where they agree.
    """

    size: float = 0.0
    where: str = ""
    form: str = ""


def difference(expected: Any, got: Any) -> Difference:
    """Compare what two models of the same weights gave: structure, shapes, dtypes, values."""
    old, new = (dict(named_tensors(one, objects=True)) for one in (expected, got))
    if type(expected) is not type(got) or list(old) != list(new):
        due = f"{type(expected).__name__} of {_words(old)}"
        return Difference(form=f"{type(got).__name__} of {_words(new)} where {due} is due")
    worst = Difference()
    for where, tensor in old.items():
        other = new[where]
        if tensor.shape != other.shape or tensor.dtype != other.dtype:
            return Difference(
                where=where, form=f"{describe(other)} where {describe(tensor)} is due"
            )
        size = relative(tensor, other)
        if size > worst.size:
            worst = Difference(size, where)
    return worst


def relative(expected: Tensor, got: Tensor) -> float:
    """Return the relative Frobenius difference of two tensors, or of integers the share that
    differs; places that are not finite in both in the same way agree."""
    if not expected.numel():
        return 0.0
    if not (expected.is_floating_point() or expected.is_complex()):
        return float((expected != got).double().mean())
    one, two = _double(expected), _double(got)
    same = one == two  # infinities
    finite = torch.isfinite(one) & torch.isfinite(two)
    if bool((~finite & ~same & ~(torch.isnan(one) & torch.isnan(two))).any()):
        return float("inf")
    one, two = one[finite], two[finite]
    return _share(float((two - one).norm()), float(one.norm()))


@dataclass(frozen=True)
class Change:
    """What a conversion did to the outputs of its source.

    Attributes:
        error: relative Frobenius error of the floating-point output that changed most, about the
            mean of its features; None where none could be compared.
        where: that output.
        flips: share of integer outputs that changed; None where there are none.
        notes: outputs that could not be compared.
    """

    error: float | None
    where: str
    flips: float | None
    notes: tuple[str, ...]


def change(expected: Any, got: Any) -> Change:
    """Compare a conversion's outputs with its source's; what has no counterpart is left out."""
    old, new = dict(named_tensors(expected)), dict(named_tensors(got))
    error: float | None = None
    worst = ""
    flipped, integers, apart = 0, 0, []
    for where, tensor in old.items():
        other = new.get(where)
        if other is None or other.shape != tensor.shape or not tensor.numel():
            apart.append(where)
        elif tensor.is_floating_point() or tensor.is_complex():
            size = _centred_error(tensor, other)
            if size is not None and (error is None or size > error):
                error, worst = size, where
        else:
            flipped += int((tensor != other).sum())
            integers += tensor.numel()
    notes = () if not apart else (f"not compared, of another length: {', '.join(apart[:8])}",)
    return Change(error, worst, flipped / integers if integers else None, notes)


def _centred_error(expected: Tensor, got: Tensor) -> float | None:
    """Return the error relative to how the output varies from example to example: a part that
    is the same for all, such as the logarithm of the number of classes, says nothing."""
    one, two = _double(expected), _double(got)
    finite = torch.isfinite(one) & torch.isfinite(two)
    if not bool(finite.any()):
        return None
    if not bool(torch.equal(torch.isfinite(one), torch.isfinite(two))):
        return float("inf")
    one, two = torch.where(finite, one, 0.0), torch.where(finite, two, 0.0)
    single = one.dim() < 2 or one.shape[0] < 2  # then the mean is over all that it holds
    spread = one - (one.mean() if single else one.mean(0, keepdim=True))
    least = max(float(spread.norm()), FLAT * float(one.norm()))
    return _share(float((two - one).norm()), least)


def _share(gap: float, size: float) -> float:
    if gap == 0.0:
        return 0.0
    return gap / size if size else float("inf")


def strided(tensor: Tensor) -> Tensor:
    """Return a tensor as a plain one, without its graph."""
    tensor = tensor.detach()
    if tensor.is_nested:
        return tensor.to_padded_tensor(0.0)
    return tensor if tensor.layout == torch.strided else tensor.to_dense()


def _double(tensor: Tensor) -> Tensor:
    tensor = strided(tensor)
    if tensor.is_complex():
        return torch.view_as_real(tensor.to(torch.complex128))
    return tensor.to(torch.float64)


def _words(tensors: dict[str, Tensor]) -> str:
    return ", ".join(describe(one) for one in list(tensors.values())[:8]) or "nothing"
