"""Layers that share factors, fitted together.

What is shared is settled once, where the first of the layers is reached: later layers hang on it.
Each layer's own factor, and its bias, then follow the inputs that the layer itself gets.
"""

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
from bp_convert.groups.stacked import Stacked, coefficients, shared_rows, stack_of
from bp_convert.groups.table_metric import TableMetric, fit_table, table_metric, table_of
from bp_convert.kinds import Spread, has_bias
from bp_convert.kron.als import low_rank
from bp_convert.kron.metric import Full, Metric
from bp_convert.kron.scale import balanced
from bp_convert.values.plan import Plan

SWEEPS = 12
Targets = Mapping[str, tuple[Tensor, Metric]]  # by layer what it is to reproduce, in which metric


class Together:
    """Fits the layers of a plan that share factors.

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
        self.plan = plan
        self.settled: set[str] = set()  # leaders whose factors are what they will be
        sites = {one.name: one for one in wanted}
        every = {
            one.name: plan.sharers(one.name)
            for one in plan.converted
            if not one.shares and plan.sharers(one.name)
        }
        members = {
            leader: [leader, *(one.name for one in others)] for leader, others in every.items()
        }
        whole = {
            leader: names for leader, names in members.items() if all(one in sites for one in names)
        }
        tables = [
            leader for leader in whole if all(set(one.shares) == set(BOTH) for one in every[leader])
        ]
        held = [sites[name] for leader in tables for name in whole[leader]]
        self.tied: dict[str, Tied] = {}
        for group in tied_groups(source, held):
            self.tied.update({site.name: group for site in group.sites})
        self.stacks: dict[str, Stacked] = {}
        for leader in whole.keys() - set(tables):
            if all(set(one.shares) == {"w2"} for one in every[leader]):
                stack = stack_of([sites[name] for name in whole[leader]])
                self.stacks.update(dict.fromkeys(stack.names, stack))
        # What members get in the source, for those that are reached after the first.
        at_once = [set(group) for group in order.together]
        later = [
            name
            for name, stack in self.stacks.items()
            if not any(set(stack.names) <= group for group in at_once)
        ]
        ahead = [sites[name] for name in (*self.tied, *later) if name in order.calls]
        self.moments: Moments = gather(source, ahead, batches, order) if ahead else {}

    def shares(self, name: str) -> bool:
        """Return whether a layer is fitted here."""
        return name in self.tied or name in self.stacks

    def names(self, name: str) -> tuple[str, ...]:
        """Return the layers whose parameters a fit of one may have changed."""
        if name in self.tied:
            return tuple(one.name for one in self.tied[name].sites)
        return self.stacks[name].names if name in self.stacks else (name,)

    def errors(self, found: Mapping[str, float]) -> dict[str, float]:
        """Return the errors of layers that hold a table that is fitted, and were not reached.

        Args:
            found: errors of the layers that were.
        """
        more = {}
        for name, group in self.tied.items():
            known = [found[one.name] for one in group.sites if one.name in found]
            if name not in found and known and group.leader.name in self.settled:
                more[name] = max(known)
        return more

    @torch.no_grad()
    def fit(
        self, site: Site, converted: nn.Module, moments: Moments, targets: Targets
    ) -> float | None:
        """Fit a layer, and what it shares where nothing has settled that; return the relative
        error of its output. None where its group is not of low rank, or nothing tells: it then
        stays as it was fitted to its weights.

        Args:
            moments: of the layers that are fitted in this stage.
            targets: of those among them that share a factor.
        """
        if site.name in self.tied:
            fitted = self._fit_table(self.tied[site.name], site, converted)
        else:
            fitted = self._fit_stack(self.stacks[site.name], site, converted, targets)
        if fitted is None:
            return None
        twin = converted.get_submodule(site.name)
        return _settle_bias(site, twin, moments[site.name, "weight"][0], fitted)

    # One table for who looks it up and who multiplies by it

    def _fit_table(self, group: Tied, site: Site, converted: nn.Module) -> Tensor | None:
        leader: Any = converted.get_submodule(group.leader.name)
        metric = self._table_metric(group)
        if metric is None or not low_rank(leader.factors):
            return None
        if group.leader.name not in self.settled:
            self.settled.add(group.leader.name)
            _settle_table(group, leader, metric)
        twin: Any = converted.get_submodule(site.name)
        fitted: Tensor = twin.dense_weight().float()
        return fitted.t() if site.kind.lookup else fitted

    def _table_metric(self, group: Tied) -> TableMetric | None:
        """Return what an error of a group's table costs; None where nothing tells."""
        ones = {site.name: self.moments.get((site.name, "weight")) for site in group.sites}
        return table_metric(group, {name: one[0] for name, one in ones.items() if one})

    # One factor for several weights

    def _fit_stack(
        self, stack: Stacked, site: Site, converted: nn.Module, targets: Targets
    ) -> Tensor | None:
        twin: Any = converted.get_submodule(site.name)
        target, metric = targets[site.name]
        if not low_rank(twin.factors) or not isinstance(metric, Full):
            return None
        rank = twin.factors.rank
        if stack.names[0] not in self.settled:
            rows = self._shared_rows(stack, targets, rank)
            if rows is None:
                return None
            self.settled.add(stack.names[0])
            twin.w2.copy_(rows[:, :, None])
        rows = twin.w2.detach().squeeze(2)  # (R, D)
        own = coefficients(target, metric, rows).to(twin.w1.dtype)  # (K, R)
        twin.w1.copy_(own.t()[:, :, None])
        fitted: Tensor = own.float() @ rows.float()
        return fitted

    def _shared_rows(self, stack: Stacked, targets: Targets, rank: int) -> Tensor | None:
        """Return B (R, D): from what is reached in this stage, and for the other members from what
        they are in the source."""
        weights: list[Tensor] = []
        metrics: list[Full] = []
        for site in stack.sites:
            held = targets.get(site.name)
            if held is None:
                moments = self.moments.get((site.name, "weight"))
                if not moments or not moments[0].count:
                    return None
                weight = site.kind.computed(site.module)["weight"][0]
                held = weight, moments[0].metric()
            weight, metric = held
            if not isinstance(metric, Full):
                return None
            weights.append(weight)
            metrics.append(metric)
        layers = [self.plan.layer(name) for name in stack.names]
        counts = [(one.sensitivity if one else None) or 1.0 for one in layers]
        found = shared_rows(weights, metrics, counts)[:, :rank].t()  # (R, D)
        # Of the size that factors have which are fitted alone.
        size = sum(float(one.square().sum()) for one in weights) ** 0.25 / rank**0.25
        norms = torch.linalg.vector_norm(found, dim=1, keepdim=True)
        scaled: Tensor = found / norms.clamp(min=1e-30) * size
        return scaled.float()


def _settle_table(group: Tied, leader: Any, metric: TableMetric) -> None:
    """Set the factors that all of a group have."""
    left, right, _ = fit_table(table_of(group), metric, leader.factors.rank, sweeps=SWEEPS)
    one, two = left.t()[:, :, None], right[:, :, None]  # (R, V, 1), (R, E, 1)
    # An embedding's matrix is its table turned: K = E, D = V.
    w1, w2 = balanced(two, one) if group.tables else balanced(one, two)
    group.leader.kind.place(leader, "weight", 0, w1, w2)


def _settle_bias(site: Site, twin: nn.Module, moment: Moment, fitted: Tensor) -> float:
    """Let a layer's bias take up the mean error of its outputs; return their relative error.

    Args:
        fitted: its weight as it now is, (K, D).
    """
    weight = site.kind.computed(site.module)["weight"][0]
    site.kind.rest(site.module, twin, Spread())
    if moment.centred and has_bias(twin):
        before, after = moment.other_mean.float(), moment.mean.float()
        site.kind.shift(twin, "weight", 0, weight @ before - fitted @ after)
    lost, size = moment.error(weight, fitted)
    return float((lost / size) ** 0.5) if size else 0.0
