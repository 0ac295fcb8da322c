"""Example inputs: drawn from their description, or taken from what the user gave."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from bp_convert.graph.running import Args, Kwargs
from bp_convert.graph.tree import children, map_tensors, rows_in
from bp_convert.kinds import table_rows
from bp_convert.values.tensors import TensorSpec

# What a tokenizer adds of its own accord; a forward that has no such argument goes without.
OPTIONAL = ("attention_mask", "token_type_ids")
GIVEN = "the inputs given"
_FLOATS = ("float64", "float32", "float16", "bfloat16")
_KNOWN = (*_FLOATS, "int64", "int32", "bool", "uint8")


@dataclass(frozen=True)
class SampleInputs:
    """Where a model's example inputs come from.

    Attributes:
        specs: what they look like; empty where they are no plain tensors.
        given: real ones, (args, kwargs) with the examples on the first axis of each tensor; None
            where they are drawn.
        words: what was assumed, or what they are.
        origin: what is compared on them is compared on, in words.
        whole: the real ones are always taken together: the model takes no part of them.
    """

    specs: tuple[TensorSpec, ...] = ()
    given: tuple[Args, Kwargs] | None = None
    words: str = ""
    origin: str = "random input"
    whole: bool = False

    def __bool__(self) -> bool:
        return bool(self.specs) or self.given is not None

    @property
    def real(self) -> bool:
        """Whether they are the user's own."""
        return self.given is not None

    @property
    def drawn(self) -> SampleInputs:
        """The same drawn from its description, in any number; itself where there is none."""
        return SampleInputs(self.specs, words=self.words) if self.specs else self

    @property
    def count(self) -> int:
        """Number of real examples; what the model takes as a whole is one."""
        rows = 0 if self.given is None else rows_in(self.given)
        return min(rows, 1) if self.whole else rows

    def batch(
        self, model: nn.Module, rows: int, seed: int = 0, device: torch.device | str | None = None
    ) -> tuple[Args, Kwargs]:
        """Return a batch in the form that ``model`` takes, on its device or another.

        Of real examples at most ``rows``, always copies; of packed sequences, and of what the
        model takes no part of, all there are.
        """
        device = device_of(model) if device is None else device
        if self.given is not None:
            some = self.given if self.whole else first_rows(self.given, rows)
            return adapt(model, *some, device=device)
        return make_inputs(model, self.specs, batch=rows, seed=seed, device=device)


def make_inputs(
    model: nn.Module,
    specs: Sequence[TensorSpec],
    *,
    batch: int,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> tuple[Args, Kwargs]:
    """Draw inputs that fit ``specs``: normal numbers, or integers within the bounds.

    Floating-point inputs take the model's own floating dtype where ``specs`` says float32, so
    that a half-precision model gets what it accepts.
    """
    generator = torch.Generator().manual_seed(seed)
    own = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    bound = smallest_vocabulary(model)
    args: list[Tensor] = []
    kwargs: Kwargs = {}
    for spec in specs:
        tensor = _draw(spec, batch, bound, own, generator).to(device)
        if spec.name is None:
            args.append(tensor)
        else:
            kwargs[spec.name] = tensor
    return tuple(args), kwargs


def _draw(
    spec: TensorSpec, batch: int, bound: int, own: torch.dtype, generator: torch.Generator
) -> Tensor:
    shape = (batch, *spec.shape)
    dtype = getattr(torch, spec.dtype)
    if dtype.is_floating_point:
        drawn = torch.randn(shape, generator=generator)
        return drawn.to(own if spec.dtype == "float32" else dtype)
    if dtype == torch.bool:
        return torch.ones(shape, dtype=dtype)
    high = spec.high or max(bound, spec.low + 1)
    return torch.randint(spec.low, high, shape, generator=generator).to(dtype)


def smallest_vocabulary(model: nn.Module) -> int:
    """Return a bound for indices that every table of the model admits."""
    return min((rows for _, rows in tables(model)), default=2)


def tables(model: nn.Module) -> list[tuple[nn.Module, int]]:
    """Return the modules that look indices up, with the number of their rows."""
    found = ((one, table_rows(one)) for one in model.modules())
    return [(one, rows) for one, rows in found if rows is not None]


def device_of(model: nn.Module) -> torch.device:
    """Return the device of a model's first parameter, else of its first buffer."""
    held = (*model.parameters(), *model.buffers())
    return next((one.device for one in held), torch.device("cpu"))


def adapt(
    model: nn.Module, args: Args, kwargs: Kwargs, *, device: torch.device | str | None = None
) -> tuple[Args, Kwargs]:
    """Copy a batch into the form that a model takes.

    Tensors move to the device of the model's first parameter or to another, and float32 ones take
    its dtype, so that a half-precision model gets what it accepts. ``attention_mask`` and
    ``token_type_ids`` are left out where forward has no such argument. Always a copy: a forward
    that works in place leaves the examples as they are.
    """
    first = next((p for p in model.parameters() if p.is_floating_point()), None)
    place = device_of(model) if device is None else device
    own = torch.float32 if first is None else first.dtype

    def moved(tensor: Tensor) -> Tensor:
        dtype = own if tensor.dtype == torch.float32 else tensor.dtype
        return tensor.to(place, dtype, copy=True)

    parameters = inspect.signature(model.forward).parameters
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    kept = {
        key: value
        for key, value in kwargs.items()
        if takes_any or key in parameters or key not in OPTIONAL
    }
    there: tuple[Args, Kwargs] = map_tensors(moved, (args, kept))
    return there


def given_sample(inputs: Any) -> SampleInputs:
    """Turn example inputs that are values into a sample: what forward is called with.

    Args:
        inputs: a mapping by forward's keywords; a list or tuple of its positional inputs; or its
            only input, of whatever structure.
    """
    given: tuple[Args, Kwargs] = ((inputs,), {})
    if isinstance(inputs, dict):
        given = ((), dict(inputs))
    elif isinstance(inputs, list | tuple) and not hasattr(inputs, "_fields"):
        given = (tuple(inputs), {})  # a named tuple, such as a PackedSequence, is one input
    return SampleInputs(specs_of_batch(*given), given, f"{rows_in(given)} given examples", GIVEN)


def specs_of_batch(args: Args, kwargs: Kwargs) -> tuple[TensorSpec, ...]:
    """Describe a batch; nothing where it is more than plain tensors of as many examples."""
    named: list[tuple[str | None, Any]] = [*((None, one) for one in args), *kwargs.items()]
    rows = rows_in((args, kwargs))
    found: list[TensorSpec] = []
    for name, one in named:
        dtype = str(getattr(one, "dtype", "")).removeprefix("torch.")
        if not isinstance(one, Tensor) or not one.dim() or one.shape[0] != rows:
            return ()
        if dtype not in _KNOWN or 0 in one.shape[1:]:
            return ()
        bounds = {}
        if dtype not in (*_FLOATS, "bool") and one.numel():
            if int(one.min()) < 0:
                return ()
            bounds = {"low": int(one.min()), "high": int(one.max()) + 1}
        shape = tuple(one.shape[1:])
        found.append(
            TensorSpec.model_validate({"name": name, "dtype": dtype, "shape": shape, **bounds})
        )
    return tuple(found)


def first_rows(given: tuple[Args, Kwargs], rows: int) -> tuple[Args, Kwargs]:
    """Return the first examples of a batch; all of it where it holds packed sequences."""
    total = rows_in(given)
    if rows >= total or _holds_packed(given):
        return given

    def cut(value: Any) -> Any:
        if isinstance(value, list) and len(value) == total:
            return value[:rows]
        if isinstance(value, Mapping):
            return {key: cut(one) for key, one in value.items()} if type(value) is dict else value
        if isinstance(value, Tensor):
            return value[:rows] if value.dim() and value.shape[0] == total else value
        return map_tensors(cut, value)

    args, kwargs = given
    return tuple(cut(one) for one in args), {key: cut(one) for key, one in kwargs.items()}


def _holds_packed(value: Any) -> bool:
    inside = (one for _, one in children(value, objects=False))
    return isinstance(value, PackedSequence) or any(map(_holds_packed, inside))
