"""The kernel of both products and of what lies between them, which it never writes to memory."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]
def two_products(  # type: ignore[no-untyped-def]  # its annotations are the compiler's
    x,
    w1,
    w2,
    bias,
    y,
    rows,
    K1: tl.constexpr,
    K2: tl.constexpr,
    D1: tl.constexpr,
    D2: tl.constexpr,
    RANK: tl.constexpr,
    BIASED: tl.constexpr,
    PRECISION: tl.constexpr,
    ROWS: tl.constexpr,
    K1_BLOCK: tl.constexpr,
    K2_BLOCK: tl.constexpr,
    D1_ALL: tl.constexpr,
    D2_BLOCK: tl.constexpr,
):
    """Compute a block of ``sum_r w1[r] X w2[r] + B``: so many rows, and a part of each axis.

    All are contiguous: x (rows, D1, D2), w1 (RANK, K1, D1), w2 (RANK, D2, K2), bias (K1, K2) and
    y (rows, K1, K2). D1_ALL is D1 and more; blocks are powers of two, of 16 at least but ROWS.
    """
    row = tl.program_id(0) * ROWS
    k1 = tl.program_id(1) * K1_BLOCK + tl.arange(0, K1_BLOCK)
    k2 = tl.program_id(2) * K2_BLOCK + tl.arange(0, K2_BLOCK)
    d1 = tl.arange(0, D1_ALL)
    # Of the first product: a row of the block and its d1, side by side.
    stacked = tl.arange(0, ROWS * D1_ALL)
    n, d = row + stacked // D1_ALL, stacked % D1_ALL
    there = (n < rows) & (d < D1)
    total = tl.zeros((K1_BLOCK, ROWS * K2_BLOCK), tl.float32)
    for r in range(RANK):
        between = tl.zeros((ROWS * D1_ALL, K2_BLOCK), tl.float32)
        for start in range(0, D2, D2_BLOCK):
            d2 = start + tl.arange(0, D2_BLOCK)
            at = (n.to(tl.int64) * D1 + d)[:, None] * D2 + d2[None, :]
            part = tl.load(x + at, mask=there[:, None] & (d2 < D2)[None, :], other=0.0)
            at = (r * D2 + d2)[:, None] * K2 + k2[None, :]
            right = tl.load(w2 + at, mask=(d2 < D2)[:, None] & (k2 < K2)[None, :], other=0.0)
            between = tl.dot(part, right, between, input_precision=PRECISION)
        # (ROWS * D1, K2) -> (D1, ROWS * K2): the permutation between the products.
        turned = tl.permute(tl.reshape(between, (ROWS, D1_ALL, K2_BLOCK)), (1, 0, 2))
        turned = tl.reshape(turned, (D1_ALL, ROWS * K2_BLOCK)).to(x.dtype.element_ty)
        at = (r * K1 + k1)[:, None] * D1 + d1[None, :]
        left = tl.load(w1 + at, mask=(k1 < K1)[:, None] & (d1 < D1)[None, :], other=0.0)
        total = tl.dot(left, turned, total, input_precision=PRECISION)
    beside = tl.arange(0, ROWS * K2_BLOCK)
    n, column = row + beside // K2_BLOCK, tl.program_id(2) * K2_BLOCK + beside % K2_BLOCK
    inside = (k1 < K1)[:, None] & ((n < rows) & (column < K2))[None, :]
    if BIASED:
        place = k1[:, None] * K2 + column[None, :]
        total += tl.load(bias + place, mask=inside, other=0.0).to(tl.float32)
    at = (n.to(tl.int64) * K1)[None, :] * K2 + k1[:, None] * K2 + column[None, :]
    tl.store(y + at, total.to(y.dtype.element_ty), mask=inside)


def launch(grid: tuple[int, int, int], *given: Any, **blocks: Any) -> None:
    """Start the kernel over a grid of blocks."""
    two_products[grid](*given, **blocks)
