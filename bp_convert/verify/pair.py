"""A conversion beside the same weights in plain layers, as copies in one precision; and the words
for how they part."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from bp_convert.errors import TraceError, VerificationError
from bp_convert.graph.clone import clone
from bp_convert.graph.running import same_draws
from bp_convert.kinds import is_twin
from bp_convert.torch_private import DropoutBase
from bp_convert.values.plan import Plan
from bp_convert.verify.compare import Difference, difference
from bp_convert.verify.reference import Reference, in_dtype
from bp_convert.verify.trace import last_called, parting
from bp_convert.verify.way import Way

ROUNDING = 1e-4  # relative difference of outputs up to which float32 explains it
COARSE = 5e-2  # and in half precision, where a model computes in nothing else
SCALED = 1.05  # by which factors are changed, to see that nothing stale is used
NUDGE = 8  # roundings by which weights are moved, to see whether a model blows them up


class Pair:
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


def _coarsest(model: nn.Module) -> torch.dtype | None:
    """Return the floating dtype of a model's parameters that keeps the fewest digits."""
    dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()}
    return max(dtypes, key=lambda one: torch.finfo(one).eps, default=None)


def failed(pair: Pair, way: Way, problem: Exception) -> VerificationError:
    where = last_called(pair.twin, way.call)
    found = problem.found if isinstance(problem, TraceError) else f"backward fails: {problem}"
    module = pair.twin.get_submodule(where)
    return VerificationError(
        where=f"{where or 'the model'} ({type(module).__name__}) in {way.words}",
        found=f"{found}, where the same weights in plain layers run",
        allowed="a forward that runs as the source's does",
        fix=_advice(where, module),
    )


def differs(pair: Pair, way: Way, found: Difference) -> VerificationError:
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
    if is_twin(module):
        return f"keep this layer with --exclude '{name}', and please report this model"
    pattern = f"{name}.*" if name else "*"
    return (
        "its forward may ask for the types of its layers, read their weights, or hold on to what "
        f"copies do not reach: keep its layers with --exclude '{pattern}'"
    )
