"""Where two runs part: the first module whose output, or whose use, differs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bp_convert.graph.tree import tensors_in
from bp_convert.verify.compare import relative

SAMPLE = 4096  # numbers of a tensor that are kept to be compared
Call = Callable[[nn.Module], Any]


@dataclass(frozen=True)
class Event:
    """A module that is called or returns, with samples of what it is given or gives."""

    enters: bool
    name: str
    held: tuple[Tensor, ...]
    shapes: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Parting:
    """Where two runs part.

    Attributes:
        module: the dotted name of the module to look at; empty for the model's own forward.
        words: what differs there.
    """

    module: str
    words: str


def parting(reference: nn.Module, converted: nn.Module, call: Call, tolerance: float) -> Parting:
    """Run both once more and return the first place where they differ by more than rounding.

    Args:
        call: runs a model, with equal draws for both.
    """
    common = {name for name, _ in reference.named_modules()} & {
        name for name, _ in converted.named_modules()
    }
    one, two = _events(reference, common, call), _events(converted, common, call)
    above: list[str] = []
    for old, new in zip(one, two, strict=False):
        parent = above[-1] if above else ""
        if old.enters != new.enters or old.name != new.name:
            return Parting(parent, f"it goes on to {_words(new)} instead of {_words(old)}")
        if not _agree(old, new, tolerance):
            if old.enters:
                return Parting(parent, f"it gives {old.name} another input")
            return Parting(old.name, "its output differs though its input is the same")
        if old.enters:
            above.append(old.name)
        else:
            above.pop()
    if len(one) != len(two):
        which = two[len(one)] if len(two) > len(one) else one[len(two)]
        words = "it goes on to" if len(two) > len(one) else "it does not go on to"
        return Parting(above[-1] if above else "", f"{words} {_words(which)}")
    return Parting("", "its own output differs though all its layers agree")


def last_called(model: nn.Module, call: Call) -> str:
    """Return the innermost module in which a run that fails stops."""
    above: list[str] = []
    handles = []

    def enter(name: str) -> Any:
        return lambda *_: above.append(name)

    def leave(*_: Any) -> None:
        above.pop()

    for name, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(enter(name), prepend=True))
        handles.append(module.register_forward_hook(leave))
    try:
        call(model)
    except Exception:
        return above[-1] if above else ""
    finally:
        for handle in handles:
            handle.remove()
    return ""


def _events(model: nn.Module, names: set[str], call: Call) -> list[Event]:
    found: list[Event] = []
    handles = []

    def entered(name: str) -> Any:
        def hook(_: nn.Module, args: Any, kwargs: Any) -> None:
            found.append(_event(True, name, (args, kwargs)))

        return hook

    def left(name: str) -> Any:
        def hook(_: nn.Module, __: Any, output: Any) -> None:
            found.append(_event(False, name, output))

        return hook

    for name, module in model.named_modules():
        if name and name in names:
            handles.append(
                module.register_forward_pre_hook(entered(name), with_kwargs=True, prepend=True)
            )
            handles.append(module.register_forward_hook(left(name)))
    try:
        call(model)
    except Exception as problem:  # the events up to there tell where
        found.append(Event(True, f"an error ({type(problem).__name__})", (), ()))
    finally:
        for handle in handles:
            handle.remove()
    return found


def _event(enters: bool, name: str, value: Any) -> Event:
    tensors = [_plain(one) for one in tensors_in(value, objects=True)]
    return Event(
        enters,
        name,
        tuple(_sample(one) for one in tensors),
        tuple(tuple(one.shape) for one in tensors),
    )


def _plain(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    if tensor.is_nested:
        return tensor.to_padded_tensor(0.0)
    return tensor if tensor.layout == torch.strided else tensor.to_dense()


def _sample(tensor: Tensor) -> Tensor:
    flat = tensor.reshape(-1)
    return flat[:: max(1, len(flat) // SAMPLE)].clone()


def _agree(old: Event, new: Event, tolerance: float) -> bool:
    return old.shapes == new.shapes and all(
        a.dtype == b.dtype and relative(a, b) <= tolerance
        for a, b in zip(old.held, new.held, strict=True)
    )


def _words(event: Event) -> str:
    return f"{'the call' if event.enters else 'the end'} of {event.name or 'the model'}"
