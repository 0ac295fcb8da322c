"""Converted models scored against their source, which is scored once."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor, nn

from bp_convert.data import Examples
from bp_convert.evaluation.meters import meter_factory
from bp_convert.evaluation.outputs import Seen, forward, main_output, unusable
from bp_convert.graph.clone import clone
from bp_convert.graph.running import Args, Kwargs
from bp_convert.values.report import Score

KEPT_BYTES = 2**30  # of the source's outputs; those that do not fit are computed again


class Scorer:
    """Scores converted models against one source, which is scored once.

    Args:
        source: the model before conversion. It stays as it is.
        examples: what to score on, with labels where the metric needs them.
        metric: one of ``bp_convert.evaluation.meters.METRICS``. By default accuracy where the
            labels are class numbers, else cosine. ``accuracy`` and ``topK`` need outputs
            (N, classes); ``perplexity`` compares outputs (N, T, V) with the input ids one step
            on; ``cosine`` is the mean similarity to the source's outputs, averaged over tokens
            where there is a mask; ``error`` is their relative Frobenius error. A Python file,
            which is run, gives a torchmetrics.Metric or a function
            ``(outputs, labels, args, kwargs) -> float``, of which the mean over examples is
            taken; higher is better unless its attribute ``higher_is_better`` is False.

    Attributes:
        metric: the metric's name.
        before: the source's score.
        higher_is_better: whether a larger number is a better model.

    Raises:
        DataError: an unknown metric, or examples or outputs that it cannot be computed from.
        TraceError: the source does not run on the examples.
    """

    def __init__(self, source: nn.Module, examples: Examples, metric: str | None = None) -> None:
        labels = examples.labels
        classes = labels is not None and labels.dim() == 1 and not labels.is_floating_point()
        self.metric = metric or ("accuracy" if classes else "cosine")
        self._source, self._examples = clone(source, apart=True), examples
        self._kept: dict[int, Tensor] = {}
        self._room = KEPT_BYTES
        self._factory = meter_factory(self.metric)
        self.higher_is_better = self._factory().higher_is_better
        self.before = self._measure(self._source)

    def score(self, model: nn.Module) -> Score:
        """Score a converted model, in eval mode and without gradients; it stays as it is.

        Raises:
            DataError: its outputs are not what the metric needs.
            TraceError: it does not run on the examples.
        """
        return Score(
            metric=self.metric,
            before=self.before,
            after=self._measure(clone(model, apart=True)),
            higher_is_better=self.higher_is_better,
            examples=self._examples.count,
        )

    def _measure(self, model: nn.Module) -> float:
        meter = self._factory()
        labels = self._examples.split_labels()
        for i, (args, kwargs) in enumerate(self._examples.batches):
            raw = forward(model, args, kwargs, i)
            reference = None
            if meter.compares:
                reference = self._reference(i, args, kwargs, raw if model is self._source else None)
            meter.update(Seen(raw, args, kwargs, labels[i], reference))
        result = meter.compute()
        if math.isnan(result):
            raise unusable(
                f"{self.metric} is not a number",
                "finite outputs",
                "look at the model's outputs on these examples; they may be infinite",
            )
        return result

    def _reference(self, i: int, args: Args, kwargs: Kwargs, raw: Any) -> Tensor:
        """Return the source's outputs on a batch: kept ones, or those of a new pass."""
        if i in self._kept:
            return self._kept[i]
        raw = forward(self._source, args, kwargs, i) if raw is None else raw
        outputs = main_output(raw, args, kwargs)
        size = outputs.numel() * outputs.element_size()
        if size <= self._room:
            self._room -= size
            self._kept[i] = outputs.clone()  # not a view into something larger
        return outputs
