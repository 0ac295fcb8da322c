"""What calibration data tells about a model's layers: gathered once, when it is first asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor, nn

from bp_convert.calibration.gatherer import Moments, gather, order_of
from bp_convert.calibration.moments import Moment
from bp_convert.calibration.sensitivity import Trials
from bp_convert.calibration.slopes import Slopes, gather_slopes
from bp_convert.calibration.tap import Batches
from bp_convert.calibration.work import BACKWARD, FEW, GATHER, LEAST, SLOPES, TRIALS, within
from bp_convert.graph.clone import clone
from bp_convert.graph.example import device_of
from bp_convert.graph.walk import Site
from bp_convert.kron.metric import Metric
from bp_convert.values.progress import Progress


@dataclass(frozen=True)
class RoleSeen:
    """What the matrices of a role see.

    Attributes:
        metrics: of the inputs of each.
        outputs: how much the outputs of each count; None where all count alike.
        means: of the inputs of each, (D).
    """

    metrics: Sequence[Metric]
    outputs: Sequence[Metric | None]
    means: Sequence[Tensor]


@dataclass
class Evidence:
    """Runs the model on calibration data, and keeps what it saw.

    Args:
        sites: the layers that it is asked about.
        batches: calibration data; none where the weights alone decide.
        macs: multiply-adds of one example through the model; 0 where not known.
    """

    model: nn.Module
    sites: Sequence[Site]
    batches: Batches
    macs: float
    progress: Progress

    def seen(
        self, site: Site, role: str, matrices: int, *, both: bool, shrink: float
    ) -> RoleSeen | None:
        """Return what each matrix of a role sees; None where the weights alone decide."""
        moments = self.moments(site, role, matrices)
        if moments is None:
            return None
        each = {id(moment): moment.metric(shrink) for moment in moments}
        outputs = [moment.outputs for moment in moments]
        slope = self.slopes.get((site.name, role)) if both else None
        if slope is not None:
            outputs = list(slope.forms(matrices, shrink))
        metrics = [each[id(moment)] for moment in moments]
        return RoleSeen(metrics, outputs, [moment.mean for moment in moments])

    def moments(self, site: Site, role: str, matrices: int) -> list[Moment] | None:
        """Return the moment of each matrix, or None where the weights alone decide."""
        if not self.batches:
            return None
        found = self.gathered.get((site.name, role))
        if found is None or not found[0].count:
            return None
        return [found[index * len(found) // matrices] for index in range(matrices)]

    def only(self, name: str) -> list[Moment]:
        """Return the moments of a layer's only role."""
        return self.gathered[name, "weight"]

    @cached_property
    def gathered(self) -> Moments:
        """The moments of what each layer's roles see."""
        copy = clone(self.model, apart=True)
        sites = [one for one in self.sites if not one.kind.bare]
        order = order_of(copy, sites, self.batches)
        return gather(copy, sites, self._within(self.macs, GATHER), order, self.progress)

    @cached_property
    def slopes(self) -> Slopes:
        """How much the outputs of each layer count to the model."""
        sites = [one for one in self.sites if not one.kind.bare]
        batches = self._within(BACKWARD * self.macs, SLOPES)
        return gather_slopes(clone(self.model, apart=True), sites, batches, self.progress)

    @cached_property
    def trials(self) -> Trials:
        """What tries an error of one layer on the model's output."""
        plain = {site.held: site.module for site in self.sites if not site.plain}
        batches = self._within(len(self.sites) * self.macs, TRIALS, FEW)
        return Trials(clone(self.model, plain, apart=True), batches)

    def _within(self, each: float, work: float, least: int = LEAST) -> Batches:
        return within(self.batches, each, work, device_of(self.model), least)
