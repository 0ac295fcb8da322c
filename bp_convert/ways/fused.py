"""Both products of a linear layer in one kernel of a CUDA device, for inference."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from math import ceil
from typing import NamedTuple

import torch
from torch import Tensor

from bp_convert.torch_private import is_watched, tf32_is_allowed
from bp_convert.values.factors import FactorSpec

SMALLEST = 16  # side of a block that tensor cores multiply
LARGEST = 128  # d1, of which one block has all
SIDE = 64  # of the blocks of k1 and k2
STEP = 64  # of d2 at a time
SUMS = 8192  # of a block that are held in registers
WARPS = 4
LEAST = 8  # of the pairs' sides, below which most of a block would be padding
HALVES = (torch.bfloat16, torch.float16)

_FAILED: set[tuple[object, ...]] = set()


class Blocks(NamedTuple):
    """The part of each axis that one program computes, and how many warps do it."""

    rows: int
    k1: int
    k2: int
    d1: int
    d2: int
    warps: int

    @classmethod
    def of(cls, spec: FactorSpec) -> Blocks:
        """Return those of a pair."""
        (k1, k2), (d1, d2) = spec.out, spec.inp
        d1 = _power(d1)
        k1, k2, d2 = (min(_power(one), most) for one, most in ((k1, SIDE), (k2, SIDE), (d2, STEP)))
        rows = max(1, SUMS // (k2 * max(k1, d1)) // 2)
        return cls(rows, k1, k2, d1, d2, WARPS if d1 <= SIDE else 2 * WARPS)

    def programs(self, spec: FactorSpec, rows: int) -> tuple[int, int, int]:
        """Return how many there are, along rows, k1 and k2."""
        k1, k2 = spec.out
        return ceil(rows / self.rows), ceil(k1 / self.k1), ceil(k2 / self.k2)


def fits(spec: FactorSpec) -> bool:
    """Return whether the kernel is made for such factors: neither low rank nor too large a d1."""
    return min(*spec.out, *spec.inp) >= LEAST and spec.inp[0] <= LARGEST


def takes(x: Tensor) -> bool:
    """Return whether a call on such an input may run in the kernel, which multiplies on tensor
    cores: in half precision, or in TF32 where torch is set to that."""
    plain = type(x) is Tensor and x.is_cuda and not torch.is_grad_enabled() and not is_watched()
    return plain and (x.dtype in HALVES or (x.dtype == torch.float32 and tf32_is_allowed()))


def work(spec: FactorSpec, rows: int) -> dict[str, float]:
    """Count what the time of a call on so many rows hangs on: programs, and the multiply-adds of
    their blocks, padding included; numbers read and written."""
    blocks = Blocks.of(spec)
    (k1, k2), (d1, d2) = spec.out, spec.inp
    one, two, three = blocks.programs(spec, rows)
    each = blocks.rows * blocks.d1 * blocks.k2 * (ceil(d2 / blocks.d2) * blocks.d2 + blocks.k1)
    return {
        "calls": 1,
        "macs": spec.rank * one * two * three * each,
        "weights": spec.params,
        "moved": rows * (d1 * d2 + k1 * k2),
    }


def fused(
    x: Tensor, w1: Tensor, w2: Tensor, bias: Tensor | None, spec: FactorSpec
) -> Tensor | None:
    """Apply ``sum_r w1[r] X w2[r] + B`` to the last axis of ``x`` in one kernel; what lies between
    the two products stays in registers, rounded to the inputs' type.

    Shape:
        x: (..., d1*d2); w1: (R, k1, d1); w2: (R, d2, k2); bias: (k1*k2); result: (..., k1*k2).

    Returns:
        None where a call has to go another way: see ``takes`` and ``fits``; or where the kernel
        cannot be had on this machine, of which a warning tells once.
    """
    given = (x, w1, w2) if bias is None else (x, w1, w2, bias)
    alike = all(one.dtype == x.dtype and one.device == x.device for one in given)
    key = (spec, x.dtype, x.device)
    if not (alike and takes(x) and fits(spec)) or key in _FAILED or not x.numel():
        return None
    try:
        return run(x, w1, w2, bias, spec)
    except Exception as problem:  # the compiler's errors have no class in common
        _FAILED.add(key)
        warnings.warn(
            f"the fused kernel for {spec} does not run here, so the layer runs on its factors: "
            f"{type(problem).__name__}: {str(problem).partition(chr(10))[0]}",
            stacklevel=2,
        )
        return None


def run(x: Tensor, w1: Tensor, w2: Tensor, bias: Tensor | None, spec: FactorSpec) -> Tensor:
    """Do as ``fused``, on whatever device the kernel is compiled or interpreted for.

    Raises:
        ImportError: there is no Triton.
    """
    from bp_convert.ways.fused_kernel import launch  # Triton is only on some machines

    (k1, k2), (d1, d2) = spec.out, spec.inp
    flat = x.reshape(-1, d1 * d2).contiguous()
    rows, blocks = len(flat), Blocks.of(spec)
    y = x.new_empty(*x.shape[:-1], k1 * k2)
    held = w2 if bias is None else bias  # an address that is never read, where there is none
    with torch.cuda.device(x.device) if x.is_cuda else nullcontext():
        launch(
            blocks.programs(spec, rows),
            *(flat, w1.contiguous(), w2.contiguous(), held.contiguous(), y, rows),
            K1=k1,
            K2=k2,
            D1=d1,
            D2=d2,
            RANK=spec.rank,
            BIASED=bias is not None,
            PRECISION="tf32" if x.dtype == torch.float32 and x.is_cuda else "ieee",
            ROWS=blocks.rows,
            K1_BLOCK=blocks.k1,
            K2_BLOCK=blocks.k2,
            D1_ALL=blocks.d1,
            D2_BLOCK=blocks.d2,
            num_warps=blocks.warps,
        )
    return y


def _power(size: int) -> int:
    """Return the next power of two that makes a block."""
    return max(SMALLEST, 1 << (size - 1).bit_length())
