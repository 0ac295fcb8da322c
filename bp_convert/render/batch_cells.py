"""What tables of jobs say of one, and of several that differ in their seed alone: the same in a
terminal and on a page."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, stdev

from bp_convert.render.numbers import clock, short
from bp_convert.render.words import value_of
from bp_convert.values.outcome import Outcome, Summary

_SEED = re.compile(r"-?\bseed=\d+")


@dataclass(frozen=True)
class Seeds:
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


def over_seeds(jobs: Sequence[Outcome]) -> list[Seeds]:
    """Return scored jobs by all but their seed, in order; nothing where no two belong together."""
    found: dict[tuple[object, ...], list[Outcome]] = {}
    for one in jobs:
        if one.score is None:
            continue
        name = _SEED.sub("", one.name) or one.name
        keys = tuple((key, str(value)) for key, value in one.keys.items() if key != "seed")
        found.setdefault((name, one.model, one.score.metric, *keys), []).append(one)
    groups = [Seeds(str(key[0]), tuple(ones)) for key, ones in found.items()]
    return groups if any(len(one.jobs) > 1 for one in groups) else []


def verdict(summary: Summary) -> str:
    """Say in a sentence how a run went."""
    total = len(summary.jobs)
    done, failed = summary.count("done"), summary.count("failed")
    words = f"{done} of {total} jobs done" if total != 1 else f"{done} of 1 job done"
    if failed:
        first = next(one for one in summary.jobs if one.state == "failed")
        words += f", {failed} failed (such as {first.name}: {_cut(first.problem, 160)})"
    left = total - done - failed
    return f"{words}{f', {left} not run' if left else ''}."


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"


def cells(one: Outcome) -> dict[str, str]:
    """Return the words for one job, by what they say.

    ``full`` is the full model's score, ``converted`` the one before training, ``score`` the one in
    the end, and ``printed`` what a publication prints.
    """
    score, paper = one.score, one.paper
    untrained = one.converted if one.trained else None
    return {
        "name": one.name,
        "state": one.state,
        "params": short(one.params.after) if one.params else "",
        "kept": f"{100 * one.params.ratio:.1f} %" if one.params else "",
        "MACs": short(one.macs.after) if one.macs else "",
        "metric": score.metric if score else "",
        "full": value_of(score, score.before) if score else "",
        "converted": value_of(untrained, untrained.after) if untrained else "",
        "score": value_of(score, score.after) if score else "",
        "printed": "" if paper is None or paper.score is None else f"{paper.score:g}",
        "steps": f"{one.trained.steps:,}" if one.trained else "",
        "time": clock(one.seconds) if one.seconds else "",
        "files": one.problem or ("" if one.folder else "not run"),
    }


def seeds_row(group: Seeds) -> tuple[str, ...]:
    """Return name, seeds, parameters, share kept, mean and spread."""
    score, spread, said = group.jobs[0].score, group.spread, cells(group.jobs[0])
    return (
        group.name,
        str(len(group.jobs)),
        said["params"],
        said["kept"],
        value_of(score, group.mean) if score else "",
        value_of(score, spread) if score and spread is not None else "",
    )
