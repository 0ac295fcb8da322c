"""What the two ways to run a bilinear LSTM cost, and which is taken."""

from __future__ import annotations

from collections.abc import Mapping

from bp_convert.kron.contract import bilinear_macs
from bp_convert.layers.lstm_checks import GATES, groups
from bp_convert.values.factors import FactorSpec

# Microseconds on one core of a Xeon, printed by ``python benchmarks/lstm.py --fit``.
LOOP = {"call": 110, "step": 29, "state": 7.4e-3, "mac": 3.7e-5}
FUSED = {"call": 64, "step": 0, "state": 2.2e-3, "mac": 1.3e-5, "weight": 9.3e-4, "read": 6.4e-5}


def loop_counts(ih: FactorSpec, hh: FactorSpec, steps: int, batch: int) -> dict[str, int]:
    """Count what stepping on the factors of one layer and direction takes."""
    return {
        "call": 1,
        "step": steps,
        "state": steps * batch * _width(hh.inp),
        "mac": factored_macs(ih, hh, steps, batch),
    }


def fused_counts(ih: FactorSpec, hh: FactorSpec, steps: int, batch: int) -> dict[str, int]:
    """Count what torch's fused LSTM takes on weights that are built already."""
    hidden = _width(hh.inp)
    weights = GATES * hidden * (_width(ih.inp) + hidden)
    return {
        "call": 1,
        "step": steps,
        "state": steps * batch * hidden,
        "mac": steps * batch * weights,
        "weight": weights,
        "read": steps * GATES * hidden * hidden,  # the recurrent weights, once a step
    }


def prefers_factored(factors: Mapping[str, FactorSpec], steps: int, batch: int) -> bool:
    """Return whether stepping on the factors beats torch's fused LSTM on weights built from them.

    The dense recurrence reads 4 H^2 weights at each step; the loop pays a dozen small operations
    instead. So the loop wins with large hidden sizes and few terms, the fused LSTM with small
    ones and many terms. A pure function of sizes: the same in training, where both sides cost
    some three times as much, on every CPU and on the meta device.

    Args:
        factors: by role, ``ih_l0``, ``hh_l0``, ``ih_l1``, ...
    """
    if not batch:
        return True
    loop = fused = 0.0
    for ih, hh in _layers(factors):
        sizes = (ih, hh, steps, batch)
        loop += sum(LOOP[name] * count for name, count in loop_counts(*sizes).items())
        fused += sum(FUSED[name] * count for name, count in fused_counts(*sizes).items())
    return loop < fused


def factored_macs(ih: FactorSpec, hh: FactorSpec, steps: int, batch: int) -> int:
    """Return the multiply-adds of one layer and direction, stepping on the factors."""
    hidden = _width(hh.inp)
    return steps * batch * sum(groups(one, hidden) * bilinear_macs(one) for one in (ih, hh))


def fused_macs(ih: FactorSpec, hh: FactorSpec, steps: int, batch: int) -> int:
    """Return the multiply-adds of one layer and direction: the weights built, then dense steps."""
    hidden = _width(hh.inp)
    sizes = {spec: GATES * hidden * _width(spec.inp) for spec in (ih, hh)}
    return sum(sizes[spec] * (spec.rank + steps * batch) for spec in (ih, hh))


def lstm_macs(
    factors: Mapping[str, FactorSpec], steps: int, batch: int, directions: int = 1
) -> int:
    """Return the multiply-adds of one call over all layers, on the path that the rule takes.

    Equals half of what torch's FlopCounterMode counts on the meta device; a CPU in eval mode
    without gradients keeps the built weights and pays for them once.
    """
    count = factored_macs if prefers_factored(factors, steps, batch) else fused_macs
    return directions * sum(count(ih, hh, steps, batch) for ih, hh in _layers(factors))


def _layers(factors: Mapping[str, FactorSpec]) -> list[tuple[FactorSpec, FactorSpec]]:
    return [
        (ih, factors[role.replace("ih_", "hh_")])
        for role, ih in factors.items()
        if role.startswith("ih_")
    ]


def _width(pair: tuple[int, int]) -> int:
    return pair[0] * pair[1]
