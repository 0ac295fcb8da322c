"""Outputs of any structure told apart, and the state of a model as one word."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.zoo.entry import Call, seed_all
from bp_convert.graph.clone import clone

Leaf = tuple[str, Tensor]
# How far two computations of one function may be apart, relative to its norm.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}
DRAWS = 3  # seed of whatever a forward draws
ROUNDINGS = 8  # by which weights are moved, to see how far a model blows rounding up


def leaves(output: Any, path: str = "") -> list[Leaf]:
    """Return all tensors and numbers of an output with the way to each."""
    if isinstance(output, Tensor):
        if output.is_nested:
            return leaves(list(output.unbind()), path)
        plain = output.to_dense() if output.is_sparse else output
        return [(path, torch.view_as_real(plain) if plain.is_complex() else plain)]
    if isinstance(output, bool | int | float):
        return [(path, torch.tensor(output))]
    if isinstance(output, Mapping):
        parts: Any = output.items()
    elif dataclasses.is_dataclass(output) and not isinstance(output, type):
        parts = ((one.name, getattr(output, one.name)) for one in dataclasses.fields(output))
    elif isinstance(output, Sequence) and not isinstance(output, str | bytes):
        parts = enumerate(output)
    elif output is None or isinstance(output, str | bytes | type) or callable(output):
        return []
    else:
        parts = vars(output).items() if hasattr(output, "__dict__") else ()
    return [leaf for key, one in parts for leaf in leaves(one, f"{path}.{key}".lstrip("."))]


def gap(want: Sequence[Leaf], got: Sequence[Leaf]) -> tuple[float, str]:
    """Return the largest relative difference of two outputs, and where it is.

    Floating-point tensors differ by the norm of their difference over their norm; others by the
    share of unequal entries. Another number, shape or place of what is not finite is infinite.
    """
    if [name for name, _ in want] != [name for name, _ in got]:
        return float("inf"), f"{len(want)} outputs against {len(got)}"
    scale = max((float(_finite(one).norm()) for _, one in want), default=0.0)
    worst, place = 0.0, ""
    for (name, one), (_, two) in zip(want, got, strict=True):
        found = _apart(one, two, scale)
        if found > worst or found != found:
            worst, place = found, f"output {name or 'itself'}"
    return worst, place


def _apart(one: Tensor, two: Tensor, scale: float) -> float:
    if one.shape != two.shape or one.dtype != two.dtype:
        return float("inf")
    if not one.is_floating_point():
        return float((one != two).double().mean()) if one.numel() else 0.0
    if not torch.equal(one.isfinite(), two.isfinite()):
        return float("inf")
    one, two = _finite(one), _finite(two)
    # What is rounding beside the other outputs tells nothing by itself.
    size = max(float(one.norm()), 1e-3 * scale, 1e-12)
    return float((one - two).norm()) / size


def _finite(one: Tensor) -> Tensor:
    return torch.where(one.isfinite(), one, 0).double()


def tolerance(outputs: Sequence[Leaf], model: nn.Module | None = None) -> float:
    """Return how far apart the outputs may be: by the coarsest dtype of them and of a model."""
    dtypes = [one.dtype for _, one in outputs]
    if model is not None:
        dtypes += [one.dtype for one in model.parameters()]
    return max((TOLERANCE.get(one, 0.0) for one in dtypes), default=0.0)


def answers(
    model: nn.Module, call: Call, watch: Sequence[str] = ()
) -> tuple[list[Leaf], list[Leaf]]:
    """Run a model in eval mode on a copy of a call, drawing from a seed of its own.

    Returns:
        What it puts out, and what the watched modules did.
    """
    args, kwargs = copy.deepcopy(call)
    seed_all(DRAWS)
    with torch.no_grad(), _watched(model, watch) as seen:
        output = leaves(model(*args, **kwargs))
    return [(name, one.clone()) for name, one in output], seen


def rounded(
    model: nn.Module, call: Call, watch: Sequence[str] = ()
) -> tuple[list[Leaf], list[Leaf]]:
    """Return what a copy answers whose weights are moved by some roundings."""
    copied = clone(model, apart=True)
    draws = torch.Generator().manual_seed(DRAWS)
    with torch.no_grad():
        for one in copied.parameters():
            if one.is_floating_point():
                step = ROUNDINGS * torch.finfo(one.dtype).eps
                one.mul_(1 + step * torch.randn(one.shape, generator=draws).to(one.dtype))
    return answers(copied, call, watch)


@contextmanager
def _watched(model: nn.Module, names: Sequence[str]) -> Iterator[list[Leaf]]:
    seen: list[Leaf] = []
    handles = [
        model.get_submodule(name).register_forward_hook(
            lambda _, inputs, output, name=name: seen.extend(
                (way, one.clone()) for way, one in leaves(output, name)
            )
        )
        for name in names
    ]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def state_of(model: nn.Module) -> str:
    """Return a hash of all that a run or a conversion may leave on a model.

    Every tensor to the bit, plain attributes and containers of tensors included; modes, gradients,
    hooks, and the names of attributes.
    """
    digest = hashlib.sha256()
    for name, module in model.named_modules(remove_duplicate=False):
        hooks = [len(one) for key, one in sorted(vars(module).items()) if key.endswith("_hooks")]
        head = (name, type(module).__qualname__, module.training, hooks, sorted(vars(module)))
        digest.update(repr(head).encode())
        held = {key: one for key, one in vars(module).items() if key != "_modules"}
        for way, tensor in _tensors(held, name, set()):
            digest.update(f"{way}:{tensor.dtype}:{tuple(tensor.shape)}".encode())
            asks = tensor.requires_grad, tensor.grad is None, tensor.device.type
            digest.update(repr(asks).encode())
            if not tensor.is_meta:
                flat = tensor.detach().contiguous().flatten()
                digest.update(flat.view(torch.uint8).numpy() if flat.numel() else b"")
    return digest.hexdigest()[:16]


def _tensors(value: Any, path: str, seen: set[int]) -> Iterator[Leaf]:
    if isinstance(value, Tensor):
        if not (value.is_nested or value.is_sparse or value.is_quantized):
            yield path, value
    elif isinstance(value, Mapping | list | tuple) and id(value) not in seen:
        seen.add(id(value))
        for key, one in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from _tensors(one, f"{path}.{key}", seen)
