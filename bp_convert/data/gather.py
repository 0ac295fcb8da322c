"""What a caller asks of a source, and how it becomes Examples."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from torch import Tensor

from bp_convert.data.examples import Batch, Examples, digest_of
from bp_convert.data.fit import Accepts, fit_batch
from bp_convert.data.loader import stream
from bp_convert.data.rows import Part, Rows, broken_words, empty, pick, used_up
from bp_convert.errors import DataError
from bp_convert.graph.tree import rows_in
from bp_convert.values.tensors import TensorSpec

FRESH = 32  # examples on which a fitted model is compared with its source


@dataclass(frozen=True)
class Request:
    """The arguments of ``load_examples`` that mean the same for every source."""

    specs: Sequence[TensorSpec]
    count: int
    batch: int
    seed: int
    part: Part
    held_out: int
    spare: float | None = None
    accepts: Accepts | None = None

    def of_rows(self, rows: Rows, where: str, text: str, *, in_order: bool = False) -> Examples:
        """Pick rows and read them."""
        total = len(rows)
        broken: frozenset[int] = getattr(rows, "broken", frozenset())
        chosen = pick(
            total,
            count=self._at_least_one(where),
            seed=self.seed,
            part=self.part,
            held_out=self.held_out,
            spare=self.spare,
            left_out=broken,
            where=where,
        )
        chosen = sorted(chosen) if in_order else chosen
        batches = list(rows.read(chosen, self.batch))
        elsewhere = self.part == "evaluate" and bool(getattr(rows, "split", ""))
        numbers = () if elsewhere else tuple(chosen)
        text += f", {broken_words(len(broken))}" if broken else ""
        made = self._finish(batches, rows.labels(chosen), where, text, total, numbers)
        if self.part == "evaluate" or in_order:
            return made
        return replace(made, fresh=partial(self._fresh, rows, len(chosen), broken, where))

    def _fresh(self, rows: Rows, taken: int, broken: frozenset[int], where: str) -> Batch | None:
        """Read some of what calibration leaves to evaluation; None where there is none to read."""
        try:
            others = pick(
                len(rows), count=FRESH, seed=self.seed, part="evaluate", held_out=taken,
                spare=self.spare, left_out=broken, where=where,
            )  # fmt: skip
            (batch,) = rows.read(others, FRESH)
            return fit_batch(*batch, self.specs, where, self.accepts)
        except DataError:  # nothing asks for these
            return None

    def of_stream(self, items: Iterable[object], where: str, text: str) -> Examples:
        """Take the next examples of an iterable."""
        skip = self.held_out if self.part == "evaluate" else 0
        count = self._at_least_one(where)
        batches, labels, passed = stream(
            items, self.specs, where, count=count, batch=self.batch, skip=skip
        )
        if not batches:
            raise used_up(where, passed, skip) if passed else empty(where)
        return self._finish(batches, labels, where, text, None)

    def _finish(
        self,
        batches: Sequence[Batch],
        labels: Tensor | None,
        where: str,
        text: str,
        total: int | None,
        rows: tuple[int, ...] | None = None,
    ) -> Examples:
        """Check the batches against the model and describe them."""
        fitted = tuple(
            fit_batch(args, kwargs, self.specs, where, self.accepts) for args, kwargs in batches
        )
        count = sum(rows_in(one) for one in fitted)
        words = f"{count:,} examples" if total is None else f"{count:,} of {total:,} examples"
        fewer = f" ({self.count:,} asked for)" if count < self.count else ""
        return Examples(
            fitted, labels, count, f"{words} of {text}{fewer}", digest_of(fitted, labels), rows
        )

    def _at_least_one(self, where: str) -> int:
        if min(self.count, self.batch) < 1 or self.held_out < 0:
            raise DataError(
                where=where,
                found=f"count {self.count}, batch {self.batch}, held out {self.held_out}",
                allowed="a count and a batch of at least 1, and 0 or more held out",
                fix="ask for at least one example",
            )
        return self.count
