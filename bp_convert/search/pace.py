"""A choice's error traded for its time: by how much the model may err more to run faster.

The whole model's predicted time, at batches of 1 and of 32, is held to a share of what it was; the
smallest share is taken whose loss is at most some times that of the choice without it. The loss
bounds the squared error, so that a preference for speed costs at most ``SPEED ** 0.5`` times the
estimated error. Where times are equal, as of weights that are built once, multiply-adds are held
so: training, compiled programs and other machines ask for them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bp_convert.search.allocate import ERROR, OutOfReachError, allocate, quantity
from bp_convert.search.units import COSTS, Unit
from bp_convert.values.literals import Prefer

TIMES = ("time", "time32")
MACS = "macs"
SLACKS = (1.0, 1.05, 1.1, 1.2, 1.35, 1.5, 2.0)  # of the time before, tried in turn
FASTER = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.25, 0.2, 0.15, 0.1)
HALVINGS = 6
SPENT = 0.993  # share of a target that a choice is to take up
# Times the loss: what it may cost to stay as fast as before, and to be faster than that.
AS_FAST: Mapping[Prefer, float] = {"quality": 1.0, "balanced": 1.1, "speed": 2.25}
NEARLY: Mapping[Prefer, float] = {"quality": 1.0, "balanced": 1.02, "speed": 2.25}


@dataclass
class Choice:
    """An option of each unit."""

    units: Sequence[Unit]
    at: list[int]

    def sum(self, name: str) -> float:
        """Return what it takes of a quantity."""
        return sum(
            float(quantity(unit, name)[at]) for unit, at in zip(self.units, self.at, strict=True)
        )

    def spent(self, limits: Mapping[str, float]) -> float:
        """Return the largest share of a limit that it takes up."""
        return max(self.sum(name) / limit for name, limit in limits.items())


def paced(
    choice: Choice, limits: dict[str, float], prefer: Prefer
) -> tuple[Choice, dict[str, float], bool]:
    """Return a choice that is as fast as the preference allows, the limits that hold it, and
    whether it is slower than before.

    It is no slower than before or, where the targets would then not be spent or the error would
    grow beyond what the preference allows, as little slower as that allows.
    """
    dense = {
        name: sum(float(one.dense[COSTS.index(name)]) for one in choice.units) for name in TIMES
    }
    times = {name: time for name, time in dense.items() if time > 0}
    if not times or ERROR in limits:
        return choice, limits, bool(times) and choice.spent(times) > 1
    search = _Holding(choice, limits, {**times, MACS: choice.sum(MACS)}, prefer)
    for slack in SLACKS:
        found = search.within(dict.fromkeys(times, slack), AS_FAST[prefer])
        if found is not None:
            if slack == 1:
                found = search.faster(found, tuple(times))
            return *found, slack > 1
    return choice, limits, choice.spent(times) > 1


@dataclass
class _Holding:
    """Looks for the shares of the time before that a choice can be held to.

    Attributes:
        best: the choice that is not.
        limits: that hold in any case.
        whole: the times before, and the multiply-adds of the choice.
    """

    best: Choice
    limits: dict[str, float]
    whole: Mapping[str, float]
    prefer: Prefer

    def within(
        self, slacks: Mapping[str, float], worth: float
    ) -> tuple[Choice, dict[str, float]] | None:
        """Return a choice within shares of the whole, and all its limits; None where the loss or
        what is left over of the targets is too much."""
        held = {**self.limits, **{name: slack * self.whole[name] for name, slack in slacks.items()}}
        try:
            found = Choice(self.best.units, allocate(self.best.units, held, exact=False))
        except OutOfReachError:
            return None
        left = self.prefer != "speed" and (
            found.spent(self.limits) < min(SPENT, self.best.spent(self.limits))
        )
        return None if left or found.sum(ERROR) > worth * self.best.sum(ERROR) else (found, held)

    def faster(
        self, found: tuple[Choice, dict[str, float]], times: tuple[str, ...]
    ) -> tuple[Choice, dict[str, float]]:
        """Return the fastest choice of nearly equal loss, at both batches alike, then at each; and
        of those the one of fewest multiply-adds."""
        slacks = dict.fromkeys(times, 1.0)
        alone = [(name,) for name in times] if self.prefer == "speed" else []
        for names in (times, *alone):
            low, high = -1, len(FASTER)  # the first is known to do, the other taken not to
            while high - low > 1:
                at = (low + high) // 2
                tried = {**slacks, **dict.fromkeys(names, FASTER[at])}
                now = self.within(tried, NEARLY[self.prefer])
                if now is None:
                    high = at
                else:
                    low, found = at, now
            if low >= 0:
                slacks.update(dict.fromkeys(names, FASTER[low]))
        return found if MACS in self.limits else self._lighter(found, slacks)

    def _lighter(
        self, found: tuple[Choice, dict[str, float]], slacks: Mapping[str, float]
    ) -> tuple[Choice, dict[str, float]]:
        """Return the choice as fast of fewest multiply-adds, of nearly equal loss."""
        so_far = found[0].sum(ERROR) / max(self.best.sum(ERROR), 1e-300)
        # What speed may cost is not for them.
        worth = min(NEARLY[self.prefer], NEARLY["balanced"] * so_far)
        low, high = 0.0, 1.0  # the first is taken not to do, the other known to
        for _ in range(HALVINGS if self.whole[MACS] > 0 else 0):
            share = (low + high) / 2
            now = self.within({**slacks, MACS: share}, worth)
            if now is None:
                low = share
            else:
                high, found = share, now
        return found
