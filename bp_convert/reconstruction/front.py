"""What stands for all that is before a segment while that runs again and again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from bp_convert.calibration.tap import Batch, Batches
from bp_convert.graph.example import device_of
from bp_convert.graph.tree import map_tensors, tensors_in
from bp_convert.reconstruction.gap import alike
from bp_convert.reconstruction.relay import Relay
from bp_convert.reconstruction.shelf import Shelf


class Front:
    """Lets a model begin at its segment: layers before it put out zeros, and the layer that the
    segment begins with is given what it was given when the whole model ran.

    The model's own code runs on in between, on those zeros. Whether that is what it is, with
    nothing else of the front going into the segment, is for the caller to see (``Bench``).

    Args:
        model: what runs.
        segment: its modules that are tuned, by name.
        batches: what it runs on.
        given: what the segment is given in them, where that is known; else it is caught.
    """

    def __init__(
        self, model: nn.Module, segment: Sequence[str], batches: Batches, given: Shelf | None = None
    ) -> None:
        self.inside = [model.get_submodule(name) for name in segment]
        own = {id(one) for top in self.inside for one in top.modules()}
        self.layers = [
            one
            for one in model.modules()
            if id(one) not in own and one._parameters and not any(one.children())
        ]
        self.first: nn.Module | None = None
        self.own = given is None
        self.given = Shelf(len(batches)) if given is None else given
        self.forms = [_form(batch) for batch in batches]
        # What each layer before puts out, as shapes, in batches of each form.
        self.made: dict[str, dict[int, list[Any]]] = {}

    def catch(self, number: int, run: Callable[[], Any]) -> Any:
        """Take down a batch, as the whole model runs on it; return what ``run`` does."""
        form = self.forms[number]
        made: dict[int, list[Any]] = {}
        arrived: list[nn.Module] = []

        def before(module: nn.Module, args: Any, kwargs: Any) -> None:
            if not arrived:
                arrived.append(module)
                if self.own:
                    self.given.put((args, kwargs))

        def after(module: nn.Module, _: Any, output: Any) -> None:
            if not arrived:
                made.setdefault(id(module), []).append(map_tensors(_hollow, output))

        with ExitStack() as hooks:
            for one in self.inside:
                handle = one.register_forward_pre_hook(before, with_kwargs=True)
                hooks.enter_context(handle)
            for one in self.layers if form not in self.made else ():
                hooks.enter_context(one.register_forward_hook(after))
            found = run()
        if self.first is None and arrived:
            self.first = arrived[0]
        if not arrived or arrived[0] is not self.first:
            self.made[form] = {}
        self.made.setdefault(form, made)
        return found

    def spares(self, parameters: Sequence[nn.Parameter]) -> bool:
        """Return whether in each batch something is before the segment that does not change with
        these parameters."""
        tuned = {id(one) for one in parameters}
        every = self.made.values()
        out = {key for made in every for key in made}  # layers that do not run
        tied = any(
            id(p) in tuned
            for one in self.layers
            if id(one) in out
            for p in one._parameters.values()
        )
        return bool(every) and all(every) and not tied

    @contextmanager
    def standing(self, number: int, place: Callable[[Tensor], Tensor]) -> Iterator[None]:
        """Stand for the front of a batch while the model runs.

        Args:
            place: brings what was kept to where the model is.
        """
        assert self.first is not None
        fresh = [True]

        def begin(module: nn.Module, *_: Any) -> Any:
            if fresh:
                fresh.clear()
                return map_tensors(place, self.given[number])
            return None

        with ExitStack() as stack:
            for layer in self.layers:
                outputs = self.made[self.forms[number]].get(id(layer))
                if outputs:
                    stack.enter_context(_hollowed(layer, outputs))
            stack.enter_context(self.first.register_forward_pre_hook(begin, with_kwargs=True))
            yield

    def close(self) -> None:
        """Give up what was caught."""
        if self.own:
            self.given.close()


@torch.no_grad()
def front_behind(relay: Relay, run: Callable[[int], list[Tensor]]) -> Front | None:
    """Return what stands for all before the block that a relay handed its inputs last, where there
    is one and the model gives the same without; that is looked at in one batch of each form, and
    in the last.

    Args:
        run: runs the model on a batch, by its number; returns what counts.
    """
    if relay.cases is None:
        return None
    front = Front(relay.model, (relay.name,), relay.batches, relay.cases)
    firsts = [front.forms.index(form) for form in dict.fromkeys(front.forms)]
    last = len(relay.batches) - 1
    wanted = {number: front.catch(number, partial(run, number)) for number in {*firsts, last}}
    if not front.spares(()):
        return None
    device = device_of(relay.model)
    try:
        for number, due in wanted.items():
            with front.standing(number, lambda one: one.to(device, copy=True)):
                if not alike(run(number), due):
                    return None
    except Exception:  # its own code cannot go on with zeros
        return None
    return front


def _form(batch: Batch) -> str:
    """Return what tells all of a batch but its numbers, as far as it can be told."""
    shapes = [None if one.is_nested else one.shape for one in tensors_in(batch, objects=True)]
    return f"{shapes} {map_tensors(lambda one: torch.empty(0, dtype=one.dtype), batch)}"


def _hollow(tensor: Tensor) -> Tensor:
    """Return a tensor of the same form that holds one number."""
    return tensor.new_zeros(()).expand(tensor.shape)


@contextmanager
def _hollowed(layer: nn.Module, outputs: Sequence[Any]) -> Iterator[None]:
    """Let a layer put out zeros of these forms in turn, and after them what it computes."""
    mine = layer.__dict__.get("forward")
    left = list(reversed(outputs))
    real = layer.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        if not left:
            return real(*args, **kwargs)
        return map_tensors(torch.zeros_like, left.pop())

    layer.forward = forward
    try:
        yield
    finally:
        if mine is None:
            del layer.forward
        else:
            layer.forward = mine
