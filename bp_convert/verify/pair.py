"""A conversion beside the same weights in plain layers, as copies in one precision; and the words
for how they part."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from bp_convert.errors import TraceError, VerificationError
from bp_convert.graph.clone import all_weights, clone, plain_clone
from bp_convert.graph.reshape import cast
from bp_convert.graph.running import same_draws
from bp_convert.graph.walk import walk
from bp_convert.kinds import is_twin
from bp_convert.torch_private import DropoutBase
from bp_convert.values.plan import Plan
from bp_convert.verify.compare import Difference, difference
from bp_convert.verify.sketch import sketch_of
from bp_convert.verify.trace import last_called, parting
from bp_convert.verify.way import Way

ROUNDING = 1e-4  # relative difference of outputs up to which float32 explains it
COARSE = 5e-2  # and in half precision, where a model computes in nothing else
SCALED = 1.05  # by which factors are changed, to see that nothing stale is used
NUDGE = 8  # roundings by which weights are moved, to see whether a model blows them up


class Pair:
    """Copies of the conversion and of the same weights in plain layers, in one precision.

    Where no width has changed the latter is a copy of the source itself, with its own layers, hooks
    and caches, given the weights that the bilinear layers stand for; a layer that computes its
    weight is a plain one there. A widened model has no such counterpart; its own bilinear layers
    are then exchanged for plain ones. Where those are large, ``sketched`` builds no weights
    (``verify.sketch``). That they agree is as good a sign as of the weights themselves; where they
    do not, or do not run, it may lie in a forward that looks at a weight, and the weights tell.

    Attributes:
        twin: the conversion.
        plain: the same weights in plain layers.
        layers: the bilinear layers of ``twin`` by name.
        sketches: what plain layers without a weight answer, by name; empty where all have theirs.
    """

    def __init__(
        self,
        source: nn.Module,
        converted: nn.Module,
        plan: Plan,
        dtype: torch.dtype | None,
        *,
        sketched: bool = False,
    ) -> None:
        self.twin = in_dtype(clone(converted, apart=True), dtype)
        self.layers: dict[str, Any] = {
            layer.name: self.twin.get_submodule(layer.name) for layer in plan.converted
        }
        made = {one: sketch_of(one) for one in self.layers.values()} if sketched else {}
        self.sketches = {name: one for name in self.layers if (one := made.get(self.layers[name]))}
        if is_widened(plan):
            given = {one: sketch.layer for one, sketch in made.items() if sketch is not None}
            self.plain = plain_clone(self.twin, apart=True, given=given)
        else:
            self.plain = in_dtype(clone(source, stand_ins(source, plan), apart=True), dtype)
            self._take_over()
        self.tolerance = tolerance_of(converted, dtype)
        kinds = (nn.MultiheadAttention, nn.TransformerEncoderLayer)
        self.has_attention = any(isinstance(one, kinds) for one in converted.modules())

    @torch.no_grad()
    def _take_over(self) -> None:
        """Take the weights of the conversion over into plain layers, a layer at a time."""
        ours = all_weights(self.plain)
        for name, tensor in all_weights(self.twin).items():
            _copy(tensor, ours.get(name))
        for name, twin in self.layers.items():
            if name in self.sketches:
                self.sketches[name].take(twin)
                continue
            for key, tensor in twin.to_dense().named_parameters():
                own = f"{name}.{key}" if name else key  # the model itself may be the layer
                own = own if own in ours else name  # a bare parameter
                _copy(tensor, ours.get(own))

    def check_sketches(self, way: Way) -> None:
        """Check that what layers without a weight gave so far is what their weights give.

        Raises:
            VerificationError: it is not.
        """
        for name, one in self.sketches.items():
            if not one.error <= self.tolerance:
                found = f"sums of its outputs differ by {one.error:.2g} from its weight's"
                raise _error(self, way, name, found, "the outputs that its weight gives")

    @torch.no_grad()
    def change(self) -> None:
        """Scale the factors and biases in place, and take the weights that they then stand for
        over into plain layers."""
        parts = [one for twin in self.layers.values() for one in twin.parameters()]
        for tensor in {id(one): one for one in parts}.values():
            tensor.mul_(SCALED)
        self._take_over()

    def is_sensitive(self, way: Way, size: float) -> bool:
        """Return whether weights that differ by rounding change the outputs about as much."""
        moved = clone(self.plain, apart=True)
        with torch.no_grad(), same_draws(1, moved):
            for parameter in moved.parameters():
                if parameter.is_floating_point():
                    step = NUDGE * torch.finfo(parameter.dtype).eps
                    parameter.mul_(1 + step * torch.randn_like(parameter))
        try:
            found = difference(way.call(self.plain), way.call(moved))
        except TraceError:
            return False
        return bool(found.form) or 10 * found.size >= size

    @contextmanager
    def buffers_kept(self) -> Iterator[None]:
        """Put back what a run in train mode writes to buffers."""
        kept = [(m, [one.detach().clone() for one in m.buffers()]) for m in (self.twin, self.plain)]
        try:
            yield
        finally:
            for model, buffers in kept:
                for buffer, value in zip(model.buffers(), buffers, strict=False):
                    if buffer.shape == value.shape:
                        buffer.data.copy_(value)

    @contextmanager
    def no_dropout(self) -> Iterator[None]:
        """Let nothing fall out in either, and put the shares back."""
        modules = [*self.twin.modules(), *self.plain.modules()]
        kept = [(one, one.p) for one in modules if isinstance(one, DropoutBase)]
        for one, _ in kept:
            one.p = 0.0
        try:
            yield
        finally:
            for one, share in kept:
                one.p = share


def stand_ins(source: nn.Module, plan: Plan) -> dict[nn.Module, nn.Module]:
    """Return the plain layers of those replaced ones that compute their weights, by the latter."""
    replaced = {layer.name for layer in plan.converted}
    sites = [one for one in walk(source) if one.name in replaced]
    return {one.held: one.module for one in sites if not one.plain}


def in_dtype(model: nn.Module, dtype: torch.dtype | None) -> nn.Module:
    """Return a model, cast in place where a dtype is asked for."""
    if dtype is not None:
        cast(model, dtype)
    return model


def is_widened(plan: Plan) -> bool:
    """Return whether a plan changes a width."""
    layers = any(one.before != one.after for one in plan.layers)
    return layers or any(one.before != one.after for one in plan.resizes)


def _copy(old: Tensor, new: Tensor | None) -> None:
    """Copy a tensor onto its counterpart where that has its shape."""
    if new is not None and new.shape == old.shape and new.is_floating_point():
        new.copy_(old)


def tolerance_of(model: nn.Module, dtype: torch.dtype | None = None) -> float:
    """Return the relative difference of outputs that rounding explains.

    Args:
        dtype: that the model computes in, where that is not its parameters'.
    """
    own = dtype or _coarsest(model)
    return ROUNDING if own in (torch.float32, torch.float64) else COARSE


def _coarsest(model: nn.Module) -> torch.dtype | None:
    """Return the floating dtype of a model's parameters that keeps the fewest digits."""
    dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()}
    return max(dtypes, key=lambda one: torch.finfo(one).eps, default=None)


def failed(pair: Pair, way: Way, problem: Exception) -> VerificationError:
    found = problem.found if isinstance(problem, TraceError) else f"backward fails: {problem}"
    return _error(
        pair,
        way,
        last_called(pair.twin, way.call),
        f"{found}, where the same weights in plain layers run",
        "a forward that runs as the source's does",
    )


def differs(pair: Pair, way: Way, found: Difference) -> VerificationError:
    where, words = parting(pair.plain, pair.twin, way.call, 10 * pair.tolerance)
    size = found.form or f"{found.where} differs by {found.size:.2g}"
    return _error(
        pair,
        way,
        where,
        f"{words}; {size} from what the same weights in plain layers give",
        "the function that its weights have in plain layers",
    )


def _error(pair: Pair, way: Way, where: str, found: str, allowed: str) -> VerificationError:
    module = pair.twin.get_submodule(where)
    pattern = f"{where}.*" if where else "*"
    fix = (
        f"keep this layer with --exclude '{where}', and please report this model"
        if is_twin(module)
        else "its forward may ask for the types of its layers, read their weights, or hold on to "
        f"what copies do not reach: keep its layers with --exclude '{pattern}'"
    )
    return VerificationError(
        where=f"{where or 'the model'} ({type(module).__name__}) in {way.words}",
        found=found,
        allowed=allowed,
        fix=fix,
    )
