"""Metrics of the user's own: a torchmetrics.Metric, or a function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from bp_convert.errors import DataError
from bp_convert.evaluation.outputs import Seen


def custom(found: object, metric: str) -> OfTorchmetrics | OfFunction:
    """Wrap a metric of the user's: a torchmetrics.Metric, its class, or a function.

    Raises:
        DataError: it is neither.
    """
    from torchmetrics import Metric

    if isinstance(found, type) and issubclass(found, Metric):
        found = found()
    if isinstance(found, Metric):
        return OfTorchmetrics(found.clone(), metric)
    if not callable(found):
        raise _bad_metric(metric, f"a {type(found).__name__}")
    return OfFunction(found, metric)


class OfTorchmetrics:
    """A metric that adds up (outputs, labels) by itself."""

    compares = False

    def __init__(self, found: Any, metric: str) -> None:
        found.reset()
        self._metric, self._name = found, metric
        self.higher_is_better = found.higher_is_better is not False

    def update(self, seen: Seen) -> None:
        """Take a batch into account."""
        try:
            self._metric.update(seen.outputs, seen.labels)
        except Exception as problem:
            raise _bad_metric(self._name, _words(problem)) from problem

    def compute(self) -> float:
        """Return the metric over all batches."""
        try:
            return float(self._metric.compute())
        except Exception as problem:
            raise _bad_metric(self._name, _words(problem)) from problem


class OfFunction:
    """The mean over examples of a function of (outputs, labels, args, kwargs)."""

    compares = False

    def __init__(self, found: Callable[..., Any], metric: str) -> None:
        self._function, self._name = found, metric
        self.higher_is_better = bool(getattr(found, "higher_is_better", True))
        self._sum, self._count = 0.0, 0

    def update(self, seen: Seen) -> None:
        """Take a batch into account."""
        try:
            value = float(self._function(seen.outputs, seen.labels, seen.args, seen.kwargs))
        except Exception as problem:
            raise _bad_metric(self._name, _words(problem)) from problem
        self._sum += value * len(seen.outputs)
        self._count += len(seen.outputs)

    def compute(self) -> float:
        """Return the metric over all batches."""
        return self._sum / self._count


def _words(problem: Exception) -> str:
    return f"it fails with {type(problem).__name__}: {problem}"


def _bad_metric(metric: str, found: str) -> DataError:
    return DataError(
        where=f"--metric {metric}",
        found=found,
        allowed="a torchmetrics.Metric of (outputs, labels), or a function (outputs, labels, "
        "args, kwargs) -> float",
        fix="mend the metric",
    )
