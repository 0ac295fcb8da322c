"""Example inputs of an export: drawn at any batch and length, and which axes the graph leaves free.

The first axis of each input is the batch. The second is a sequence where the input holds token ids
(T) or rows of features (T, F); where the model does not run at another length, it is fixed.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from bp_convert.errors import BpConvertError, ExportError
from bp_convert.fakes.inputs import infer_input, runs, settle
from bp_convert.graph.example import SampleInputs
from bp_convert.graph.running import Args, Kwargs
from bp_convert.values.tensors import TensorSpec

BATCH = "batch"
EXAMPLE = 2  # examples in the batch that is traced: an axis of 1 would be taken for a constant


@dataclass(frozen=True)
class FreeAxes:
    """What a model takes, and which axes may have any length.

    Attributes:
        specs: of one example.
        lengths: of the sequences in the inputs that may have any; empty where all are fixed.
        notes: why a sequence is fixed.
        most: examples in a batch, where there is a limit; sequences then grow fourfold at most.
        bounds: of axes that the model itself limits: name, least and largest.
    """

    specs: tuple[TensorSpec, ...]
    lengths: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()
    most: int | None = None
    bounds: tuple[tuple[str, int | None, int | None], ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the free axes."""
        return (BATCH, *(self._name(one) for one in self.lengths))

    @property
    def words(self) -> tuple[str, ...]:
        """The free axes with their limits."""
        said = []
        for name in self.names:
            low, high = self._limits(name)
            least = "" if low is None else f" from {low}"
            said.append(f"{name}{least}" + ("" if high is None else f" up to {high}"))
        return tuple(said)

    def within(self, bounds: Mapping[str, tuple[int | None, int | None]]) -> FreeAxes:
        """The same with axes that have a least and a largest length."""
        return replace(self, bounds=tuple((name, *both) for name, both in bounds.items()))

    def _limits(self, name: str) -> tuple[int | None, int | None]:
        for one, low, high in self.bounds:
            if one == name:
                return low, high
        if self.most is None or name == BATCH:
            return None, self.most
        return None, 4 * next(one for one in self.lengths if self._name(one) == name)

    def fixed(self, why: str) -> FreeAxes:
        """The same with sequences of one length only."""
        return replace(self, lengths=(), notes=(*self.notes, f"sequences are fixed: {why}"))

    def draw(
        self, model: nn.Module, rows: int, *, shorter: bool = False, seed: int = 0
    ) -> tuple[Args, Kwargs]:
        """Draw a batch in the form that the model takes.

        Args:
            shorter: with other lengths of the free sequences.
        """
        specs = [self._shorter(one) for one in self.specs] if shorter else self.specs
        return SampleInputs(tuple(specs)).batch(model, rows, seed=seed)

    def shapes(self, model: nn.Module, args: Args, kwargs: Kwargs) -> Any:
        """Return the free axes as ``torch.export`` wants them: by the names of forward."""
        dims: dict[str, Any] = {}
        for name in self.names:
            low, high = self._limits(name)
            dims[name] = torch.export.Dim(name, min=low, max=high)
        plain = [one for one in self.specs if one.name is None]
        named = {one.name: one for one in self.specs if one.name is not None}
        if not kwargs:
            return tuple(self._of(one, dims) for one in plain)
        parameters = inspect.signature(model.forward).parameters.values()
        places = [one.name for one in parameters if one.kind is not one.VAR_KEYWORD]
        found: dict[str, Any] = {
            name: self._of(one, dims) for name, one in zip(places, plain, strict=False)
        }
        rest: dict[str, Any] = {}
        for name, one in named.items():
            (found if name in places else rest)[str(name)] = self._of(one, dims)
        if rest:  # what forward takes as **kwargs
            found[next(one.name for one in parameters if one.kind is one.VAR_KEYWORD)] = rest
        return found

    def shown(self) -> tuple[str, ...]:
        """Write each input with the names of its free axes."""
        said = []
        for place, one in enumerate(self.specs):
            sizes = [
                self._name(n) if self._free(one, at) else str(n) for at, n in enumerate(one.shape)
            ]
            said.append(f"{one.name or f'input {place}'} {one.dtype} {' x '.join([BATCH, *sizes])}")
        return tuple(said)

    def _name(self, length: int) -> str:
        place = self.lengths.index(length)
        return f"sequence_{place + 1}" if place else "sequence"

    def _free(self, spec: TensorSpec, axis: int) -> bool:
        return axis == 0 and _has_sequence(spec) and spec.shape[0] in self.lengths

    def _of(self, spec: TensorSpec, dims: dict[str, Any]) -> dict[int, Any]:
        free = {0: dims[BATCH]}
        if self._free(spec, 0):
            free[1] = dims[self._name(spec.shape[0])]
        return free

    def _shorter(self, spec: TensorSpec) -> TensorSpec:
        if not self._free(spec, 0):
            return spec
        length = max(2, spec.shape[0] * 3 // 4)
        return spec.model_copy(update={"shape": (length, *spec.shape[1:])})


def _has_sequence(spec: TensorSpec) -> bool:
    whole = spec.dtype.startswith(("int", "bool"))
    return bool(spec.shape) and spec.shape[0] > 2 and len(spec.shape) == (1 if whole else 2)


def free_axes(
    model: nn.Module,
    inputs: Sequence[TensorSpec],
    *,
    given: bool,
    sequences: bool = True,
    most: int | None = None,
) -> FreeAxes:
    """Find out on what a model is exported, and which of its axes are free.

    Args:
        inputs: described; those of its plan, or empty to infer them.
        given: the user described them.
        sequences: let them have any length where the model runs at another.
        most: examples in a batch, where there is a limit.

    Raises:
        ExportError: no input is known.
        TraceError: the model does not run on those that were given.
    """
    specs = tuple(inputs)
    notes: tuple[str, ...] = ()
    if given:
        specs = settle(model, specs).specs
    elif not specs:
        guess = infer_input(model)
        if guess is None:
            raise ExportError(
                where=type(model).__name__,
                found="no example input that the model runs on",
                allowed="a described input, which the graph is traced with",
                fix="describe it with --input (inputs= in Python), such as --input 3x224x224 or "
                "tokens=int64:1x16<30000",
            )
        specs, words = guess
        notes = (f"assumed {words}",)
    found = FreeAxes(specs, notes=notes, most=most)
    lengths = tuple(dict.fromkeys(one.shape[0] for one in specs if _has_sequence(one)))
    if not lengths or not sequences:
        return found
    free = replace(found, lengths=lengths)
    other = SampleInputs(tuple(map(free._shorter, specs)))
    with suppress(BpConvertError):
        if runs(model, other):
            return free
    return found.fixed(f"the model does not run at another length than {lengths[0]}")
