"""Whether data fits the inputs that a model takes: names, kinds of numbers, shapes, ranges."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from bp_convert.data.dataset import Batch
from bp_convert.errors import DataError
from bp_convert.graph.example import OPTIONAL
from bp_convert.graph.running import Args, Kwargs
from bp_convert.graph.tree import map_tensors, rows_in, tensors_in
from bp_convert.values.tensors import TensorSpec

Accepts = Callable[[TensorSpec, tuple[int, ...]], bool]
LABELS = ("labels", "label", "targets", "y")


def assign(
    names: Sequence[str], specs: Sequence[TensorSpec], where: str
) -> tuple[dict[str, str | None], str | None]:
    """Say what each named array is to the model.

    Args:
        names: names of the arrays.
        specs: inputs of the model; empty where nothing is known of it.
        where: the source, for errors.

    Returns:
        For each array that is an input its keyword, or None for a positional argument, in the
        order of forward; and the name of the labels, or None.

    Raises:
        DataError: an input is missing, or an array is neither an input nor the labels.
    """
    wanted = [spec.name for spec in specs]
    labels = next((one for one in LABELS if one in names and one not in wanted), None)
    if len(names) == 1 and labels is not None:
        labels = None  # the only array is the input, whatever it is called
    inputs = [one for one in names if one != labels]
    if len(inputs) == 1 and len(specs) <= 1:
        return {inputs[0]: wanted[0] if specs else None}, labels
    unnamed = _by_position(inputs)
    if not specs:
        named = {one: one for one in inputs if one not in unnamed}
        return {**dict.fromkeys(unnamed), **named}, labels
    found: dict[str, str | None] = {}
    for name in wanted:
        if name not in inputs and not unnamed:
            raise _misnamed(names, specs, where)
        found[name if name is not None and name in inputs else unnamed.pop(0)] = name
    found.update({one: one for one in inputs if one in OPTIONAL})
    if set(inputs) - set(found):
        raise _misnamed(names, specs, where)
    return found, labels


def _by_position(names: Sequence[str]) -> list[str]:
    """Return the names that end in a number, as numpy's ``arr_0`` do, in its order."""
    numbers = {one: one.removeprefix("arr_") for one in names}
    counted = [one for one in names if numbers[one].isdecimal()]
    return sorted(counted, key=lambda one: int(numbers[one]))


def _misnamed(names: Sequence[str], specs: Sequence[TensorSpec], where: str) -> DataError:
    wanted = " and ".join(str(spec) for spec in specs)
    return DataError(
        where=where,
        found=f"arrays {', '.join(names)}",
        allowed=f"one array for each input ({wanted}), and one named {', '.join(LABELS[:-1])} or "
        f"{LABELS[-1]} for the labels",
        fix="name the arrays as forward's arguments (arr_0, arr_1, ... for those without a name) "
        "and leave out the others",
    )


def fit_batch(
    args: Args,
    kwargs: Kwargs,
    specs: Sequence[TensorSpec],
    where: str,
    accepts: Accepts | None = None,
) -> Batch:
    """Check a batch against the model's inputs, and give each tensor the dtype of its input.

    Args:
        accepts: tells whether the model runs where an input has another shape than described.

    Returns:
        The batch, contiguous.

    Raises:
        DataError: another number of inputs, another shape, integers for floating-point numbers or
            the other way round, ids out of range, values that are not finite, or no example.
    """
    positional = [spec for spec in specs if spec.name is None]
    named = {spec.name: spec for spec in specs if spec.name is not None}
    if specs and (len(args) != len(positional) or set(named) - set(kwargs)):
        got = [*(f"#{i + 1}" for i in range(len(args))), *kwargs]
        raise DataError(
            where=where,
            found=f"inputs {', '.join(got) or 'none'}",
            allowed=" and ".join(str(spec) for spec in specs),
            fix="give one array for each input: several named ones go into a .npz file",
        )
    fitted_args = tuple(
        _fit(value, positional[i] if specs else None, f"{where}, input {i + 1}", accepts)
        for i, value in enumerate(args)
    )
    fitted = {
        key: _fit(one, named.get(key), f"{where}, {key}", accepts) for key, one in kwargs.items()
    }
    sizes = {str(key): rows_in(t) for key, t in [*enumerate(fitted_args, 1), *fitted.items()]}
    if len(set(sizes.values())) != 1 or 0 in sizes.values():
        raise DataError(
            where=where,
            found=f"numbers of examples {', '.join(f'{k}: {n}' for k, n in sizes.items())}",
            allowed="the same number, at least 1, in each input",
            fix="put the examples on the first axis of every array",
        )
    return fitted_args, fitted


def shaped(specs: Sequence[TensorSpec], batch: Batch) -> tuple[TensorSpec, ...]:
    """Return descriptions of inputs in the shapes that a batch has."""
    args = iter(batch[0])
    values = [next(args) if one.name is None else batch[1][one.name] for one in specs]
    return tuple(
        one.model_copy(update={"shape": tuple(value.shape[1:])})
        if isinstance(value, Tensor)
        else one
        for one, value in zip(specs, values, strict=True)
    )


def _fit(value: object, spec: TensorSpec | None, where: str, accepts: Accepts | None) -> Any:
    held = [] if isinstance(value, Tensor) else tensors_in(value, objects=True)
    if held:  # a list of pictures, a packed sequence, a dataclass: as the model takes it
        for one in held:
            _check_finite(one, where)
        return map_tensors(lambda t: t.detach().cpu(), value)
    if not isinstance(value, Tensor) or value.dim() == 0:
        kind = "a single number" if isinstance(value, Tensor) else type(value).__name__
        raise DataError(
            where=where,
            found=kind,
            allowed="an array with the examples on its first axis",
            fix="turn it into a tensor; images need transforms.ToTensor()",
        )
    tensor = value.detach().cpu()
    if spec is not None:
        _check_shape(tensor, spec, where, accepts)
        tensor = _cast(tensor, spec, where)
    _check_finite(tensor, where)
    if spec is not None and not tensor.is_floating_point() and tensor.dtype != torch.bool:
        _check_range(tensor, spec, where)
    return tensor.contiguous()


def _check_finite(tensor: Tensor, where: str) -> None:
    if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
        bad = int((~torch.isfinite(tensor)).sum())
        raise DataError(
            where=where,
            found=f"{bad:,} of {tensor.numel():,} values of a batch are NaN or infinite",
            allowed="finite numbers",
            fix="remove or mend those examples",
        )


def _check_shape(tensor: Tensor, spec: TensorSpec, where: str, accepts: Accepts | None) -> None:
    shape = tuple(tensor.shape[1:])
    # Token ids: the example's length is one of many that the model takes.
    free = len(spec.shape) == 1 and "int" in spec.dtype and len(shape) == 1
    if shape == spec.shape or (free and shape[0] > 0):
        return
    # Frames of sound, sizes of pictures: as many axes, and the model runs on them.
    if len(shape) == len(spec.shape) and accepts is not None and accepts(spec, shape):
        return
    raise DataError(
        where=where,
        found=f"examples of shape {_words(shape)}",
        allowed=f"{_words(spec.shape)}, the model's input {spec}",
        fix=f"resize the data to {_words(spec.shape)}, or, if the model takes {_words(shape)}, "
        f"say so: --input {spec.model_copy(update={'shape': shape})}",
    )


def _words(shape: Sequence[int]) -> str:
    return "x".join(str(n) for n in shape) or "one number"


def _cast(tensor: Tensor, spec: TensorSpec, where: str) -> Tensor:
    dtype: torch.dtype = getattr(torch, spec.dtype)
    if dtype.is_floating_point == tensor.is_floating_point() and not tensor.is_complex():
        return tensor.to(dtype)
    fix = "save them as integers, or describe the input as it is with --input"
    if dtype.is_floating_point:
        fix = "convert and scale them as in training, such as array.astype('float32') / 255"
    raise DataError(
        where=where,
        found=f"{str(tensor.dtype).removeprefix('torch.')} values",
        allowed=f"{spec.dtype}, the model's input {spec}",
        fix=fix,
    )


def _check_range(tensor: Tensor, spec: TensorSpec, where: str) -> None:
    if tensor.numel() == 0 or spec.high is None:
        return
    low, top = int(tensor.min()), int(tensor.max())
    if low < 0 or top >= spec.high:
        raise DataError(
            where=where,
            found=f"ids from {low} to {top}",
            allowed=f"0 to {spec.high - 1}, what the model's word table holds",
            fix="the tokenizer does not fit the model: take the one the model was trained with",
        )
