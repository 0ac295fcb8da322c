"""Whether layers do better with a factor in common: their options as a group, and where a group
takes the place of its layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from bp_convert.calibration.gatherer import Moments
from bp_convert.groups.stacked import Stacked, errors_on, shared_rows, stack_of, stacks_of
from bp_convert.kron.als import low_rank
from bp_convert.kron.metric import Full, Metric
from bp_convert.search.allocate import loss
from bp_convert.search.curves import Curve
from bp_convert.search.group_units import group_unit
from bp_convert.search.selection import Allocation
from bp_convert.search.units import COSTS, Unit

LEAST_TIME = 1.05  # times what its layers take, or took dense, that a group's calls may take
TINY = 1e-9
GAIN = 1e-6  # of the loss, below which nothing is exchanged
Names = tuple[str, ...]


def stacks_among(units: Sequence[Unit], moments: Moments, *, across: bool) -> list[Stacked]:
    """Return the groups of layers that may be worth sharing, given what they see.

    Args:
        across: blocks may share with each other.
    """
    free = [one for one in units if one.alone and not one.many and _seen(one, moments)]
    sites = [one.layer.site for one in free]
    together: dict[int, list[Unit]] = {}
    for one in free:
        together.setdefault(id(moments[one.name, one.role]), []).append(one)
    groups = [[one.layer.site for one in group] for group in together.values()]
    return stacks_of(groups, sites, across=across)


def stack_of_names(units: Sequence[Unit], names: Names) -> Stacked:
    """Return a group of layers by their names."""
    known = {one.name: one.layer.site for one in units}
    return stack_of([known[name] for name in names])


def _seen(unit: Unit, moments: Moments) -> bool:
    found = moments.get((unit.name, unit.role))
    return found is not None and len(found) == 1 and found[0].count > 0 and found[0].full


def stack_curve(
    stack: Stacked,
    units: Mapping[str, Unit],
    metrics: Mapping[str, Metric],
    alone: dict[str, np.ndarray],
) -> Curve | None:
    """Return the squared error of layers that share a factor: with R terms that whose loss, at the
    sum of their sensitivities, is the sum of their own; None where metrics are not whole.

    A layer's own is what it has with as many terms of its own, times what sharing costs it in the
    metric of its inputs.

    Args:
        alone: errors of layers on terms of their own, in that metric; they are added here.
    """
    weights = [one.kind.computed(one.module)["weight"][0] for one in stack.sites]
    forms = [metrics[name] for name in stack.names]
    full = [one for one in forms if isinstance(one, Full)]
    if len(full) < len(forms):
        return None
    counts = [units[name].sensitivity for name in stack.names]
    directions = shared_rows(weights, full, counts)
    total = np.zeros(stack.most + 1)
    for name, weight, metric, count in zip(stack.names, weights, full, counts, strict=True):
        own = next((one.errors for one in units[name].curves if low_rank(one.spec)), None)
        if own is None or len(own) <= stack.most:
            return None
        if name not in alone:
            rows = shared_rows([weight], [metric], [1.0])
            alone[name] = errors_on(weight, metric, rows, min(weight.shape))
        mine = alone[name][: stack.most + 1]
        shared = errors_on(weight, metric, directions, stack.most)
        more = np.maximum(shared, TINY) / np.maximum(mine, TINY)  # by sharing, at equal terms
        total += count * loss(np.minimum(own[: stack.most + 1] * more, 1.0))
    errors = 1 - np.exp(-total / sum(counts))
    errors[0] = 1.0
    return Curve(stack.spec, np.minimum.accumulate(errors).astype(np.float32))


def stack_unit(stack: Stacked, units: Mapping[str, Unit], curve: Curve) -> Unit:
    """List the options of layers that share a factor."""
    layers = [units[name].layer for name in stack.names]
    total = sum(units[name].sensitivity for name in stack.names)
    return group_unit(layers, [curve], total, shape=stack.shape, own=stack.own, shares=stack.shares)


def exchanged(
    units: Sequence[Unit], groups: Sequence[tuple[Stacked, Unit]], found: Allocation
) -> list[Unit] | None:
    """Return units with groups in the place of their layers, where at the parameters that the
    layers now have a group would lose less; None where there is none.

    Args:
        found: the choice for the units.
    """
    alone = {one.name: one for one in units if one.alone and not one.many}
    gains = []
    for stack, group in groups:
        if all(name in alone for name in stack.names):
            members = [alone[name] for name in stack.names]
            gain = _gain(group, members, found)
            if gain > GAIN:
                gains.append((gain, stack.names, group))
    taken: dict[str, Unit] = {}
    for _, names, group in sorted(gains, key=lambda one: (-one[0], one[1])):
        if not any(name in taken for name in names):
            taken.update(dict.fromkeys(names, group))
    if not taken:
        return None
    made: list[Unit] = []
    for unit in units:
        instead = taken.get(unit.name) if unit.name in alone else None
        if instead is None:
            made.append(unit)
        elif instead.name == unit.name:
            made.append(instead)
    return made


def _gain(group: Unit, members: Sequence[Unit], found: Allocation) -> float:
    """Return by how much less a group loses than its layers as they were chosen, at no more
    parameters, and in about their time."""
    lost = 0.0
    costs, before = np.zeros(len(COSTS)), np.zeros(len(COSTS))
    for one in members:
        spec = found.factors.get(one.name, {}).get(one.role)
        lost += one.sensitivity * float(loss(found.errors.get(one.name, 0.0) ** 2))
        costs += one.dense if spec is None else one.costs_of(spec)
        before += one.dense
    room = np.maximum(costs, LEAST_TIME * np.maximum(costs, before))
    room[0] = costs[0] * (1 + 1e-9)
    room[1] = costs[1] if found.macs_limited else np.inf
    room[-1] = costs[-1] * (1 + 1e-9)
    fits = (group.costs <= room).all(1)
    if not fits.any():
        return 0.0
    least = float(loss(group.errors[fits]).min()) * group.sensitivity
    return lost - least
