"""A conversion run beside the same weights in plain layers, in every way that a user may run it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from bp_convert.errors import TraceError, VerificationError
from bp_convert.graph.clone import clone
from bp_convert.graph.example import SampleInputs
from bp_convert.graph.tree import map_tensors
from bp_convert.values.plan import Plan
from bp_convert.values.report import Verification
from bp_convert.verify.compare import Difference, change, difference
from bp_convert.verify.fingerprint import Fingerprint, check_untouched
from bp_convert.verify.gradients import check_gradients
from bp_convert.verify.pair import Pair, differs, failed, in_dtype, is_widened, stand_ins
from bp_convert.verify.sketch import too_large
from bp_convert.verify.way import Way, masked

BATCH = 2  # batch norm in train mode needs more than one
MANY = 32  # of the user's own examples, on which the error is measured; one that is drawn
EXACT = 1e-8  # relative difference of outputs up to which float64 explains it
SHRUNK = 1e-5  # of the difference in float32, to which float64 takes one that is rounding


def verify(
    source: nn.Module,
    converted: nn.Module,
    plan: Plan,
    sample: SampleInputs,
    *,
    new: Sequence[str],
    before: Fingerprint,
) -> Verification:
    """Run a conversion, the same weights in plain layers, and its source, and compare.

    The conversion has to compute what its weights compute in plain layers through the user's own
    forward: in eval mode, with attention's fused path and without, with a padding mask where the
    model takes one, on a second input after its weights have changed, and in train mode, each
    time from the same random state. Its new parameters have to receive a gradient where the
    plain layer's do. Copies run; source and conversion are left as they are.

    Args:
        plan: by which ``source`` became ``converted``.
        sample: example inputs.
        new: parameters that conversion made.
        before: ``fingerprint_of_data(source)`` from before the conversion.

    Raises:
        VerificationError: it computes something else; the error names the module where that
            starts. Or the source was written to.
    """
    found = _Verifying(source, converted, plan, sample, new).run()
    check_untouched(source, before)
    return found


@dataclass
class _Verifying:
    source: nn.Module
    converted: nn.Module
    plan: Plan
    sample: SampleInputs
    new: Sequence[str]
    notes: list[str] = field(default_factory=list)
    past: list[Way] = field(default_factory=list)

    def run(self) -> Verification:
        dtype, way, was = self._original()
        layers = [self.converted.get_submodule(one.name) for one in self.plan.converted]
        if is_widened(self.plan) and too_large(layers):
            with suppress(VerificationError):  # then the weights themselves decide
                return self._compared(dtype, way, was, sketched=True)
            self.notes, self.past = [], []
        return self._compared(dtype, way, was)

    def _compared(
        self, dtype: torch.dtype | None, plain: Way, was: Any, *, sketched: bool = False
    ) -> Verification:
        """Compare in every way.

        Args:
            plain: the way in which the source put out ``was``.
            sketched: build no weights of plain layers.
        """
        pair = Pair(self.source, self.converted, self.plan, dtype, sketched=sketched)
        self._dropped(pair, plain, was, dtype)
        now = self._same(pair, plain)
        found = change(was, now)
        self.notes += found.notes
        if pair.has_attention:
            self._same(pair, replace(plain, fast=False, words="eval mode, fused path off"))
        self._masked(pair)
        trained, gradients = self._train(
            pair, Way("train mode", self.sample.batch(pair.plain, BATCH))
        )
        self._changed(pair)
        return Verification(
            ran_eval=True,
            ran_train=trained,
            gradients=gradients,
            source_untouched=True,
            output_error=found.error,
            output=found.where,
            flips=found.flips,
            ways=tuple(dict.fromkeys(way.words for way in self.past)),
            examples=min(self.sample.count, MANY),
            on=self.sample.origin,
            notes=tuple(dict.fromkeys(self.notes)),
        )

    def _original(self) -> tuple[torch.dtype | None, Way, Any]:
        """Run a copy of the source; return the precision in which it runs, how, and its output."""
        problem: TraceError | None = None
        for dtype in dict.fromkeys((wide(self.converted), None)):
            original = in_dtype(clone(self.source, apart=True), dtype)
            way = Way("eval mode", self.sample.batch(original, MANY if self.sample.real else 1))
            try:
                return dtype, way, way.call(original)
            except TraceError as stopped:  # some compute in half precision only
                problem = stopped
        assert problem is not None
        raise _not_run(problem) from problem

    def _dropped(self, pair: Pair, way: Way, was: Any, dtype: torch.dtype | None) -> None:
        """Check that plain layers in place of those that compute their weights change nothing.

        Raises:
            VerificationError: they do.
        """
        plain = stand_ins(self.source, self.plan)
        if not plain:
            return
        now = way.call(in_dtype(clone(self.source, plain, apart=True), dtype))
        found = difference(was, now)
        if found.form or (found.size > pair.tolerance and not pair.is_sensitive(way, found.size)):
            raise VerificationError(
                where=f"{type(self.source).__name__} in {way.words}",
                found="with its weights in effect held by plain layers "
                + (found.form or f"{found.where} differs by {found.size:.2g}"),
                allowed="the source's own output",
                fix="keep the layers that compute their weights with --keep-parametrized, and "
                "please report this model",
            )

    def _masked(self, pair: Pair) -> None:
        """Run with the end of a sequence masked, where the model takes a mask and runs with it."""
        for batch in masked(self.source, *self.sample.batch(pair.plain, 1)):
            way = Way("eval mode with a padding mask", batch)
            if self._same(pair, way, optional=True) is not None:
                if pair.has_attention:
                    self._same(pair, replace(way, fast=False, words=f"{way.words}, fused path off"))
                return

    def _same(self, pair: Pair, way: Way, *, optional: bool = False) -> Any:
        """Compare conversion and plain layers in one way; return the conversion's output.

        Args:
            optional: return None where the plain layers do not run in this way.

        Raises:
            VerificationError: they differ.
        """
        try:
            expected, got = _both(pair, way)
        except TraceError as problem:
            if optional:
                return None
            raise _not_run(problem) from problem
        self._judge(pair, way, difference(expected, got))
        return got

    def _judge(self, pair: Pair, way: Way, found: Difference) -> None:
        self.past.append(way)
        if not found.form and found.size <= pair.tolerance:
            return
        if pair.sketches:
            raise differs(pair, way, found)
        note, shown = self._explained(pair, way, found)
        if not note:
            raise differs(pair, way, shown)
        self.notes.append(note)

    def _explained(self, pair: Pair, way: Way, found: Difference) -> tuple[str, Difference]:
        """Say how rounding explains a difference, empty where it does not; and return the one that
        tells most of it."""
        blown = (
            f"in {way.words} the model blows rounding up to {found.size:.2g}, with its plain "
            "layers too"
        )
        again = self._repeated()
        if again is None:
            rounded = not found.form and pair.is_sensitive(way, found.size)
            return blown if rounded else "", found
        pair, way, exact = again
        if exact.form:
            return "", exact
        if exact.size <= max(EXACT, SHRUNK * found.size):
            words = f"differ by {found.size:.2g} in float32 and not in float64"
            return f"in {way.words} outputs {words}: rounding decides in this model", exact
        return blown if pair.is_sensitive(way, exact.size) else "", found

    def _repeated(self) -> tuple[Pair, Way, Difference] | None:
        """Repeat everything on fresh copies in float64, and compare what was compared last; None
        where the model does not run in it."""
        pair = Pair(self.source, self.converted, self.plan, torch.float64)
        for way in self.past:
            wide = map_tensors(lambda t: t.double() if t.dtype == torch.float32 else t, way.batch)
            last = replace(way, batch=wide)
            if way.changed:
                pair.change()
            try:
                found = difference(last.call(pair.plain), last.call(pair.twin))
            except TraceError:
                return None
        return pair, last, found

    def _changed(self, pair: Pair) -> None:
        """Run once more with other weights and another input: nothing stale may be used."""
        if not pair.layers:
            return
        pair.change()
        words = "eval mode on another input, after a change of its weights"
        batch = self.sample.drawn.batch(pair.plain, 1, seed=1)
        self._same(pair, Way(words, batch, changed=True), optional=True)

    def _train(self, pair: Pair, way: Way) -> tuple[bool, bool]:
        """Run forward and backward in train mode; return whether each could be checked."""
        way = replace(way, training=True)
        with pair.buffers_kept():
            try:
                expected, got = _both(pair, way, grad=True)
            except TraceError as problem:
                self.notes.append(
                    f"train mode not checked: the source does not run in it on this input "
                    f"({problem.found})"
                )
                return False, False
            found = difference(expected, got)
            if found.form or found.size > pair.tolerance:
                # A dropout draws in the order of its input's memory, which may be another.
                with pair.no_dropout():
                    self._judge(pair, way, difference(*_both(pair, way)))
            else:
                self._judge(pair, way, found)
            checked, notes = check_gradients(pair, way, expected, got, self.new)
            self.notes += notes
            return True, checked


def _both(pair: Pair, way: Way, *, grad: bool = False) -> tuple[Any, Any]:
    """Run plain layers and conversion in one way.

    Raises:
        TraceError: the plain layers do not run in it.
        VerificationError: the conversion does not, though they do.
    """
    try:
        expected = way.call(pair.plain, grad=grad)
    except TraceError as problem:
        if pair.sketches:  # on the weights themselves it may run
            raise _not_run(problem) from problem
        raise
    try:
        got = way.call(pair.twin, grad=grad)
    except TraceError as problem:
        raise failed(pair, way, problem) from problem
    pair.check_sketches(way)
    return expected, got


def wide(model: nn.Module) -> torch.dtype | None:
    """Return float32 for models of less precision: what is compared is not rounding."""
    dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()}
    half = dtypes & {torch.float16, torch.bfloat16}
    return torch.float32 if half and dtypes <= half else None


def _not_run(problem: TraceError) -> VerificationError:
    return VerificationError(
        where=problem.where,
        found=f"a copy of the source does not run: {problem.found}",
        allowed="a model of which a copy runs, to compare with",
        fix="describe a real input with --input, or give examples with --calibrate",
    )
