"""Gram matrices: of a matrix, and of a coarser pair from a finer one's."""

from __future__ import annotations

import torch
from torch import Tensor

CHUNK = 1 << 20  # numbers of a matrix that are widened at a time
PARTS = 8  # bands of rows that a Gram matrix is taken in
BAND = 64  # rows of a band at least: thinner products cost more than what they save


def gram(table: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    """Return table @ table^T, without a copy of the whole table in ``dtype``.

    Each band of rows meets those from it on alone, as the result is symmetric.

    Shape:
        table: (m, n); result: (m, m), of ``dtype``.
    """
    rows, width = table.shape
    found = torch.zeros(rows, rows, dtype=dtype, device=table.device)
    band = max(BAND, -(-rows // PARTS))
    columns = max(1, width if table.dtype == dtype else CHUNK // max(1, rows))
    for start in range(0, width, columns):
        wide = table[:, start : start + columns].to(dtype)
        for low in range(0, rows, band):
            found[low:, low : low + band].addmm_(wide[low:], wide[low : low + band].t())
    for low in range(band, rows, band):
        found[:low, low : low + band] = found[low : low + band, :low].t()
    return found


def traced(gram: Tensor, sizes: tuple[int, ...], summed: tuple[int, ...]) -> Tensor:
    """Return the Gram matrix of a matrix some of whose row indices are moved to its columns.

    Rows (i, j) with columns c have the Gram matrix ``sum_c M[ij, c] M[i'j', c]``; rows i with
    columns (j, c) the same with j = j', summed: a partial trace.

    Args:
        gram: (m, m) of the matrix with all the indices in its rows.
        sizes: of the rows' indices; their product is m.
        summed: places of the indices that move.

    Shape:
        result: as many rows, and columns, as the indices that stay have values.
    """
    count = len(sizes)
    found = gram.reshape(*sizes, *sizes)
    for place in sorted(summed, reverse=True):
        found = found.diagonal(dim1=place, dim2=place + count).sum(-1)
        count -= 1
    side = round(found.numel() ** 0.5)
    return found.reshape(side, side)
