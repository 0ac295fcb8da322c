"""Gram matrices that the pairs of one weight share.

The Gram matrix of a pair's first factor is a partial trace of that of any pair whose first factor
has it as its leading part: (k1, d1) of (k1*b, d1*c). So is that of the second factor, the trailing
part. A search that asks for the largest first then takes few products of whole weights.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from bp_convert.kron.column_order import Columns
from bp_convert.kron.gram import traced
from bp_convert.kron.spectrum import EXACT, gram_of, precision, tails_of
from bp_convert.values.factors import FactorSpec

HELD = 1 << 27  # bytes of Gram matrices that are held


@dataclass(frozen=True)
class _Held:
    rows: int  # k1, or k2
    channels: int  # c1, or c2
    gram: Tensor


@dataclass
class SharedGrams:
    """Spectra of pairs by Gram matrices that stay for the next pair."""

    _held: dict[Hashable, list[_Held]] = field(default_factory=dict)
    _bytes: int = 0

    def squared_errors(
        self,
        source: Hashable,
        table: Callable[[], Tensor],
        dtype: torch.dtype,
        spec: FactorSpec,
        columns: Columns,
    ) -> Tensor:
        """Return what ``spectrum.squared_errors`` does of a table that is made where it is needed.

        Args:
            source: the same for tables (K, D) that differ by the order of their columns alone.
            table: makes the table, columns in the pair's order, whitened.
            dtype: of the table.
            columns: the pair's.
        """
        first = spec.out[0] * spec.inp[0] <= spec.out[1] * spec.inp[1]
        side = 0 if first else 1
        rows, channels, places = spec.out[side], columns.channels[side], columns.places[side]
        wanted = precision(rows * channels * places, dtype)
        key = (source, spec.axes, first)
        for one in self._held.get(key, ()):
            fits = one.rows % rows == 0 and one.channels % channels == 0
            if fits and one.gram.dtype in (wanted, torch.float64):
                return tails_of(_part(one, rows, channels, places, first=first).to(wanted))
        grown = _grown(spec, side)
        out = (grown, spec.out[0] * spec.out[1] // grown)
        found = gram_of(table(), out if first else out[::-1], spec.inp, first=first)
        made = _Held(grown, channels, found)
        self._hold(key, made)
        return tails_of(_part(made, rows, channels, places, first=first))

    def _hold(self, key: Hashable, made: _Held) -> None:
        size = made.gram.numel() * made.gram.element_size()
        if self._bytes + size > HELD:
            self._held.clear()
            self._bytes = 0
        if size <= HELD:
            self._held.setdefault(key, []).append(made)
            self._bytes += size


def _grown(spec: FactorSpec, side: int) -> int:
    """Return the largest multiple of a pair's k1, or k2, that divides the outputs and whose Gram
    matrix is taken in float64 still; above that, the number itself."""
    own, other, width = spec.out[side], spec.out[1 - side], spec.inp[side]
    best = own
    for times in range(2, min(other, EXACT // (own * width)) + 1):
        if other % times == 0:
            best = own * times
    return best


def _part(one: _Held, rows: int, channels: int, places: int, *, first: bool) -> Tensor:
    """Return the Gram matrix of a leading part of the rows, or of a trailing one."""
    more, wide = one.rows // rows, one.channels // channels
    if more == wide == 1:
        return one.gram
    if first:
        return traced(one.gram, (rows, more, channels, wide, places), (1, 3))
    return traced(one.gram, (more, rows, wide, channels, places), (0, 2))
