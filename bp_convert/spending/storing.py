"""Bits as a part of what a budget is spent on: how each layer may be stored, and all in one way."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from bp_convert.bits.grid import FORMS
from bp_convert.graph.walk import Site
from bp_convert.search.bit_axis import AS_IS, FREE, dense_unit
from bp_convert.search.selection import Budget
from bp_convert.search.units import Unit
from bp_convert.values.literals import Store
from bp_convert.values.settings import Settings

WHOLE = 64  # bits of a number at most
ALIKE: tuple[Store | None, ...] = ("int8", "int4", "int3", None)  # tried for all layers
PACKED = 1000  # bytes of a file, on the safe side, that say how its packed tensors are stored


def stores_of(
    settings: Settings, sites: Sequence[Site], stores: Mapping[str, Store]
) -> dict[str, Sequence[Store | None]]:
    """Return how each layer may be stored; nothing where all are stored as they are.

    Args:
        stores: of layers for which that is settled, by name.
    """
    free = FREE if settings.chooses_bits else AS_IS
    found: dict[str, Sequence[Store | None]] = {}
    for site in sites:
        store = stores.get(site.name)
        found[site.name] = free if store is None else AS_IS if store == "fp32" else (store,)
    return {} if all(one == AS_IS for one in found.values()) else found


def with_bits(
    budget: Budget, kept: Sequence[Site], ways: Mapping[str, Sequence[Store | None]]
) -> tuple[Budget, list[Unit]]:
    """Return a budget without the layers that stay dense, and units for these, of which only how
    they are stored is chosen; of those that hold one weight, for the first."""
    known: set[int] = set()
    units = []
    for site in kept:
        own = {id(one) for one in site.held.parameters()}
        if own & known or ways[site.name] == AS_IS:
            continue
        known |= own
        units.append(dense_unit(site, ways[site.name]))
    fixed = dict(budget.fixed)
    fixed["params"] -= sum(float(unit.dense[0]) for unit in units)
    fixed["size"] += PACKED - sum(float(unit.dense[-1]) for unit in units)
    return replace(budget, fixed=fixed), units


def all_alike(units: Sequence[Unit]) -> dict[str, list[Unit]]:
    """Return units of which all are stored in the same bits, where they may be, by words on it."""
    found = {}
    for store in ALIKE:
        words = "all layers as the model has them" if store is None else f"all layers in {store}"
        found[words] = [
            alike(unit, {unit.name: {store}}, max) if store in unit.whole else unit
            for unit in units
        ]
    return found


def alike(
    unit: Unit, split: Mapping[str, set[Store | None]], pick: Callable[..., Store | None]
) -> Unit:
    """Return a unit with the options alone that are stored as one picked, by its bits, among those
    that were chosen for its layer's roles."""
    if unit.name not in split:
        return unit
    taken = pick(split[unit.name], key=lambda one: WHOLE if one is None else FORMS[one].bits)
    made = unit.only(np.array([unit.store(at) == taken for at in range(len(unit.errors))]))
    places = [place for place, curve in enumerate(unit.curves) if curve.store == taken]
    picked = made.picked.copy()
    for row in picked:
        row[0] = places.index(row[0]) if row[1] else 0
    curves = [unit.curves[place] for place in places]
    return replace(made, picked=picked, curves=curves, whole=(taken,))
