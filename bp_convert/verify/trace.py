"""Where two runs part: the first module whose output, or whose use, differs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from torch import Tensor, nn

from bp_convert.graph.tree import tensors_in
from bp_convert.verify.compare import relative, strided

SAMPLE = 4096  # numbers of a tensor that are kept to be compared
Call = Callable[[nn.Module], Any]


@dataclass(frozen=True)
class Event:
    """A module that is called or returns, with samples of what it is given or gives."""

    enters: bool
    name: str
    held: tuple[Tensor, ...]
    shapes: tuple[tuple[int, ...], ...]


def parting(
    reference: nn.Module, converted: nn.Module, call: Call, tolerance: float
) -> tuple[str, str]:
    """Run both once more and find the first place where they differ by more than rounding.

    Args:
        call: runs a model, with equal draws for both.

    Returns:
        The dotted name of the module to look at, empty for the model's own forward; and words for
        what differs there.
    """
    common = {name for name, _ in reference.named_modules()} & {
        name for name, _ in converted.named_modules()
    }
    one, two = _events(reference, common, call), _events(converted, common, call)
    above: list[str] = []
    for old, new in zip_longest(one, two):
        parent = above[-1] if above else ""
        if old is None:
            return parent, f"it goes on to {_words(new)}"
        if new is None:
            return parent, f"it does not go on to {_words(old)}"
        if old.enters != new.enters or old.name != new.name:
            return parent, f"it goes on to {_words(new)} instead of {_words(old)}"
        if not _agree(old, new, tolerance):
            if old.enters:
                return parent, f"it gives {old.name} another input"
            return old.name, "its output differs though its input is the same"
        if old.enters:
            above.append(old.name)
        else:
            above.pop()
    return "", "its own output differs though all its layers agree"


def last_called(model: nn.Module, call: Call) -> str:
    """Return the innermost module in which a run that fails stops."""
    events = _events(model, {name for name, _ in model.named_modules()}, call)
    above: list[str] = []
    if events and events[-1].enters:  # the error
        for event in events[:-1]:
            if event.enters:
                above.append(event.name)
            else:
                above.pop()
    return above[-1] if above else ""


def _events(model: nn.Module, names: set[str], call: Call) -> list[Event]:
    found: list[Event] = []

    def hook_for(name: str, enters: bool) -> Any:
        def hook(_: nn.Module, *values: Any) -> None:
            held = values if enters else values[-1]  # args and kwargs; or after args the output
            tensors = [strided(one) for one in tensors_in(held, objects=True)]
            shapes = tuple(tuple(one.shape) for one in tensors)
            found.append(Event(enters, name, tuple(map(_sample, tensors)), shapes))

        return hook

    handles = []
    for name, module in model.named_modules():
        if name and name in names:
            enter = module.register_forward_pre_hook(
                hook_for(name, True), with_kwargs=True, prepend=True
            )
            handles += [enter, module.register_forward_hook(hook_for(name, False))]
    try:
        call(model)
    except Exception as problem:  # the events up to there tell where
        found.append(Event(True, f"an error ({type(problem).__name__})", (), ()))
    finally:
        for handle in handles:
            handle.remove()
    return found


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
