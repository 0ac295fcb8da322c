"""Layers that share factors, fitted together: one table for who looks it up and who multiplies by
it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from bp_convert.calibration.gatherer import Moments, Order, gather
from bp_convert.calibration.moments import Moment
from bp_convert.calibration.tap import Batches
from bp_convert.graph.walk import Site
from bp_convert.groups.members import BOTH, Tied, tied_groups
from bp_convert.groups.table_metric import TableMetric, fit_table, table_metric, table_of
from bp_convert.kinds import Spread, has_bias
from bp_convert.kron.als import low_rank
from bp_convert.kron.scale import balanced
from bp_convert.values.plan import Plan

SWEEPS = 12


class TiedTables:
    """Fits what layers hold as one table.

    Later layers hang on what is looked up, so that the table is settled where it is first read,
    from what its heads get in the source; a head's bias then takes up what came of that.

    Args:
        source: the model that was converted.
        wanted: the layers that are fitted.
    """

    def __init__(
        self,
        source: nn.Module,
        plan: Plan,
        wanted: Sequence[Site],
        order: Order,
        batches: Batches,
    ) -> None:
        shared = {
            one.name
            for one in plan.layers
            if set(one.shares) == set(BOTH) or plan.sharers(one.name)
        }
        groups = tied_groups(source, [one for one in wanted if one.name in shared])
        self.settled: set[str] = set()
        self.groups = {site.name: group for group in groups for site in group.sites}
        every = [site for group in groups for site in group.sites]
        members = [site for site in every if site.name in order.calls]
        self.moments: Moments = gather(source, members, batches, order) if members else {}

    def metric(self, group: Tied) -> TableMetric | None:
        """Return what an error of a group's table costs; None where nothing tells."""
        ones = {site.name: self.moments.get((site.name, "weight")) for site in group.sites}
        return table_metric(group, {name: one[0] for name, one in ones.items() if one})

    @torch.no_grad()
    def fit(self, site: Site, converted: nn.Module, moments: Moments) -> float | None:
        """Fit the table where its first layer is reached, and a head's bias where that is; return
        the relative error of the layer's output. None where its table is not of low rank, or
        nothing tells: it then stays as it was fitted to its weights."""
        group = self.groups[site.name]
        leader: Any = converted.get_submodule(group.leader.name)
        metric = self.metric(group)
        if metric is None or not low_rank(leader.factors):
            return None
        if group.leader.name not in self.settled:
            self.settled.add(group.leader.name)
            self._settle(group, leader, metric)
        twin: Any = converted.get_submodule(site.name)
        site.kind.rest(site.module, twin, Spread())
        weight = site.kind.computed(site.module)["weight"][0]
        fitted = twin.dense_weight().to(weight)
        fitted = fitted.t() if site.kind.lookup else fitted
        found = moments[site.name, "weight"][0]
        if found.centred and has_bias(twin):
            before, after = found.other_mean.float(), found.mean.float()
            site.kind.shift(twin, "weight", 0, weight @ before - fitted @ after)
        return _relative(found, weight, fitted)

    @staticmethod
    def _settle(group: Tied, leader: Any, metric: TableMetric) -> None:
        """Set the factors that all of a group have."""
        left, right, _ = fit_table(table_of(group), metric, leader.factors.rank, sweeps=SWEEPS)
        one, two = left.t()[:, :, None], right[:, None, :]  # (R, V, 1), (R, 1, E)
        if not group.tables:  # a Linear's w1 (R, V, 1), w2 (R, E, 1)
            w1, w2 = balanced(one, two.transpose(1, 2))
            group.leader.kind.place(leader, "weight", 0, w1, w2)
            return
        w1, w2 = balanced(two.transpose(1, 2), one)  # K = E: w1 (R, E, 1), w2 (R, V, 1)
        group.leader.kind.place(leader, "weight", 0, w1, w2)

    def errors(self, found: Mapping[str, float]) -> dict[str, float]:
        """Return the errors of layers that hold a table that is fitted, and were not reached.

        Args:
            found: errors of the layers that were.
        """
        more = {}
        for name, group in self.groups.items():
            known = [found[one.name] for one in group.sites if one.name in found]
            if name not in found and known and group.leader.name in self.settled:
                more[name] = max(known)
        return more


def _relative(moment: Moment, weight: Tensor, fitted: Tensor) -> float:
    lost, size = moment.error(weight, fitted)
    return float((lost / size) ** 0.5) if size else 0.0


def names_of(groups: Mapping[str, Tied], name: str) -> tuple[str, ...]:
    """Return the layers whose parameters a fit of one may have changed."""
    return tuple(one.name for one in groups[name].sites) if name in groups else (name,)
