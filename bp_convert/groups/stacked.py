"""Layers of one input width that share ``w2``: their weights, laid upon each other, are one matrix
of more outputs, and a Kronecker sum of that has a larger ``k1`` of which each takes a slice."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import torch
from torch import Tensor

from bp_convert.graph.walk import Site
from bp_convert.kinds.linear_kind import LinearKind
from bp_convert.kron.metric import Full
from bp_convert.values.factors import FactorSpec

FEW = 3  # layers up to which any of those that read one tensor may form a group, and
NARROW = 1024  # inputs up to which those do, and layers of several blocks
LEAST = 1e-9  # of the mean diagonal: directions that repeat each other do not run away


@dataclass(frozen=True)
class Stacked:
    """Layers that may share ``w2``.

    Attributes:
        sites: the layers; the first leads the others.
        outputs: how many outputs each has.
        inputs: how many inputs all have.
    """

    sites: tuple[Site, ...]
    outputs: tuple[int, ...]
    inputs: int

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(one.name for one in self.sites)

    @property
    def shape(self) -> tuple[int, int]:
        """(K, D) of all weights upon each other."""
        return sum(self.outputs), self.inputs

    @property
    def most(self) -> int:
        """The most terms that every one of them can hold."""
        return min(*self.outputs, self.inputs)

    @property
    def spec(self) -> FactorSpec:
        """One term of low rank of them all."""
        return FactorSpec(out=(self.shape[0], 1), inp=(1, self.inputs))

    def own(self, site: Site, spec: FactorSpec) -> FactorSpec:
        """Return a member's factors, given those of them all."""
        outputs = self.outputs[self.sites.index(site)]
        return spec.model_copy(update={"out": (outputs // spec.out[1], spec.out[1])})

    def shares(self, site: Site) -> dict[str, str]:
        """Return which factors of a member are another's, and whose."""
        return {} if site is self.sites[0] else {"w2": self.sites[0].name}


def stack_of(sites: Sequence[Site]) -> Stacked:
    """Return layers of one input width as a stack."""
    widths = [one.kind.widths(one.module) for one in sites]
    return Stacked(tuple(sites), tuple(one[1] for one in widths), widths[0][0])


def stacks_of(
    together: Sequence[Sequence[Site]], sites: Sequence[Site], *, across: bool
) -> list[Stacked]:
    """Return the groups of layers that may be worth sharing: those that read one tensor, and those
    that have one place in blocks that follow each other.

    Args:
        together: layers that read one tensor, in one metric.
        sites: all layers that may take part.
        across: blocks may share with each other.
    """
    found: dict[tuple[str, ...], Stacked] = {}
    ones = [_alike(group) for group in together]
    wholes = [group for group in ones if len(group) > 1]
    for group in wholes:
        few = len(group) <= FEW and group[0].kind.widths(group[0].module)[0] <= NARROW
        for many in range(2, len(group) + 1) if few else (len(group),):
            for part in combinations(group, many):
                found[tuple(one.name for one in part)] = stack_of(part)
    narrow = [one for one in sites if one.kind.widths(one.module)[0] <= NARROW]
    pairs = _neighbours([[site] for site in narrow]) + _neighbours(wholes) if across else []
    for one, two in pairs:
        pair = [*one, *two]
        if len({site.kind.widths(site.module)[0] for site in pair}) == 1:
            found.setdefault(tuple(site.name for site in pair), stack_of(pair))
    return list(found.values())


def _alike(group: Sequence[Site]) -> list[Site]:
    """Return those of some layers that are of the first one's kind and input width."""
    first = group[0]
    inputs = first.kind.widths(first.module)[0]
    return [
        one
        for one in group
        if isinstance(one.kind, LinearKind)
        and one.kind.name == first.kind.name
        and one.kind.widths(one.module)[0] == inputs
    ]


def _neighbours(groups: Sequence[Sequence[Site]]) -> list[tuple[Sequence[Site], Sequence[Site]]]:
    """Return pairs of groups whose names differ by one in one number alone, and whose layers have
    the same widths."""
    places: dict[tuple[str, ...], dict[int, Sequence[Site]]] = defaultdict(dict)
    for group in groups:
        name = group[0].name
        for found in re.finditer(r"(?:(?<=\.)|^)\d+(?=\.|$)", name):
            key = (name[: found.start()], name[found.end() :])
            places[key][int(found.group())] = group
    pairs = []
    for held in places.values():
        for number, group in held.items():
            other = held.get(number + 1)
            if other is not None and _sizes(group) == _sizes(other):
                pairs.append((group, other))
    return pairs


def _sizes(group: Sequence[Site]) -> list[tuple[str, tuple[int, int]]]:
    return [(one.kind.name, one.kind.widths(one.module)) for one in group]


def shared_rows(
    weights: Sequence[Tensor], metrics: Sequence[Full], counts: Sequence[float]
) -> Tensor:
    """Return directions (D, D) of the inputs, the most telling first, of which weights (K_i, D)
    may share some: each weight counts by its part of its own energy, times ``counts``. Exact where
    all have one metric, else in their mean."""
    size = weights[0].shape[1]
    form = metrics[0]
    if any(one is not form for one in metrics):
        mean = torch.zeros(size, size, dtype=torch.float64)
        for metric in metrics:
            mean += metric.matrix.double() / (len(metrics) * float(metric.matrix.trace()))
        form = Full(mean, ridge=LEAST)
    root = form.lower.double()
    gram = torch.zeros(size, size, dtype=torch.float64)
    for weight, metric, count in zip(weights, metrics, counts, strict=True):
        energy = max(metric.energy(weight) / metric.level, 1e-300)
        near = weight.double() @ root
        gram += near.t() @ near * (count / energy)
    basis = torch.linalg.eigh(gram)[1].flip(1)
    found: Tensor = torch.linalg.solve_triangular(root.t(), basis, upper=True)
    return found  # columns: B^T, of the largest value first


def errors_on(weight: Tensor, metric: Full, directions: Tensor, most: int) -> np.ndarray:
    """Return the squared relative error of a weight with its best coefficients for the first R =
    0, 1, ... of some directions."""
    lower = metric.lower.double()
    basis = torch.linalg.qr(lower.t() @ directions[:, :most])[0]  # (D, R)
    near = weight.double() @ lower
    total = float(near.square().sum())
    caught = (near @ basis).square().sum(0).cumsum(0) / max(total, 1e-300)
    errors = np.concatenate([[1.0], (1 - caught).clamp(min=0).numpy()])
    found: np.ndarray = np.minimum.accumulate(errors)
    return found


def coefficients(weight: Tensor, metric: Full, rows: Tensor) -> Tensor:
    """Return A (K, R) of least error in a metric for the rows B (R, D)."""
    rows = rows.double()
    both = rows @ metric.matrix.double()  # (R, D)
    normal = both @ rows.t()
    normal.diagonal().add_(LEAST * float(normal.diagonal().mean()))
    right = weight.double() @ both.t()  # (K, R)
    found: Tensor = torch.linalg.solve(normal, right.t()).t()
    return found
