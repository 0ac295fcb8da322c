"""Which examples each use of a job gets: one rule, computed once, handed down.

One permutation of a source by the seed is cut: calibration takes its start and evaluation its end.
Training learns all that is not scored, and holds out of it what nothing was fitted to. Of a stream
calibration takes the start and evaluation what follows; training reads it whole, so that nothing
of it can be scored. Published sets bring a part for each.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from torch import nn

from bp_convert.data.collate import Accepts, fit_batch, shaped
from bp_convert.data.dataset import Part, Rows, Stream, empty
from bp_convert.data.examples import Examples
from bp_convert.data.factory import Data, has_parts, is_arrays, open_data
from bp_convert.data.images import Pictures
from bp_convert.data.locator import Locator
from bp_convert.data.share import (
    EXAMPLES,
    FRESH,
    Share,
    broken_words,
    first_rows,
    last_rows,
    parted,
    shuffled,
    used_up,
)
from bp_convert.errors import DataError
from bp_convert.fakes.inputs import bounded, infer_input, runs
from bp_convert.graph.example import SampleInputs, specs_of_batch
from bp_convert.values.settings import Settings
from bp_convert.values.tensors import TensorSpec
from bp_convert.values.training import Training

SCORED = 2000  # examples that are scored at most
CALIBRATED = "{} of {} validation examples were calibrated on: their loss is low at the start"
UNSPLIT = "no validation: a loader that is read from its start cannot be split; give validation="


@dataclass(frozen=True)
class Split:
    """What each use gets, None where there is no such use.

    Attributes:
        calibrate: what factors are fitted to.
        train: what is learnt.
        validate: what a training run is judged by.
        evaluate: what is scored.
        notes: what the reader should know.
    """

    calibrate: Share | None = None
    train: Share | None = None
    validate: Share | None = None
    evaluate: Share | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Uses:
    """What is asked of data.

    Attributes:
        calibrate: data to fit to.
        count: examples of it, at most.
        fits: whether it is really fitted to; if not, evaluation leaves it out all the same.
        evaluate: data to score on.
        scored: examples of it, at most.
        learn: data to train on.
        validation: data to validate on, or the share of ``learn`` that is held out; 0 for none.
        order: seed of what is held out.
        fitted, left_out: rows of ``learn`` that were calibrated on elsewhere, and that are kept for
            another score.
        beside: other data that is learnt, of which evaluation leaves as much.
    """

    calibrate: Any = None
    count: int = EXAMPLES
    fits: bool = True
    evaluate: Any = None
    scored: int = SCORED
    learn: Any = None
    validation: Any = 0
    order: int = 0
    fitted: Collection[int] = ()
    left_out: Collection[int] = ()
    beside: tuple[Any, ...] = ()

    def with_training(self, training: Training | None) -> Uses:
        """Return these uses and those of a training run."""
        if training is None or training.data is None:
            return self
        return replace(
            self, learn=training.data, validation=training.validation, order=training.seed
        )


def split_for(
    model: nn.Module,
    uses: Uses,
    settings: Settings | None = None,
    *,
    inputs: Sequence[TensorSpec] = (),
    batch: int = 32,
    tokenizer: str | Path | None = None,
    download: bool = False,
) -> Split:
    """Decide what each use gets; sources are opened, and examples read where they are asked for.

    Args:
        settings: their ``inputs`` describe what the model takes, inferred where there are none;
            their ``seed`` chooses.
        inputs: what the model that is trained takes, where that is known.
        batch: examples of a batch in memory.
        tokenizer: folder of the tokenizer, for text.
        download: let torchvision fetch a data set that is not there.

    Raises:
        DataError: a source cannot be read or does not fit, or uses cannot be kept apart.
    """
    return _Rule(model, uses, settings or Settings(), inputs, batch, tokenizer, download).split()


def examples_for(
    model: nn.Module,
    data: Data,
    settings: Settings | None = None,
    *,
    count: int = EXAMPLES,
    batch: int = 32,
    tokenizer: str | Path | None = None,
) -> Examples:
    """Turn whatever holds data into examples that fit ``model``.

    Args:
        data: as ``open_data`` takes it; Examples are returned as they are.
        count: examples at most, chosen by the settings' seed.
        settings, batch, tokenizer: as for ``split_for``.

    Raises:
        DataError: the data cannot be read or does not fit.
    """
    uses = Uses(calibrate=data, count=count)
    split = split_for(model, uses, settings, batch=batch, tokenizer=tokenizer)
    assert split.calibrate is not None
    return split.calibrate.examples


@dataclass(frozen=True)
class _Rule:
    model: nn.Module
    uses: Uses
    settings: Settings
    inputs: Sequence[TensorSpec]
    batch: int
    tokenizer: str | Path | None
    download: bool
    opened: dict[Any, Rows | Stream] = field(default_factory=dict)
    tried: dict[tuple[TensorSpec, ...], bool] = field(default_factory=dict)

    def split(self) -> Split:
        uses, notes = self.uses, list[str]()
        calibrate = evaluate = train = validate = None
        same = uses.evaluate is not None and is_same(uses.calibrate, uses.evaluate)
        if uses.calibrate is not None and (uses.fits or same):
            calibrate = self._taken(uses.calibrate, "train", self._start)
        if uses.evaluate is not None:
            taken = 0
            if same and calibrate is not None:
                taken = calibrate.count or 0 if calibrate.rows is None else len(calibrate.rows)
            evaluate = self._taken(uses.evaluate, "test", partial(self._end, taken=taken))
        calibrate = calibrate if uses.fits else None
        if uses.learn is not None:
            train, validate, notes = self._training(calibrate, evaluate)
        return Split(calibrate, train, validate, evaluate, tuple(notes))

    @cached_property
    def specs(self) -> tuple[TensorSpec, ...]:
        return specs_of(self.model, self.settings.inputs)

    def _taken(self, data: Any, part: Part, cut: Callable[[Rows | Stream], Share]) -> Share:
        """Open a source and cut a share out of it."""
        if isinstance(data, Examples):
            return Share(None, data.rows, given=data)

        def share(specs: Sequence[TensorSpec]) -> Share:
            return cut(self._open(data, part, specs, self.settings.seed))

        named = isinstance(data, str | Path) and not is_arrays(data)  # needs to know a size
        if named or isinstance(data, Iterator) or self.settings.inputs:
            return share(self.specs)
        try:
            found = share(self.specs)
            _ = found.examples
        except DataError:
            # What the data looks like says more than a guess, where the model runs on it.
            with suppress(DataError):
                found = share(())
                if runs(self.model, SampleInputs(given=found.examples.batches[0])):
                    return found
            raise
        return found

    def _start(self, data: Rows | Stream) -> Share:
        """Cut out what is calibrated on: of rows, all but what training and a score need."""
        uses, count = self.uses, self.uses.count
        known = Share(data, None, count, 0, self.batch, self._accepts(self.specs))
        if isinstance(data, Stream):
            return known
        order = shuffled(data, self.settings.seed)
        needed: float | None = None
        if uses.learn is not None and is_same(uses.learn, uses.calibrate):
            needed = uses.validation if isinstance(uses.validation, float) else 0.0
            if uses.evaluate is not None and is_same(uses.calibrate, uses.evaluate):
                needed = min(0.5, 2 * needed)
        rows = first_rows(order, count, needed or 0.0)
        others = last_rows(order, FRESH, len(rows), halved=needed is not None)
        return replace(known, rows=tuple(rows), others=tuple(others))

    def _end(self, data: Rows | Stream, taken: int) -> Share:
        """Cut out what is scored: none of what calibration took, and half where training learns."""
        count, accepts = self.uses.scored, self._accepts(self.specs)
        if isinstance(data, Stream):
            return Share(data, None, count, taken, self.batch, accepts)
        order = shuffled(data, self.settings.seed)
        learnt = (self.uses.learn, *self.uses.beside)
        shared = any(one is not None and is_same(one, self.uses.evaluate) for one in learnt)
        if data.split:  # the parts are other examples already
            taken, shared = 0, False
        rows = last_rows(order, count, taken, halved=shared)
        if not rows:
            raise used_up(data.where, len(order), taken)
        return Share(data, tuple(rows), count, 0, self.batch, accepts)

    def _accepts(self, specs: tuple[TensorSpec, ...]) -> Accepts:
        def accepts(spec: TensorSpec, shape: tuple[int, ...]) -> bool:
            other = spec.model_copy(update={"shape": shape})
            changed = tuple(other if one == spec else one for one in specs)
            if changed not in self.tried:
                self.tried[changed] = runs(self.model, SampleInputs(changed))
            return self.tried[changed]

        return accepts

    def _training(
        self, calibrate: Share | None, evaluate: Share | None
    ) -> tuple[Share, Share | None, list[str]]:
        uses, notes = self.uses, list[str]()
        specs = self._trained_specs(calibrate)
        accepts = self._accepts(specs)
        data = self._learnt(uses.learn, "train", specs, accepts)
        scored, fitted = set(uses.left_out), set(uses.fitted)
        if evaluate is not None and is_same(uses.learn, uses.evaluate):
            if evaluate.numbers is None:
                raise DataError(
                    where=f"data {uses.evaluate}",
                    found="the data that is learnt from, which cannot be kept apart from it",
                    allowed="other examples to score on",
                    fix="name another source to evaluate on",
                )
            scored |= set(evaluate.numbers)
        if calibrate is not None and is_same(uses.learn, uses.calibrate):
            fitted |= set(calibrate.rows or ())
        if isinstance(data, Rows) and data.broken:
            notes.append(broken_words(len(data.broken)))
            scored |= data.broken
        share = uses.validation
        if not isinstance(share, int | float):
            other = self._learnt(share, "test", specs, accepts)
            parts = all(isinstance(one, Rows) and bool(one.split) for one in (data, other))
            check_apart(uses.learn, share, other.where, parts=parts)
            return _whole(data, accepts, scored), _whole(other, accepts), notes
        if not share:
            return _whole(data, accepts, scored), None, notes
        if isinstance(data, Stream):
            return _whole(data, accepts), None, [*notes, UNSPLIT]
        learnt, kept = parted(len(data), float(share), uses.order, data.where, fitted, scored)
        if known := sum(row in fitted for row in kept):
            notes.append(CALIBRATED.format(known, len(kept)))
        return Share(data, tuple(learnt)), Share(data, tuple(kept)), notes

    def _learnt(
        self, data: Any, part: Part, specs: tuple[TensorSpec, ...], accepts: Accepts
    ) -> Rows | Stream:
        """Open what is trained or validated on, in the shape that it has where the model runs on
        that; it is told from an example here, as no model is there in the processes that read."""
        found = self._open(
            data, part, specs, self.uses.order, download=self.download, text="the data given"
        )
        if isinstance(found, Rows) and not isinstance(found, Pictures) and len(found):
            with suppress(DataError), found.draws or nullcontext():
                found.specs = shaped(specs, fit_batch(*found[0][:2], specs, found.where, accepts))
        return found

    def _trained_specs(self, calibrate: Share | None) -> tuple[TensorSpec, ...]:
        """Return what the model that is trained takes: as its plan will say."""
        if self.inputs or self.settings.inputs or calibrate is None:
            return specs_of(self.model, freed(self.inputs)) if self.inputs else self.specs
        return specs_of(self.model, freed(specs_of_batch(*calibrate.examples.batches[0])))

    def _open(
        self, data: Any, part: Part, specs: Sequence[TensorSpec], seed: int, **how: Any
    ) -> Rows | Stream:
        """Open a source; files are opened once, however many uses take them."""
        if not isinstance(data, str | Path) or has_parts(data) is not False:
            return open_data(data, specs, part=part, seed=seed, tokenizer=self.tokenizer, **how)
        key = (str(data), tuple(specs))
        if key not in self.opened:
            self.opened[key] = open_data(data, specs, tokenizer=self.tokenizer)
        return self.opened[key]


def _whole(data: Rows | Stream, accepts: Accepts, without: Collection[int] = ()) -> Share:
    """Return all of a source that can be read, without some of its rows."""
    if isinstance(data, Stream):
        return Share(data, accepts=accepts)
    left_out = {*without, *data.broken}
    rows = tuple(row for row in range(len(data)) if row not in left_out)
    if not rows:
        raise empty(data.where)
    return Share(data, rows)


def is_same(one: Any, two: Any) -> bool:
    """Tell whether two uses take one source."""
    if isinstance(one, str | Path) and isinstance(two, str | Path):
        return Locator.parse(one).is_same(Locator.parse(two))
    return one is two and not isinstance(one, Examples)


def check_apart(learnt: Any, validation: Any, where: str, *, parts: bool) -> None:
    """Refuse to validate on what is learnt.

    Args:
        parts: whether the source keeps its parts apart by itself.

    Raises:
        DataError: both are one source without parts.
    """
    if (learnt is validation or is_same(learnt, validation)) and not parts:
        raise DataError(
            where=where,
            found="the data that is learnt from",
            allowed="other examples, or the share that is held out, such as validation=0.1",
            fix="leave validation out: a tenth is then held out",
        )


def freed(specs: Sequence[TensorSpec]) -> tuple[TensorSpec, ...]:
    """Return what a model takes without the bounds of integers, which may be those of the examples
    that it was told from: others reach further."""
    free = {"low": 0, "high": None}
    return tuple(one.model_copy(update=free) if "int" in one.dtype else one for one in specs)


def specs_of(model: nn.Module, inputs: Sequence[TensorSpec] = ()) -> tuple[TensorSpec, ...]:
    """Return what a model takes: as described, or inferred; empty where that is not known.

    Token ids get the bound of the table that they are looked up in, so that a tokenizer of another
    vocabulary is found out.
    """
    return bounded(model, tuple(inputs) or (infer_input(model) or ((), ""))[0])
