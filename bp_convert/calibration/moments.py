"""Second moments of what weights multiply, gathered in a stream.

Memory: D^2 numbers of float32 for a weight of D columns up to ``WIDE``, twice that while two
models are compared; beyond, C^2 + S^2 for a convolution of C channels and S kernel places, and D
for other weights. Rows are added batch by batch and never kept: 12 D of them over all batches,
or for a wider weight as many as have ``NUMBERS`` numbers. Where a mean is to be taken off, they
are counted from the first batch's mean: squares of a large mean would drown the variance. Rows
of very large or small numbers are scaled by a power of four, so that squares stay within float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite, prod

import torch
from torch import Tensor

from bp_convert.errors import DataError
from bp_convert.kron.compute import to_compute
from bp_convert.kron.metric import RIDGE, Diagonal, Full, Metric, Product
from bp_convert.kron.scale import power_of_four, unit

WIDE = 5120  # columns up to which a full moment is gathered
ROWS = 16_384  # rows of a layer that are looked at, or
TIMES = 12  # that many times its columns, if that is more;
NUMBERS = 1 << 27  # of a wide one no more rows than have this many numbers, since its metric has
LEAST = 256  # few of its own: but so many rows
SAMPLE, EACH = 1024, 64  # pairs of rows that are kept to measure errors on, and of each batch
SCARCE = 0.1  # ridge where there is a column for each row
FAINT = 0.02  # of the mean, the least that an output counts
ROUNDING = 1e-13  # of the mean square: inputs that vary less than this vary by rounding alone
SMOOTH = 0.3  # share of an embedding's metric that is spread over rows that were not looked up


def rows_wanted(columns: int) -> int:
    """Return how many rows of a weight's inputs are looked at over all calibration data."""
    if columns > WIDE:
        return max(LEAST, min(ROWS, NUMBERS // columns))
    return max(ROWS, TIMES * columns)


def ridge(columns: int, count: int) -> float:
    """Return how much of its mean variance is added to a moment of ``count`` rows.

    The less has been seen the less it is trusted. With fewer rows than columns whole directions
    were never seen; there the share grows with the square, so that the fit stays near the
    trained weight in them.
    """
    few = columns / count
    return RIDGE + SCARCE * few * max(1.0, few)


class Moment:
    """Moments of one weight's inputs, and, where two models are compared, across them.

    Args:
        columns: D.
        kernel: sizes of a convolution's kernel; none for a matrix.
        lookup: the weight is an embedding's, whose inputs are indices.
        centred: take moments about the mean, which a bias can then take up.
        name: what to call the layer in an error.
    """

    def __init__(
        self,
        columns: int,
        kernel: tuple[int, ...] = (),
        *,
        lookup: bool = False,
        centred: bool = True,
        cross: bool = False,
        name: str = "a layer",
    ) -> None:
        self.name = name
        self.columns = columns
        self.kernel = kernel
        self.lookup = lookup
        self.centred = centred
        self.count = 0
        self.paired = cross  # the rows of both models were always of the same examples
        self.largest = 0.0  # of all numbers that were added
        self.scale = 1.0  # by which rows are multiplied: all below is of scaled rows
        self.total = torch.zeros(columns, dtype=torch.float64)
        self.other_total = torch.zeros(columns, dtype=torch.float64)
        self.start = torch.zeros(columns)  # what rows are counted from
        self.other_start = torch.zeros(columns)
        self.full = columns <= WIDE and not lookup
        self.samples: list[tuple[Tensor, Tensor]] = []
        self.counts: Tensor | None = None  # (K,) how much each output counts, squared and summed
        self.cross = torch.zeros(columns, columns) if cross and self.full else None
        self.moments: tuple[Tensor, ...]
        if self.full:
            self.moments = (torch.zeros(columns, columns),)
        elif kernel and not lookup:
            places = prod(kernel)
            channels = columns // places
            self.moments = (torch.zeros(channels, channels), torch.zeros(places, places))
        else:
            self.moments = (torch.zeros(columns, dtype=torch.float64),)

    def add(self, rows: Tensor, other: Tensor | None = None) -> None:
        """Add rows (n, D), or indices (n,); ``other`` are the same rows in another model, until
        ``part`` says that there are none any more.

        Raises:
            DataError: numbers that are not finite.
        """
        if self.lookup:
            rows = to_compute(rows.reshape(-1), torch.int64)
            self.moments[0].add_(torch.bincount(rows, minlength=self.columns))
            self.count += len(rows)
            return
        if not len(rows):
            return
        rows = self._taken(rows)
        other = None if other is None else self._taken(other)
        self._rescale()
        rows = rows * self.scale
        if self.centred and not self.count:
            self.start = rows.mean(0, dtype=torch.float64).float()
        self.total += rows.sum(0, dtype=torch.float64)
        near = rows - self.start if self.centred else rows
        if self.full:
            self.moments[0].addmm_(near.t(), near)
        elif self.kernel:
            apart = near.view(len(rows), -1, prod(self.kernel))  # (n, C, S)
            flat = apart.transpose(1, 2).reshape(-1, apart.shape[1])  # (n*S, C)
            self.moments[0].addmm_(flat.t(), flat)
            flat = apart.reshape(-1, apart.shape[2])  # (n*C, S)
            self.moments[1].addmm_(flat.t(), flat)
        else:
            self.moments[0].add_(near.square().sum(0, dtype=torch.float64))
        if other is not None:
            self._beside(rows, near, other * self.scale)
        self.count += len(rows)

    def _beside(self, rows: Tensor, near: Tensor, other: Tensor) -> None:
        """Add what tells of both models' rows."""
        if sum(len(ours) for ours, _ in self.samples) < SAMPLE:
            self.samples.append((rows[:EACH].clone(), other[:EACH].clone()))
        if self.centred and not self.count:
            self.other_start = other.mean(0, dtype=torch.float64).float()
        self.other_total += other.sum(0, dtype=torch.float64)
        if self.cross is not None:
            self.cross.addmm_((other - self.other_start).t(), near)

    def _taken(self, rows: Tensor) -> Tensor:
        """Return rows as they are computed with."""
        rows = to_compute(rows)
        largest = max(map(abs, map(float, torch.aminmax(rows))))
        if not isfinite(largest):
            bad = int((~torch.isfinite(rows)).any(1).sum())
            raise DataError(
                where=f"calibration data at {self.name}",
                found=f"{bad} of {len(rows)} rows that reach it hold numbers that are not finite",
                allowed="data on which every layer gets finite float32 numbers",
                fix="repair or leave out these examples, or exclude the layer; where the data "
                "itself is finite, the model overflows: convert it in float32",
            )
        self.largest = max(self.largest, largest)
        return rows

    def _rescale(self) -> None:
        """Bring the scale, and all that was added so far, to the largest number."""
        scale = 1 / power_of_four(self.largest)
        if scale == self.scale:
            return
        more = scale / self.scale
        for sums in (self.total, self.other_total, self.start, self.other_start):
            sums.mul_(more)
        for squares in (*self.moments, *([] if self.cross is None else [self.cross])):
            squares.mul_(more).mul_(more)
        self.samples = [(ours * more, theirs * more) for ours, theirs in self.samples]
        self.scale = scale

    def part(self) -> None:
        """Give up comparing with the other model: its rows are not of the same examples."""
        self.paired, self.cross = False, None
        self.samples.clear()

    def weigh(self, counts: Tensor) -> None:
        """Add how much each output (K) counts in a batch, as a mean square."""
        counts = to_compute(counts, torch.float64)
        self.counts = counts if self.counts is None else self.counts + counts

    @property
    def weights(self) -> Tensor | None:
        """How much each output (K) counts, in the mean 1; None where all count alike."""
        if self.counts is None or not float(self.counts.sum()) > 0:
            return None
        roots = self.counts.sqrt()
        return (roots / roots.mean()).clamp(min=FAINT).float()

    @property
    def outputs(self) -> Metric | None:
        """How much each output (K) counts, as a form; None where all count alike."""
        weights = self.weights
        return None if weights is None else Diagonal(weights.square())

    @property
    def mean(self) -> Tensor:
        """Mean row (D), float64."""
        return self.total / max(1, self.count) / self.scale

    @property
    def other_mean(self) -> Tensor:
        """Mean row of the other model (D), float64; this model's where they cannot be compared."""
        total = self.other_total if self.paired else self.total
        return total / max(1, self.count) / self.scale

    def metric(self, shrink: float = 0.0) -> Metric:
        """Return the metric that these moments make.

        Args:
            shrink: how much of the mean variance is added, beside the ridge: the more, the nearer
                to the metric of the weights alone.
        """
        count = max(1, self.count)
        if self.lookup:
            shares = self.moments[0] / count
            return Diagonal((1 - SMOOTH) * shares + SMOOTH / self.columns)
        level = self.scale**-2
        mean = self._offset(self.total, self.start)
        moments = [one.double() / count for one in self.moments]
        if self._constant(moments, mean):  # nothing is known of how the columns vary
            mean = torch.zeros_like(mean)
            moments = [torch.zeros_like(one) for one in moments]
        if self.full:
            moment = moments[0] - torch.outer(mean, mean)
            return Full(moment.float(), ridge(self.columns, count) + shrink, level)
        if self.kernel:
            places = prod(self.kernel)
            apart = mean.view(-1, places)  # (C, S)
            first = moments[0] / places - apart @ apart.t() / places
            second = moments[1] - apart.t() @ apart
            size = float(second.diagonal().mean())
            second = second / size if size > 0 else torch.zeros_like(second)
            return Product(first.float(), second.float(), RIDGE + shrink, level)
        spread = moments[0] - mean.square()
        size = float(spread.mean())
        floor = (1e-3 + shrink) * size if size > 0 else 1.0
        return Diagonal(spread.clamp(min=0) + floor, level)

    def _offset(self, total: Tensor, start: Tensor) -> Tensor:
        """Return the mean of what was counted from a start, scaled (D), float64."""
        mean = total / max(1, self.count)
        return mean - start if self.centred else torch.zeros_like(mean)

    def _constant(self, moments: Sequence[Tensor], mean: Tensor) -> bool:
        """Return whether centred inputs vary by no more than rounding."""
        if not self.centred:
            return False
        squares = moments[-1] if moments[-1].dim() == 1 else moments[-1].diagonal()
        variance = float(squares.sum()) / self.columns - float(mean.square().mean())
        return variance <= ROUNDING * float((self.total / max(1, self.count)).square().mean())

    def error(self, weight: Tensor, fitted: Tensor) -> tuple[float, float]:
        """Return ``|W x - W' x'|^2`` and ``|W x|^2`` over a sample of both models' rows, about
        their means where the moments are."""
        if not self.samples:
            metric = self.metric()
            return metric.energy(weight - fitted), metric.energy(weight)
        ours = torch.cat([pair[0] for pair in self.samples])
        theirs = torch.cat([pair[1] for pair in self.samples])
        if self.centred:
            ours = ours - (self.mean * self.scale).float()
            theirs = theirs - (self.other_mean * self.scale).float()
        weight, size = unit(weight)
        wanted = theirs @ weight.t()
        gap = float((wanted - ours @ (fitted / size).t()).square().sum(dtype=torch.float64))
        whole = float(wanted.square().sum(dtype=torch.float64))
        level = (size / self.scale) ** 2
        return gap * level, whole * level

    def across(self) -> Tensor | None:
        """Return the moment (D, D) of the other model's rows with these, both scaled as the metric
        is; None if not gathered."""
        if self.cross is None:
            return None
        both = self.cross.double() / max(1, self.count)
        if self.centred:
            far = self._offset(self.other_total, self.other_start)
            both = both - torch.outer(far, self._offset(self.total, self.start))
        return both

    def target(self, weight: Tensor, metric: Metric, solved: torch.dtype = torch.float64) -> Tensor:
        """Return ``T = W E[x x'^T] C'^-1`` for the other model's rows x and these, x', held to W by
        the metric's ridge: what to fit, so that outputs are W x; W where no moments tell.

        Args:
            solved: in which this is solved; in float32 with the root that the metric holds.
        """
        across = self.across()
        if across is None or not isinstance(metric, Full):
            return weight
        if solved == torch.float32:
            right = weight @ across.float() + metric.added * weight
            return torch.cholesky_solve(right.t(), metric.lower).t()
        right = weight.double() @ across + metric.added * weight.double()  # (K, D)
        lower = torch.linalg.cholesky_ex(metric.matrix.double())
        if int(lower.info):
            return weight
        return torch.cholesky_solve(right.t(), lower.L).t().float()
