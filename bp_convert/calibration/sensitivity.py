"""How much an error of one layer matters to what the model puts out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from math import sqrt

import torch
from torch import Tensor, nn

from bp_convert.calibration.replay import Replay
from bp_convert.calibration.tap import Batch, Batches, Enough, run_quietly
from bp_convert.graph.tree import tensors_in
from bp_convert.graph.walk import Site
from bp_convert.kron.compute import to_compute
from bp_convert.kron.gram import gram
from bp_convert.kron.metric import Metric
from bp_convert.kron.scale import unit

LOST = 0.1  # share of the layer's output energy that the trial takes away
FEWEST, MOST = 0.1, 7.0  # bounds of a sensitivity: one trial is no certainty
BATCHES = 2  # that are looked at


class Trials:
    """Takes away a part of one layer at a time and looks at the output.

    A layer's sensitivity is the growth of the model's squared relative error over the layer's own
    squared relative error, in the metric of its inputs, when the directions of its output that
    matter least are cut off; ``damped`` says how far that is trusted. Without data every layer
    counts alike, 1.

    Args:
        model: a copy that may be written to; it is left as it was.
    """

    def __init__(self, model: nn.Module, batches: Batches) -> None:
        self.model = model
        model.eval()
        self.batches = batches[:BATCHES]
        self.replay = Replay(model)
        self.wanted = [self._outputs(*one) for one in enumerate(self.batches)]

    def of(
        self,
        site: Site,
        role: str,
        metrics: Sequence[Metric],
        means: Sequence[Tensor],
        outputs: Sequence[Metric | None] | None = None,
    ) -> float:
        """Return the sensitivity to errors of one role's matrices.

        Args:
            means: of the inputs of each matrix, (D).
            outputs: for each matrix how much its outputs count; None where all count alike.
        """
        module = self.model.get_submodule(site.name)
        matrices = site.kind.computed(module)[role]
        lost = total = 0.0
        changes: list[Tensor] = []
        every = zip(matrices, metrics, outputs or [None] * len(matrices), strict=True)
        for matrix, metric, counts in every:
            scaled = matrix if counts is None else counts.root(matrix.t()).t()
            near = truncated(scaled, metric)
            lost += metric.energy(scaled - near)
            total += metric.energy(scaled)
            change = near - scaled
            changes.append(change if counts is None else counts.unroot(change.t()).t())
        if not lost or not total:
            return 1.0
        shifts = [-(change @ mean.to(change)) for change, mean in zip(changes, means, strict=True)]
        self._up_to(module)
        with _changed(site, module, role, changes, shifts), self.replay.upto(()):
            grown = self._error()
        return 1.0 if grown is None else damped(grown / (lost / total))

    def _up_to(self, module: nn.Module) -> None:
        """Run what comes before a layer, so that passes may start there."""
        if not self.replay.on:
            return

        def reached() -> None:
            raise Enough

        with self.replay.upto([module], reached):
            for number, batch in enumerate(self.batches):
                self.replay.run(number, partial(run_quietly, self.model, batch, number))
        self.replay.next(0)
        if self.replay.untested:
            with self.replay.upto(()):
                self.replay.same(self._outputs(0, self.batches[0]), self.wanted[0])

    def _outputs(self, number: int, batch: Batch) -> list[Tensor]:
        output = self.replay.run(number, partial(run_quietly, self.model, batch, number))
        return [to_compute(t, torch.float64) for t in tensors_in(output) if t.is_floating_point()]

    def _error(self) -> float | None:
        """Return the squared error relative to the outputs' variance; None where no output keeps
        its shape, as may be where that hangs on values."""
        gap = size = 0.0
        compared = False
        for number, batch in enumerate(self.batches):
            for now, then in zip(self._outputs(number, batch), self.wanted[number], strict=False):
                if now.shape != then.shape:
                    continue
                compared = True
                gap += float((now - then).square().sum())
                centre = then.mean(0) if then.dim() and len(then) > 1 else 0.0
                size += float((then - centre).square().sum())
        if not compared:
            return None
        return gap / size if size else 0.0


def damped(growth: float) -> float:
    """Return the sensitivity that a measured growth stands for: its root, and below 1 the root of
    that.

    The trial perturbs one layer of a model that is otherwise whole, while in the conversion later
    layers are fitted to make up for earlier ones. Taken at face value, measurements made models
    worse than counting all layers alike, and so did not measuring; see ``benchmarks/quality.py``.
    """
    if not growth > 0:
        return FEWEST
    return min(MOST, sqrt(growth)) if growth >= 1 else max(FEWEST, growth**0.25)


def truncated(matrix: Tensor, metric: Metric) -> Tensor:
    """Cut off the weakest directions of the output, up to a share of its energy."""
    scaled, size = unit(matrix)
    rows = metric.root(scaled)  # (K, D)
    tall = rows.shape[0] > rows.shape[1]
    values, vectors = torch.linalg.eigh(gram(rows.t() if tall else rows))  # rising
    values = values.clamp(min=0)
    cut = int((values.cumsum(0) <= LOST * values.sum()).sum())
    weak = vectors[:, : min(max(cut, 1), len(values) - 1)].float()
    # The same directions from the inputs' side, where the Gram matrix is smaller.
    lost = metric.unroot(rows @ weak @ weak.t()) * size if tall else weak @ (weak.t() @ matrix)
    return matrix - lost


@contextmanager
def _changed(
    site: Site, module: nn.Module, role: str, changes: Sequence[Tensor], shifts: Sequence[Tensor]
) -> Iterator[None]:
    """Add to one role's matrices, and to the bias what keeps the mean; then take it away again."""
    held = [parameter.detach().clone() for parameter in module.parameters()]
    with torch.no_grad():
        site.kind.add(module, role, changes)
        site.kind.add_bias(module, role, shifts)
    try:
        yield
    finally:
        with torch.no_grad():
            for parameter, kept in zip(module.parameters(), held, strict=True):
                parameter.copy_(kept)
