"""The validation data scored: the loss, and a metric where one fits."""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor, nn

from bp_convert.evaluation.meters import meter_factory
from bp_convert.evaluation.outputs import Seen, forward, live_output
from bp_convert.feeding.feed import Feed, Micro
from bp_convert.graph.example import adapt
from bp_convert.graph.running import draws_kept, quiet_forward, same_draws
from bp_convert.graph.tree import map_tensors
from bp_convert.training.engine import Engine
from bp_convert.training.loss import Objective
from bp_convert.training.watched import Watched


def metric_for(objective: Objective, name: str | None = None) -> str | None:
    """Return the metric that fits a task: accuracy, perplexity, or the cosine to the teacher.

    Args:
        name: what the user asked for instead.
    """
    if name is not None:
        return name
    if objective.task == "classes" and objective.labelled:
        return "accuracy"
    if objective.causal:
        return "perplexity"
    return "cosine" if objective.taught else None


@dataclass
class Validation:
    """Scores a model on validation data.

    Attributes:
        feed: the data, in a fixed order.
        objective: the loss, whose terms on layers and blocks are left out here, unless there are
            no others.
        metric: name of a metric, or None for the loss alone.
        watched: the outputs that these terms compare.
    """

    engine: Engine
    feed: Feed
    objective: Objective
    metric: str | None
    teacher: nn.Module | None
    watched: Watched

    def score(self, model: nn.Module, passes: int | None = None) -> dict[str, float]:
        """Return ``loss`` and the metric of a model, in eval mode; it stays as it is.

        Processes share the work; their results are weighted by their examples.

        Args:
            passes: of the data, at most.
        """
        meter = None if self.metric is None else meter_factory(self.metric)()
        loss = weight = 0.0
        inside = self.watched if self.objective.inside_alone else nullcontext()
        for number, micro in enumerate(islice(self.feed.epoch(0), passes)):
            there = to_device(micro, self.engine.model)
            with inside, self.engine.autocast():
                with same_draws(number, model), quiet_forward():
                    reference = None if self.teacher is None else taught(self.teacher, there)
                raw = forward(model, micro.args, micro.kwargs, number)
            value = float(self.objective(raw, there, reference, **self.watched.gaps(there)))
            share = micro.share * micro.total  # of all processes' examples
            loss, weight = loss + value * share, weight + share
            if not torch.isfinite(live_output(raw, micro.args, micro.kwargs)).all():
                meter = None
            if meter is not None:
                beside = None if reference is None else reference.float().cpu()
                plain = map_tensors(lambda t: t.float(), raw)
                meter.update(Seen(plain, micro.args, micro.kwargs, micro.labels, beside))
        found = {"loss": self.engine.mean(loss / weight, weight)}
        if meter is not None and self.metric is not None:
            found[self.metric] = self.engine.mean(meter.compute(), weight)
        return found

    def of_teacher(self) -> dict[str, float]:
        """Return the metric of the teacher, where it has one of its own."""
        if self.teacher is None or self.metric is None or self.metric in ("cosine", "error"):
            return {}
        return {self.metric: self.score(self.teacher).get(self.metric, math.nan)}


def taught(teacher: nn.Module, there: Micro) -> Tensor:
    """Return the teacher's output, without a graph; whoever runs next draws the same numbers.

    Raises:
        DataError: it has none that counts.
    """
    with torch.no_grad(), draws_kept(teacher):
        raw = teacher(*there.args, **there.kwargs)
    return live_output(raw, there.args, there.kwargs).detach()


def to_device(micro: Micro, model: nn.Module) -> Micro:
    """Return a pass in the form that a model takes, where it is."""
    args, kwargs = adapt(model, micro.args, micro.kwargs)
    return Micro(args, kwargs, micro.labels, micro.total, micro.share)
