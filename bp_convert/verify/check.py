"""A conversion run beside the same weights in plain layers, in every way that a user may run it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from bp_convert.errors import TraceError, VerificationError
from bp_convert.graph.clone import clone
from bp_convert.graph.example import SampleInputs
from bp_convert.graph.running import Args, Kwargs, fast_path, in_mode, run, same_draws
from bp_convert.graph.tree import map_tensors, tensors_in
from bp_convert.layers import TWINS
from bp_convert.torch_private import DropoutBase
from bp_convert.values.plan import Plan
from bp_convert.values.report import Verification
from bp_convert.verify.compare import Change, Difference, change, difference
from bp_convert.verify.fingerprint import Fingerprint, check_untouched
from bp_convert.verify.masks import masked
from bp_convert.verify.reference import Reference, in_dtype
from bp_convert.verify.trace import last_called, parting

BATCH = 2  # batch norm in train mode needs more than one
MANY = 32  # of the user's own examples, on which the error is measured; one that is drawn
ROUNDING = 1e-4  # relative difference of outputs up to which float32 explains it
EXACT = 1e-8  # the same in float64
SHRUNK = 1e-5  # of the difference in float32, to which float64 takes one that is rounding
COARSE = 5e-2  # and in half precision, where a model computes in nothing else
SCALED = 1.05  # by which factors are changed, to see that nothing stale is used
NUDGE = 8  # roundings by which weights are moved, to see whether a model blows them up


@dataclass(frozen=True)
class Way:
    """One way to run a model.

    Attributes:
        words: for messages.
        batch: inputs.
        training: the mode.
        fast: whether attention's fused path may be taken.
        changed: the weights are scaled first.
    """

    words: str
    batch: tuple[Args, Kwargs]
    training: bool = False
    fast: bool = True
    changed: bool = False

    def call(self, model: nn.Module, *, grad: bool = False) -> Any:
        """Run a model, on copies of the inputs and from the same random state each time."""
        args, kwargs = map_tensors(lambda t: t.clone(), self.batch)
        with (
            same_draws(0, model),
            fast_path(self.fast),
            in_mode(model, training=self.training),
            torch.set_grad_enabled(grad),
        ):
            return run(model, args, kwargs)


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
        dtype, plain, was = self._original()
        pair = _Pair(self.source, self.converted, self.plan, dtype)
        now = self._same(pair, plain)
        found = change(was, now)
        self.notes += found.notes
        if pair.has_attention:
            self._same(pair, replace(plain, fast=False, words="eval mode, fused path off"))
        self._masked(pair)
        trained, gradients = self._train(pair, Way("train mode", self._batch(pair, BATCH)))
        self._changed(pair)
        return self._result(found, trained, gradients)

    def _original(self) -> tuple[torch.dtype | None, Way, Any]:
        """Run a copy of the source; return the precision in which it runs, how, and its output."""
        problem: TraceError | None = None
        for dtype in dict.fromkeys((_wide(self.converted), None)):
            original = in_dtype(clone(self.source, apart=True), dtype)
            way = Way("eval mode", self.sample.batch(original, MANY if self.sample.real else 1))
            try:
                return dtype, way, way.call(original)
            except TraceError as stopped:  # some compute in half precision only
                problem = stopped
        assert problem is not None
        raise _not_run(problem) from problem

    def _batch(self, pair: _Pair, rows: int, seed: int = 0) -> tuple[Args, Kwargs]:
        return self.sample.batch(pair.plain, rows, seed)

    def _masked(self, pair: _Pair) -> None:
        """Run with the end of a sequence masked, where the model takes a mask and runs with it."""
        for batch in masked(self.source, *self._batch(pair, 1)):
            way = Way("eval mode with a padding mask", batch)
            if self._same(pair, way, optional=True) is not None:
                if pair.has_attention:
                    self._same(pair, replace(way, fast=False, words=f"{way.words}, fused path off"))
                return

    def _same(self, pair: _Pair, way: Way, *, optional: bool = False) -> Any:
        """Compare conversion and plain layers in one way; return the conversion's output.

        Args:
            optional: return None where the plain layers do not run in this way.

        Raises:
            VerificationError: they differ.
        """
        try:
            expected = way.call(pair.plain)
        except TraceError as problem:
            if optional:
                return None
            raise _not_run(problem) from problem
        try:
            got = way.call(pair.twin)
        except TraceError as problem:
            raise _failed(pair, way, problem) from problem
        self._judge(pair, way, difference(expected, got))
        return got

    def _judge(self, pair: _Pair, way: Way, found: Difference) -> None:
        self.past.append(way)
        if not found.form and found.size <= pair.tolerance:
            return
        note, shown = self._explained(pair, way, found)
        if not note:
            raise _differs(pair, way, shown)
        self.notes.append(note)

    def _explained(self, pair: _Pair, way: Way, found: Difference) -> tuple[str, Difference]:
        """Say how rounding explains a difference, empty where it does not; and return the one that
        tells most of it."""
        blown = (
            f"in {way.words} the model blows rounding up to {found.size:.2g}, with its plain "
            "layers too"
        )
        wide = self._repeated()
        if wide is None:
            rounded = not found.form and pair.is_sensitive(way, found.size)
            return blown if rounded else "", found
        pair, way, exact = wide
        if exact.form:
            return "", exact
        if exact.size <= max(EXACT, SHRUNK * found.size):
            words = f"differ by {found.size:.2g} in float32 and not in float64"
            return f"in {way.words} outputs {words}: rounding decides in this model", exact
        return blown if pair.is_sensitive(way, exact.size) else "", found

    def _repeated(self) -> tuple[_Pair, Way, Difference] | None:
        """Repeat everything on fresh copies in float64, and compare what was compared last; None
        where the model does not run in it."""
        pair = _Pair(self.source, self.converted, self.plan, torch.float64)
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

    def _changed(self, pair: _Pair) -> None:
        """Run once more with other weights and another input: nothing stale may be used."""
        if not pair.names:
            return
        pair.change()
        words = "eval mode on another input, after a change of its weights"
        batch = self.sample.drawn.batch(pair.plain, 1, seed=1)
        self._same(pair, Way(words, batch, changed=True), optional=True)

    def _train(self, pair: _Pair, way: Way) -> tuple[bool, bool]:
        """Run forward and backward in train mode; return whether each could be checked."""
        way = replace(way, training=True)
        kept = _buffers(pair.twin), _buffers(pair.plain)
        try:
            return self._gradients(pair, way)
        finally:
            for model, buffers in zip((pair.twin, pair.plain), kept, strict=True):
                for buffer, value in zip(model.buffers(), buffers, strict=False):
                    if buffer.shape == value.shape:
                        buffer.data.copy_(value)

    def _gradients(self, pair: _Pair, way: Way) -> tuple[bool, bool]:
        try:
            expected = way.call(pair.plain, grad=True)
        except TraceError as problem:
            self.notes.append(
                f"train mode not checked: the source does not run in it on this input "
                f"({problem.found})"
            )
            return False, False
        try:
            got = way.call(pair.twin, grad=True)
        except TraceError as problem:
            raise _failed(pair, way, problem) from problem
        found = difference(expected, got)
        if found.form or found.size > pair.tolerance:
            # A dropout draws in the order of its input's memory, which may be another.
            with _no_dropout(pair.plain), _no_dropout(pair.twin):
                self._judge(pair, way, difference(way.call(pair.plain), way.call(pair.twin)))
        else:
            self._judge(pair, way, found)
        old = _reached(pair.plain, expected)
        if not old:
            self.notes.append("gradients not checked: the source's outputs give none")
            return True, False
        try:
            new = _grads(pair.twin, got)
        except RuntimeError as problem:
            if _backward_fails(pair.plain, expected):
                self.notes.append(f"gradients not checked: the source gives none ({problem})")
                return True, False
            raise _failed(pair, way, problem) from problem
        named = dict(pair.twin.named_parameters())
        frozen = [name for name in self.new if not named[name].requires_grad]
        if frozen:
            self.notes.append(f"{len(frozen)} new parameters are frozen, as in the source")
        twins = {name for name, one in pair.twin.named_modules() if isinstance(one, TWINS)}
        asked = [
            name for name in self.new if name not in frozen and _has_gradient(name, twins, old)
        ]
        if any(name not in new for name in asked):
            # What the graph leads to may get none but zeros, as behind a second derivative.
            old = _grads(pair.plain, expected, zeros=False)
            asked = [name for name in asked if _has_gradient(name, twins, old)]
        without = [name for name in asked if name not in new]
        if without:
            raise _no_gradient(without, asked)
        silent = len(self.new) - len(frozen) - len(asked)
        if silent:
            self.notes.append(
                f"{silent} new parameters get no gradient on this input, as in the source"
            )
        return True, bool(asked)

    def _result(self, found: Change, trained: bool, gradients: bool) -> Verification:
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


class _Pair:
    """Copies of the conversion and of the same weights in plain layers, in one precision."""

    def __init__(
        self, source: nn.Module, converted: nn.Module, plan: Plan, dtype: torch.dtype | None
    ) -> None:
        self.twin = in_dtype(clone(converted, apart=True), dtype)
        self.reference = Reference(source, self.twin, plan, dtype)
        self.names = self.reference.names
        own = dtype or _coarsest(converted)
        self.tolerance = ROUNDING if own in (torch.float32, torch.float64) else COARSE
        kinds = (nn.MultiheadAttention, nn.TransformerEncoderLayer)
        self.has_attention = any(isinstance(one, kinds) for one in converted.modules())

    @property
    def plain(self) -> nn.Module:
        return self.reference.model

    def change(self) -> None:
        """Scale the weights of both alike."""
        self.reference.scale(SCALED)

    def is_sensitive(self, way: Way, size: float) -> bool:
        """Return whether weights that differ by rounding change the outputs about as much."""
        try:
            before = way.call(self.plain)
            with torch.no_grad(), same_draws(1, self.plain):
                kept = [p.clone() for p in self.plain.parameters()]
                for parameter in self.plain.parameters():
                    if parameter.is_floating_point():
                        step = NUDGE * torch.finfo(parameter.dtype).eps
                        parameter.mul_(1 + step * torch.randn_like(parameter))
                found = difference(before, way.call(self.plain))
                for parameter, value in zip(self.plain.parameters(), kept, strict=True):
                    parameter.copy_(value)
        except TraceError:
            return False
        return bool(found.form) or 10 * found.size >= size


def _reached(model: nn.Module, output: Any) -> set[str]:
    """Return the parameters to which the graph of an output leads."""
    names = {id(one): name for name, one in model.named_parameters()}
    todo = [one.grad_fn for one in tensors_in(output) if one.grad_fn is not None]
    known, found = set(todo), set()
    while todo:
        node: Any = todo.pop()
        found.add(names.get(id(getattr(node, "variable", None)), ""))
        parents = {parent for parent, _ in node.next_functions if parent is not None} - known
        known |= parents
        todo.extend(parents)
    return found - {""}


def _grads(model: nn.Module, output: Any, *, zeros: bool = True) -> set[str]:
    """Return the parameters that receive a gradient from an output.

    Args:
        zeros: count those that receive nothing but zeros.

    Raises:
        RuntimeError: the backward pass fails.
    """
    draws = torch.Generator().manual_seed(0)
    parts = []
    for leaf in tensors_in(output):
        if leaf.requires_grad:
            weights = torch.rand(leaf.shape, generator=draws).to(leaf.device)
            real = torch.view_as_real(leaf).sum(-1) if leaf.is_complex() else leaf
            parts.append((real.float() * weights).sum())
    try:
        if parts:
            torch.autograd.backward(torch.stack(parts).sum())
        got = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
        return {name for name, grad in got.items() if zeros or bool(grad.any())}
    finally:
        model.zero_grad(set_to_none=True)


def _backward_fails(model: nn.Module, output: Any) -> bool:
    try:
        _grads(model, output)
    except RuntimeError:
        return True
    return False


def _has_gradient(name: str, twins: set[str], old: set[str]) -> bool:
    """Return whether the plain counterpart of a new parameter receives a gradient."""
    layer, _, own = name.rpartition(".")
    if layer in twins:
        part = "bias" if own.startswith("bias") else "weight"
        return any(one.startswith(f"{layer}.{part}".lstrip(".")) for one in old)
    return name in old


@contextmanager
def _no_dropout(model: nn.Module) -> Iterator[None]:
    """Let nothing fall out, and put the shares back."""
    kept = [(one, one.p) for one in model.modules() if isinstance(one, DropoutBase)]
    for one, _ in kept:
        one.p = 0.0
    try:
        yield
    finally:
        for one, share in kept:
            one.p = share


def _buffers(model: nn.Module) -> list[Tensor]:
    return [one.detach().clone() for one in model.buffers()]


def _coarsest(model: nn.Module) -> torch.dtype | None:
    """Return the floating dtype of a model's parameters that keeps the fewest digits."""
    dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()}
    return max(dtypes, key=lambda one: torch.finfo(one).eps, default=None)


def _wide(model: nn.Module) -> torch.dtype | None:
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


def _failed(pair: _Pair, way: Way, problem: Exception) -> VerificationError:
    where = last_called(pair.twin, way.call)
    found = problem.found if isinstance(problem, TraceError) else f"backward fails: {problem}"
    module = pair.twin.get_submodule(where)
    return VerificationError(
        where=f"{where or 'the model'} ({type(module).__name__}) in {way.words}",
        found=f"{found}, where the same weights in plain layers run",
        allowed="a forward that runs as the source's does",
        fix=_advice(where, module),
    )


def _differs(pair: _Pair, way: Way, found: Difference) -> VerificationError:
    place = parting(pair.plain, pair.twin, way.call, 10 * pair.tolerance)
    module = pair.twin.get_submodule(place.module)
    size = found.form or f"{found.where} differs by {found.size:.2g}"
    return VerificationError(
        where=f"{place.module or 'the model'} ({type(module).__name__}) in {way.words}",
        found=f"{place.words}; {size} from what the same weights in plain layers give",
        allowed="the function that its weights have in plain layers",
        fix=_advice(place.module, module),
    )


def _advice(name: str, module: nn.Module) -> str:
    if isinstance(module, TWINS):
        return f"keep this layer with --exclude '{name}', and please report this model"
    pattern = f"{name}.*" if name else "*"
    return (
        "its forward may ask for the types of its layers, read their weights, or hold on to what "
        f"copies do not reach: keep its layers with --exclude '{pattern}'"
    )


def _no_gradient(without: Sequence[str], asked: Sequence[str]) -> VerificationError:
    return VerificationError(
        where=without[0] if without else "the converted model in train mode",
        found=f"{len(without)} of {len(asked)} new parameters receive no gradient, where their "
        "plain layers do",
        allowed="a gradient wherever the plain layer gets one",
        fix="keep these layers with --exclude",
    )
