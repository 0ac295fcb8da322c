"""A start between the trained weights and noise: factors are drawn, all else is trained.

One term keeps next to nothing of a trained matrix. Its output is then close to a constant, from
which training has to find its way back. Factors that are drawn at the size of the weight pass on
what they get, while biases, norms and the layers that stay are the trained ones.
``benchmarks/alpha_start.py`` measures both.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

import torch
from torch import Tensor

from bp_convert.graph.walk import Site
from bp_convert.kinds import Factors, Spread
from bp_convert.layers.common import init_factors_
from bp_convert.values.factors import FactorSpec
from bp_convert.values.literals import Init, Start

DRAWN = "drawn at the size of its weight"


def started(init: Init, alpha: float, factors: Factors) -> Start:
    """Return where a layer's factors start from: where nothing else is asked for, they are drawn if
    its model is widened and a weight of it becomes one Kronecker term."""
    if init != "auto":
        return init
    lossy = any(spec.rank == 1 < spec.full_rank for spec in factors.values())
    return "mixed" if alpha > 1 and lossy else "warm"


@torch.no_grad()
def draw_at_size(site: Site, twin: Any, spread: Spread) -> None:
    """Draw the factors of a twin, so that their sum has the norm of the widened weight, and set
    the rest of it from the trained layer."""
    kind, held = site.kind, twin.factors
    specs: dict[str, FactorSpec] = dict(held) if isinstance(held, Mapping) else {"weight": held}
    # A single weight is not built at its widened size, which may be many times its own.
    wide = spread if kind.several else Spread()
    for role, matrices in kind.matrices(site.module, wide, specs).items():
        for index, weight in enumerate(matrices):
            kind.place(twin, role, index, *_drawn(weight, specs[role]))
    kind.rest(site.module, twin, spread)


def _drawn(weight: Tensor, spec: FactorSpec) -> tuple[Tensor, Tensor]:
    """Return factors (R, k1, d1) and (R, d2, k2) of the norm that a weight (K, D) has once its
    outputs are repeated, and its inputs repeated and shared among the repeats."""
    (k1, k2), (d1, d2) = spec.out, spec.inp
    outputs, inputs = weight.shape
    times = (k1 * k2 / outputs) * (inputs / (d1 * d2))  # by which the squared norm grows
    square = float(weight.double().square().sum()) * times
    w1, w2 = weight.new_empty(spec.rank, k1, d1), weight.new_empty(spec.rank, d2, k2)
    init_factors_(w1, w2, spec.rank, square / prod((k1, k2, d1, d2)))
    return w1, w2
