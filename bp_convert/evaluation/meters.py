"""The metrics: each adds up batches and gives one number."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bp_convert.data.items import users_code
from bp_convert.errors import DataError
from bp_convert.evaluation.outputs import Seen, token_ids, unusable
from bp_convert.scripts import is_code, load_object

METRICS = "accuracy, topK (such as top5), perplexity, cosine, error or FILE.py:METRIC"
OWN = (
    "a torchmetrics.Metric of (outputs, labels), or a function (outputs, labels, args, kwargs) -> "
    "float"
)


class Meter:
    """Adds up one metric over batches: the mean over examples, where a kind of it says no other.

    Attributes:
        higher_is_better: whether a larger number is a better model.
        compares: whether batches must come with the source's outputs.
    """

    higher_is_better = True
    compares = False

    def __init__(self) -> None:
        self.total = self.count = 0.0

    def update(self, seen: Seen) -> None:
        """Take a batch into account."""
        raise NotImplementedError

    def compute(self) -> float:
        """Return the metric over all batches."""
        return self.total / self.count


def meter_factory(metric: str) -> Callable[[], Meter]:
    """Return what makes a fresh meter of a metric.

    Raises:
        DataError: the metric is unknown, or its file cannot be used.
    """
    if is_code(metric):
        found = load_object(metric, f"--metric {metric}")
        return partial(custom, found, metric)
    top = re.fullmatch(r"top([1-9]\d*)", metric)
    if metric == "accuracy" or top:
        return partial(Accuracy, int(top[1]) if top else 1)
    simple: dict[str, Callable[[], Meter]] = {
        "perplexity": Perplexity,
        "cosine": Cosine,
        "error": RelativeError,
    }
    if metric not in simple:
        raise DataError(
            where=f"--metric {metric}",
            found="no metric of that name",
            allowed=METRICS,
            fix="choose one of these",
        )
    return simple[metric]


class Accuracy(Meter):
    """Share of examples whose label is among the ``k`` largest of their outputs (N, classes)."""

    def __init__(self, k: int) -> None:
        super().__init__()
        self._k = k

    def update(self, seen: Seen) -> None:
        """Count hits."""
        outputs, labels = seen.outputs, seen.labels
        if labels is None or labels.dim() != 1 or labels.is_floating_point():
            raise unusable(
                "no labels"
                if labels is None
                else f"labels of shape (N{''.join(f', {n}' for n in labels.shape[1:])}), "
                f"{str(labels.dtype).removeprefix('torch.')}",
                "one class number for each example",
                "give data with labels, or take --metric cosine, which needs none",
            )
        if outputs.dim() != 2 or outputs.shape[1] < max(2, self._k):
            raise unusable(
                f"outputs of shape {tuple(outputs.shape)}",
                f"(N, classes) with at least {max(2, self._k)} classes",
                "take --metric cosine or error, which fit any output",
            )
        width = outputs.shape[1]
        bad = labels[(labels < 0) | (labels >= width)]
        if len(bad):
            raise unusable(
                f"the label {int(bad[0])}",
                f"0 to {width - 1}, as many classes as the model puts out",
                "number the classes as in training; class folders count in the order of names",
            )
        guesses = outputs.argmax(1, keepdim=True)
        if self._k > 1:
            guesses = outputs.float().topk(self._k, dim=1).indices
        self.total += int((guesses == labels[:, None]).sum())
        self.count += len(labels)


class Perplexity(Meter):
    """exp of the mean negative log-likelihood of each token after the first.

    Not torchmetrics' own: that takes the logarithm of float32 probabilities, which are 0 where a
    logit lies 104 below the largest, and then is infinite.
    """

    higher_is_better = False

    def update(self, seen: Seen) -> None:
        """Compare outputs (N, T, V) with the input ids (N, T) one step on; padding is left out."""
        outputs, ids = seen.outputs, token_ids(seen.args, seen.kwargs)
        if ids is None or outputs.dim() != 3 or outputs.shape[:2] != ids.shape:
            raise unusable(
                f"outputs of shape {tuple(outputs.shape)}"
                + (" and no token ids" if ids is None else f" for ids {tuple(ids.shape)}"),
                "outputs (N, T, vocabulary) for ids (N, T)",
                "perplexity is for language models; take --metric cosine for others",
            )
        if int(ids.max()) >= outputs.shape[2]:
            raise unusable(
                f"ids up to {int(ids.max())}",
                f"0 to {outputs.shape[2] - 1}, as many words as the model puts out",
                "take the tokenizer that the model was trained with",
            )
        counts = torch.ones_like(ids[:, 1:], dtype=torch.bool)
        if seen.mask is not None:
            counts = seen.mask[:, 1:] & seen.mask[:, :-1]
        logits = outputs[:, :-1][counts].float()  # (tokens, V)
        losses = F.cross_entropy(logits, ids[:, 1:][counts].long(), reduction="none")
        self.total += float(losses.double().sum())
        self.count += losses.numel()

    def compute(self) -> float:
        """Return the perplexity; infinite where it is above what a float64 holds."""
        if self.count == 0:
            raise unusable(
                "no token after a first one", "texts of two tokens or more", "give longer texts"
            )
        mean = super().compute()
        return math.exp(mean) if mean < 709 else math.inf


class Cosine(Meter):
    """Mean over examples of the cosine between the outputs and the source's.

    Outputs (N, T, D) with a mask (N, T) are averaged over their tokens first; others are
    flattened.
    """

    compares = True

    def update(self, seen: Seen) -> None:
        """Add the cosines of a batch."""
        mine, reference = _pair(seen)
        if seen.mask is not None and mine.dim() == 3 and mine.shape[:2] == seen.mask.shape:
            weight = seen.mask[..., None].double()
            # Sums do for means: a cosine ignores length
            mine, reference = (mine * weight).sum(1), (reference * weight).sum(1)
        mine, reference = mine.flatten(1), reference.flatten(1)
        if mine.shape[1] < 2:
            raise unusable(
                "one number for each example",
                "outputs of two numbers or more, which have a direction",
                "take --metric error",
            )
        self.total += float(F.cosine_similarity(mine, reference, dim=1).sum())
        self.count += len(mine)


class RelativeError(Meter):
    """Frobenius norm of the difference to the source's outputs, relative to theirs.

    Where there is a mask (N, T) for outputs (N, T, ...), padding is left out.
    """

    higher_is_better = False
    compares = True

    def update(self, seen: Seen) -> None:
        """Add the squares of a batch."""
        mine, reference = _pair(seen)
        if seen.mask is not None and mine.dim() > 2 and mine.shape[:2] == seen.mask.shape:
            mine, reference = mine[seen.mask], reference[seen.mask]
        self.total += float((mine - reference).square().sum())
        self.count += float(reference.square().sum())

    def compute(self) -> float:
        """Return the relative error."""
        if self.count == 0:
            raise unusable(
                "a source whose outputs are all zero",
                "outputs to compare with",
                "take another metric, or other examples",
            )
        return math.sqrt(super().compute())


def _pair(seen: Seen) -> tuple[Tensor, Tensor]:
    """Return outputs and the source's in float64."""
    reference = seen.reference
    if reference is None or reference.shape != seen.outputs.shape:
        raise unusable(
            f"outputs of shape {tuple(seen.outputs.shape)}",
            f"the source's, {None if reference is None else tuple(reference.shape)}",
            "compare models of one task",
        )
    return seen.outputs.double(), reference.double()


def custom(found: object, metric: str) -> Meter:
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
        raise DataError(
            where=f"--metric {metric}",
            found=f"a {type(found).__name__}",
            allowed=OWN,
            fix="mend the metric",
        )
    return OfFunction(found, metric)


class OfTorchmetrics(Meter):
    """A metric that adds up (outputs, labels) by itself."""

    def __init__(self, found: Any, metric: str) -> None:
        found.reset()
        self._metric, self._mended = found, (f"--metric {metric}", OWN, "mend the metric")
        self.higher_is_better = found.higher_is_better is not False

    def update(self, seen: Seen) -> None:
        """Take a batch into account."""
        with users_code(*self._mended):
            self._metric.update(seen.outputs, seen.labels)

    def compute(self) -> float:
        """Return the metric over all batches."""
        with users_code(*self._mended):
            return float(self._metric.compute())


class OfFunction(Meter):
    """The mean over examples of a function of (outputs, labels, args, kwargs)."""

    def __init__(self, found: Callable[..., Any], metric: str) -> None:
        super().__init__()
        self._function, self._where = found, f"--metric {metric}"
        self.higher_is_better = bool(getattr(found, "higher_is_better", True))

    def update(self, seen: Seen) -> None:
        """Take a batch into account."""
        with users_code(self._where, OWN, "mend the metric"):
            value = float(self._function(seen.outputs, seen.labels, seen.args, seen.kwargs))
        self.total += value * len(seen.outputs)
        self.count += len(seen.outputs)
