"""nn.Linear."""

from __future__ import annotations

from math import prod
from typing import Any, ClassVar

from bp_convert.kinds.choices import Factors, Widths
from bp_convert.kinds.kind import Kind
from bp_convert.kinds.shapes import Shape
from bp_convert.kinds.speed import Counts
from bp_convert.kron.contract import bilinear_macs, w2_first
from bp_convert.layers.linear import BPLinear
from bp_convert.values.factors import FactorSpec


class LinearKind(Kind):
    name = "Linear"
    twin: ClassVar[Any] = BPLinear
    same_rows = True

    def only_repeats(self, module: Any, factors: Factors) -> bool:
        spec = factors["weight"]
        return spec.rank < spec.full_rank

    def operations(
        self, module: Any, widths: Widths, factors: Factors, shape: Shape
    ) -> tuple[Counts, Counts]:
        return matrix_counts(prod(shape[:-1]), widths, factors["weight"])


def matrix_counts(rows: int, widths: Widths, spec: FactorSpec) -> tuple[Counts, Counts]:
    """Count what the time of a product with one matrix hangs on, dense and bilinear."""
    inputs, outputs = widths
    (k1, k2), (d1, d2), rank = spec.out, spec.inp, spec.rank
    between = d1 * rank * k2 if w2_first(k1, k2, d1, d2) else k1 * rank * d2
    dense: Counts = {
        "calls": 1,
        "macs": rows * inputs * outputs,
        "weights": inputs * outputs,
        "moved": rows * (inputs + outputs),
    }
    twin: Counts = {
        "calls": 1,
        "macs": rows * bilinear_macs(spec),
        "weights": spec.params,
        "copied": _copied(spec),
        "moved": rows * (inputs + 2 * between + 2 * outputs),
        "small": rows if k2 > 1 and d2 > 1 else 0,  # a small product for each row
    }
    return dense, twin


def _copied(spec: FactorSpec) -> int:
    """Count the factor entries that are laid out anew at each call; with one term, or a pair
    that holds a 1 in the right place, a view does."""
    (k1, k2), (d1, d2), rank = spec.out, spec.inp, spec.rank
    if rank == 1:
        return 0
    if w2_first(k1, k2, d1, d2):
        return rank * ((k1 * d1 if d1 > 1 else 0) + (d2 * k2 if k2 > 1 and d2 > 1 else 0))
    return rank * k1 * d1 if d1 > 1 else 0
