"""Will a converted layer be faster? A small cost model, fitted to measurements.

The time of a layer is taken as a sum of a few counted quantities, each with a measured price. The
prices stand in ``speed.json`` beside this file, which ``python benchmarks/cost_model.py`` wrote and
which names the machine. Prices are of a CPU; on another machine run that command again.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from math import ceil, prod
from typing import Any

from torch import nn

from bp_convert.kinds.base import Factors, Widths
from bp_convert.kinds.lstm import matrices
from bp_convert.kron.contract import bilinear_macs, w2_first
from bp_convert.kron.conv_layout import first_factor, layout_of, out_sizes
from bp_convert.layers.lstm_checks import GATES, groups
from bp_convert.layers.lstm_cost import prefers_factored
from bp_convert.values.factors import FactorSpec

Counts = dict[str, float]
LANES = 16
THIN = 32  # convolutions with fewer outputs run at another speed
BUILT = 1.05  # an LSTM on built weights is the dense one, after a look at its parameters


@dataclass(frozen=True)
class Speed:
    """Predicted times of one example, in microseconds."""

    dense: float
    converted: float

    @property
    def ratio(self) -> float:
        """Above 1 the converted layer is faster."""
        return self.dense / self.converted


def predict(
    kind: str,
    module: nn.Module,
    widths: Widths,
    factors: Factors,
    shapes: Sequence[tuple[int, ...]],
) -> Speed | None:
    """Predict the time of a layer's calls, dense and converted, at the same widths.

    Returns None where there is nothing to go by: no call was seen, or the kind has no prices.
    """
    prices = _prices()
    if not shapes or f"{kind}.dense" not in prices:
        return None
    times = [0.0, 0.0]
    for shape in shapes:
        both = counts(kind, module, widths, factors, shape)
        if both[0] is both[1]:
            both = (both[0], {name: BUILT * n for name, n in both[1].items()})
        for which, (side, counted) in enumerate(zip(("dense", "twin"), both, strict=True)):
            price = prices[f"{kind}.{'dense' if 'read' in counted else side}"]
            times[which] += sum(price.get(name, 0.0) * n for name, n in counted.items())
    return Speed(max(times[0], 1e-3), max(times[1], 1e-3))


@lru_cache(maxsize=1)
def _prices() -> dict[str, Counts]:
    text = (files("bp_convert.kinds") / "speed.json").read_text(encoding="utf-8")
    prices: dict[str, Counts] = json.loads(text)["prices"]
    return prices


def counts(
    kind: str, module: Any, widths: Widths, factors: Factors, shape: tuple[int, ...]
) -> tuple[Counts, Counts]:
    """Count what a call costs, dense and converted; ``shape`` is the input's."""
    if kind == "Linear":
        return _linear(widths, factors["weight"], prod(shape[:-1]))
    if kind == "Embedding":
        return _embedding(widths, factors["weight"], prod(shape))
    if kind == "LSTM":
        return _lstm(module, widths, factors, shape)
    return _conv(module, widths, factors["weight"], shape)


def _linear(widths: Widths, spec: FactorSpec, rows: int) -> tuple[Counts, Counts]:
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


def _embedding(widths: Widths, spec: FactorSpec, rows: int) -> tuple[Counts, Counts]:
    (e1, e2), rank = spec.out, spec.rank
    dense: Counts = {"calls": 1, "moved": rows * widths[1]}
    twin: Counts = {
        "calls": 1,
        "moved": rows * (rank * (e1 + e2) + 2 * widths[1]),
        "macs": rows * rank * widths[1] if rank > 1 else 0,
    }
    return dense, twin


def _conv(
    module: Any, widths: Widths, spec: FactorSpec, shape: tuple[int, ...]
) -> tuple[Counts, Counts]:
    inputs, outputs = widths
    kernel, stride = tuple(module.kernel_size), tuple(module.stride)
    axes = len(kernel)
    batch = shape[0] if len(shape) == axes + 2 else 1
    before = shape[-axes:]
    after = out_sizes(before, kernel, stride, module.padding, module.dilation)
    positions, places = batch * prod(after), batch * prod(before)
    lay, rank = layout_of(spec, kernel), spec.rank
    (k1, k2), first = spec.out, first_factor(spec, kernel, stride)
    early = batch * prod(
        n if owner == first else m for n, m, owner in zip(after, before, spec.axes, strict=True)
    )
    if prod(kernel) == 1:
        early = positions
    rows2, columns2 = (k2, rank * lay.c2) if first == 1 else (rank * k2, lay.c2)
    at2 = positions * k1 if first == 1 else early * lay.c1
    at1 = early if first == 1 else positions
    one = at1 * k1 * lay.c1 * lay.s1 * rank * (lay.c2 if first == 1 else k2)
    two = at2 * _lanes(rows2) * columns2 * lay.s2
    thin = "thin" if rows2 < THIN else "wide"
    passive = lay.s1 > 1
    between = early * (k1 * rank * lay.c2 if first == 1 else lay.c1 * rank * k2)
    dense: Counts = {
        "calls": 1,
        "macs": positions * _lanes(outputs) * inputs * prod(kernel),
        "weights": inputs * outputs * prod(kernel),
        "moved": places * inputs + positions * outputs,
    }
    twin: Counts = {
        "calls": 1,
        "product": (0 if passive else one) + (two if prod(kernel) == 1 else 0),
        "passive": one if passive else 0,
        thin: two if prod(kernel) > 1 else 0,
        "moved": places * inputs + 2 * between + 2 * positions * outputs,
        "turned": (places * inputs + between) if passive else 0,
        "weights": spec.params,
    }
    return dense, twin


def _lanes(rows: int) -> int:
    return LANES * ceil(rows / LANES)


def _lstm(
    module: Any, widths: Widths, factors: Factors, shape: tuple[int, ...]
) -> tuple[Counts, Counts]:
    hidden = widths[1]
    if len(shape) == 2:
        steps, batch = shape[0], 1
    else:
        steps, batch = (shape[1], shape[0]) if module.batch_first else (shape[0], shape[1])
    sides = module.num_layers * (2 if module.bidirectional else 1)
    sizes = matrices(module, widths)
    times = sides // module.num_layers
    recurrent = sides * GATES * hidden * hidden
    inputs = times * GATES * sum(d * k for role, (d, k) in sizes.items() if role[0] == "i")
    dense: Counts = {
        "calls": 1,
        "steps": sides * steps,
        "read": steps * recurrent,
        "macs": steps * batch * (recurrent + inputs),
        "state": sides * steps * batch * hidden,
    }
    if not prefers_factored(factors, steps, batch):
        return dense, dense  # runs as the dense layer on built weights
    specs = [factors[role] for role in sizes]
    cost = times * sum(groups(spec, hidden) * bilinear_macs(spec) for spec in specs)
    twin: Counts = {
        "loops": sides * steps,
        "products": steps * batch * cost,
        "states": sides * steps * batch * hidden,
    }
    return dense, twin
