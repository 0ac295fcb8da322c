"""Will a converted layer be faster? A small cost model, fitted to measurements.

The time of a layer is taken as a sum of a few counted quantities, each with a measured price
(``bp_convert/prices.py``). What is counted, each kind says of itself (``Kind.operations``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, prod
from typing import TYPE_CHECKING, get_args

from torch import nn

from bp_convert.kinds.choices import Factors, Widths
from bp_convert.prices import Counts as Counts
from bp_convert.prices import current
from bp_convert.values.literals import Ways
from bp_convert.values.plan import Way
from bp_convert.ways.fused import fits, work

if TYPE_CHECKING:
    from bp_convert.kinds.kind import Kind

DENSE = "dense."  # before the name of a quantity that has the dense layer's price in the twin, too
LOOK = 0.6  # microseconds of a look at the parameters that a kept weight was built of
AS_FAST = 0.95  # of the dense layer's pace counts as no slower
BUILT = 1.05  # an LSTM on built weights is the dense one, after a look at its parameters


@dataclass(frozen=True)
class Speed:
    """Predicted times of one example, in microseconds: of the dense layer, of its twin on factors
    and, where it has that way, on the dense weight built of them, and in one kernel."""

    dense: float
    converted: float
    expanded: float = inf
    fused: float = inf

    @property
    def ratio(self) -> float:
        """Above 1 the converted layer is faster."""
        return self.dense / self.converted

    def way(self, ways: Ways = "auto") -> Way:
        """Return the way of the twin that is the faster one, of those that are open."""
        if ways == "auto":
            return min(get_args(Way), key=self.on)
        return "expanded" if ways == "expanded" and self.expanded < inf else "factored"

    def on(self, way: Way) -> float:
        """Return the time of the twin on a way."""
        return {"factored": self.converted, "expanded": self.expanded, "fused": self.fused}[way]


def predict(
    kind: Kind,
    module: nn.Module,
    widths: Widths,
    factors: Factors,
    shapes: Sequence[tuple[int, ...]],
) -> Speed | None:
    """Predict the time of a layer's calls, dense and converted, at the same widths.

    Returns None where there is nothing to go by: no call was seen, or the kind has no prices.
    """
    prices = current()
    priced = kind.priced_as or kind.name
    if not shapes or f"{priced}.dense" not in prices:
        return None
    times = [0.0, 0.0]
    for shape in shapes:
        both = kind.operations(module, widths, factors, shape)
        if both is None:
            return None
        if both[0] is both[1]:
            both = (both[0], {name: BUILT * n for name, n in both[1].items()})
        for which, (side, counted) in enumerate(zip(("dense", "twin"), both, strict=True)):
            price = prices[f"{priced}.{'dense' if 'read' in counted else side}"]
            plain = prices[f"{priced}.dense"]
            times[which] += sum(
                price.get(name, 0.0) * n
                if name == (own := name.removeprefix(DENSE))
                else plain.get(own, 0.0) * n
                for name, n in counted.items()
            )
    look = LOOK * len(shapes) if getattr(kind.twin, "EXPANDS", False) else inf
    fused = inf
    kernel = prices.get(f"{priced}.fused")
    if kernel and getattr(kind.twin, "FUSES", False) and fits(factors["weight"]):
        each = [work(factors["weight"], prod(shape[:-1])) for shape in shapes]
        fused = sum(kernel.get(name, 0.0) * n for one in each for name, n in one.items())
    return Speed(max(times[0], 1e-3), max(times[1], 1e-3), times[0] + look, fused)
