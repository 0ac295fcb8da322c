"""What the two ways to run a bilinear recurrent stack cost, and which is taken."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from bp_convert.kron.contract import bilinear_macs
from bp_convert.recurrence.steps import RECURRENCES
from bp_convert.values.factors import FactorSpec

MARGIN = 1.25  # what is kept is given up for so much gain at least

# Microseconds on one core, of the LSTM on a Xeon, of the others on an EPYC, printed by
# ``python benchmarks/recurrent.py MODE --fit``. Those of a mode are compared with each other only.
_LOOP = {
    "LSTM": {"call": 110, "step": 29, "state": 7.4e-3, "mac": 3.7e-5},
    "GRU": {"call": 380, "step": 94, "state": 7.7e-3, "mac": 7.9e-5},
    "RNN": {"call": 360, "step": 64, "state": 6.8e-3, "mac": 7e-5},
}
_FUSED = {
    "LSTM": {"call": 64, "state": 2.2e-3, "mac": 1.3e-5, "weight": 9.3e-4, "read": 6.4e-5},
    "GRU": {
        **{"call": 120, "step": 30, "state": 1.9e-2},
        **{"mac": 3.4e-5, "weight": 1e-3, "read": 1.1e-4},
    },
    "RNN": {
        **{"call": 110, "step": 5.9, "state": 8.4e-3},
        **{"mac": 3.4e-5, "weight": 8.3e-4, "read": 8.9e-5},
    },
}


@dataclass(frozen=True)
class Level:
    """The factors of one layer: of its input, of its state and, where it has one, of its
    projection."""

    mode: str
    ih: FactorSpec
    hh: FactorSpec
    hr: FactorSpec | None = None

    @property
    def gates(self) -> int:
        return RECURRENCES[self.mode].gates

    @property
    def hidden(self) -> int:
        return _width((self.hr or self.hh).inp)

    def sizes(self) -> list[tuple[FactorSpec, int, int]]:
        """Return each role's spec, the sets of factors that it speaks of, and the numbers of the
        weight that it stands for."""
        rows = self.gates * self.hidden
        found = [
            (one, rows // _width(one.out), rows * _width(one.inp)) for one in (self.ih, self.hh)
        ]
        if self.hr is not None:
            found.append((self.hr, 1, _width(self.hr.out) * self.hidden))
        return found


def loop_counts(one: Level, steps: int, batch: int) -> dict[str, int]:
    """Count what stepping on the factors of one layer and direction takes."""
    return {
        "call": 1,
        "step": steps,
        "state": steps * batch * one.hidden,
        "mac": factored_macs(one, steps, batch),
    }


def fused_counts(one: Level, steps: int, batch: int) -> dict[str, int]:
    """Count what torch's own run takes on weights that are built already."""
    weights = sum(size for _, _, size in one.sizes())
    return {
        "call": 1,
        "step": steps,
        "state": steps * batch * one.hidden,
        "mac": steps * batch * weights,
        "weight": weights,
        # the recurrent weights, once a step
        "read": steps * one.gates * one.hidden * _width(one.hh.inp),
    }


def prefers_factored(
    factors: Mapping[str, FactorSpec], steps: int, batch: int, mode: str = "LSTM"
) -> bool:
    """Return whether stepping on the factors beats torch's own run on weights built from them.

    The dense recurrence reads its weights at each step; the loop pays a dozen small operations
    instead. So the loop wins with large hidden sizes and few terms, the fused run with small
    ones and many terms. A pure function of sizes: the same in training, where both sides cost
    some three times as much, on every CPU and on the meta device.

    Args:
        factors: by role, ``ih_l0``, ``hh_l0``, ``ih_l1``, ...
    """
    if not batch:
        return True
    family = mode.partition("_")[0]
    loop = fused = 0.0
    for one in levels(factors, mode):
        loop += _time(_LOOP[family], loop_counts(one, steps, batch))
        fused += _time(_FUSED[family], fused_counts(one, steps, batch))
    return loop < fused


def gains(factors: Mapping[str, FactorSpec], mode: str = "LSTM") -> tuple[float, float, float]:
    """Return what stepping on the factors saves of torch's own run on weights that are kept: of a
    call, of each step, and of each row of a step; in microseconds, with a margin.

    Args:
        factors: by role, as for ``prefers_factored``.
    """
    family = mode.partition("_")[0]

    def saved(steps: int, batch: int) -> float:
        found = 0.0
        for one in levels(factors, mode):
            kept = {**fused_counts(one, steps, batch), "weight": 0}
            found += _time(_FUSED[family], kept)
            found -= MARGIN * _time(_LOOP[family], loop_counts(one, steps, batch))
        return found

    call, step, row = saved(0, 0), saved(1, 0), saved(1, 1)
    return call, step - call, row - step


def factored_macs(one: Level, steps: int, batch: int) -> int:
    """Return the multiply-adds of one layer and direction, stepping on the factors."""
    return steps * batch * sum(many * bilinear_macs(spec) for spec, many, _ in one.sizes())


def fused_macs(one: Level, steps: int, batch: int) -> int:
    """Return the multiply-adds of one layer and direction: the weights built, then dense steps."""
    return sum(size * (spec.rank + steps * batch) for spec, _, size in one.sizes())


def recurrent_macs(
    factors: Mapping[str, FactorSpec],
    steps: int,
    batch: int,
    directions: int = 1,
    mode: str = "LSTM",
) -> int:
    """Return the multiply-adds of one call over all layers, on the path that the rule takes.

    Equals half of what torch's FlopCounterMode counts on the meta device; a CPU in eval mode
    without gradients keeps the built weights and pays for them once.
    """
    factored = prefers_factored(factors, steps, batch, mode)
    count = factored_macs if factored else fused_macs
    return directions * sum(count(one, steps, batch) for one in levels(factors, mode))


def levels(factors: Mapping[str, FactorSpec], mode: str) -> Iterator[Level]:
    """Yield what the layers of a stack are made of."""
    for role, ih in factors.items():
        if role.startswith("ih_"):
            layer = role.removeprefix("ih_")
            yield Level(mode, ih, factors[f"hh_{layer}"], factors.get(f"hr_{layer}"))


def _time(prices: Mapping[str, float], counts: Mapping[str, int]) -> float:
    return sum(prices.get(name, 0.0) * count for name, count in counts.items())


def _width(pair: tuple[int, int]) -> int:
    return pair[0] * pair[1]
