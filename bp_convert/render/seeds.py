"""Jobs that differ in nothing but their seed, as one row: mean and spread."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, stdev

from bp_convert.values.outcome import Outcome

_SEED = re.compile(r"-?\bseed=\d+")


@dataclass(frozen=True)
class Group:
    """Scored jobs of several seeds.

    Attributes:
        name: of the jobs, without the seed.
        jobs: with a score, at least one.
    """

    name: str
    jobs: tuple[Outcome, ...]

    @property
    def scores(self) -> tuple[float, ...]:
        """The score that each ends with."""
        return tuple(one.score.after for one in self.jobs if one.score)

    @property
    def mean(self) -> float:
        """Of the scores."""
        return mean(self.scores)

    @property
    def spread(self) -> float | None:
        """Standard deviation of the scores, with n - 1; None for one alone."""
        return stdev(self.scores) if len(self.scores) > 1 else None


def over_seeds(jobs: Sequence[Outcome]) -> list[Group]:
    """Return scored jobs by all but their seed, in order; nothing where no two belong together."""
    found: dict[tuple[object, ...], list[Outcome]] = {}
    for one in jobs:
        if one.score is None:
            continue
        name = _SEED.sub("", one.name) or one.name
        keys = tuple((key, str(value)) for key, value in one.keys.items() if key != "seed")
        found.setdefault((name, one.model, one.score.metric, *keys), []).append(one)
    groups = [Group(str(key[0]), tuple(ones)) for key, ones in found.items()]
    return groups if any(len(one.jobs) > 1 for one in groups) else []
