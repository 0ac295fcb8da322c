"""One segment of a converted model set up to run again and again beside what it should give."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from bp_convert.calibration.tap import Batch, Batches, token_mask
from bp_convert.graph.example import adapt, device_of
from bp_convert.graph.running import quiet_forward, same_draws
from bp_convert.graph.tree import map_tensors, tensors_in
from bp_convert.reconstruction.call_order import Segment
from bp_convert.reconstruction.front import Front, front_behind
from bp_convert.reconstruction.gap import alike, chosen, relative, squares
from bp_convert.reconstruction.relay import Relay
from bp_convert.reconstruction.shelf import Shelf


class Untunable(Exception):  # noqa: N818 - a reason, which a report gives
    """Why a segment cannot be tuned."""


class _Arrived(Exception):  # noqa: N818 - a signal, not an error
    """What was waited for has come."""


class Bench:
    """Runs a segment of ``after`` on batches, and holds what the source gives there.

    A block that gives alone what it gives in its model runs alone, on inputs that are caught once,
    and so does the source's; they come from the block before where they follow from it (``Relay``).
    Anything else runs in its model, with nothing in the place of what is before it where that
    gives the same (see ``Front``); to find out, both models run from the last block on.

    Args:
        before: the source.
        after: its conversion, which is to be tuned in place.
        parameters: those that are.
        relays: of both models, from what was tuned before.

    Raises:
        Untunable: says why.
    """

    def __init__(
        self,
        before: nn.Module,
        after: nn.Module,
        segment: Segment,
        parameters: Sequence[nn.Parameter],
        batches: Batches,
        relays: tuple[Relay, Relay] | None = None,
    ) -> None:
        self.own = relays is None
        self.relays = relays or (relay_of(before, batches), relay_of(after, batches))
        self.after, self.segment, self.batches = after, segment, batches
        self.device = device_of(after)
        self.masks = [token_mask(batch) for batch in batches]
        self.alone = False  # it runs without what is before it
        self.front: Front | None = None
        self.places: list[int] | None = None
        self._ask(parameters)
        self._settle(before)
        if not self.alone:
            self._begin_late(parameters)

    def _ask(self, parameters: Sequence[nn.Parameter]) -> None:
        """Let gradients go to these parameters alone."""
        wanted = {id(one) for one in parameters}
        for one in self.after.parameters():
            one.requires_grad_(id(one) in wanted)

    def _settle(self, before: nn.Module) -> None:
        """Find out what depends on the parameters, how it is run, and what it should be."""
        with torch.enable_grad():
            found = self._through(0)
            self.places = [at for at, one in enumerate(found) if one.requires_grad]
        if not self.places:
            raise Untunable("no output of it follows its weights")
        inside = self._at(found)
        again = self._at(self._through(0))
        if not alike(again, inside):
            raise Untunable("it gives something else each time that it runs")
        if self.segment.block:
            self.relays[1].inputs_of(self.segment.modules[0])
            self.alone = self._replays(self.relays[1], inside)
            if not self.alone:
                self.relays[1].close()
        self.wanted = Shelf(len(self.batches))
        wanted: Callable[[int], list[Tensor]] = partial(self._at_source, before)
        if self.alone:
            self.relays[0].inputs_of(self.segment.modules[0])
            if self._replays(self.relays[0], self._at(wanted(0))):
                wanted = self.relays[0].outputs
            else:
                self.relays[0].close()
        else:
            front = front_behind(self.relays[0], lambda number: self._at(wanted(number)))
            if front is not None:
                wanted = partial(self._behind, front, wanted)
        for number in range(len(self.batches)):
            with torch.no_grad():
                one = self._at(wanted(number))
            if number == 0 and [x.shape for x in one] != [x.shape for x in inside]:
                raise Untunable("its outputs have other shapes than the source's")
            if not all(bool(torch.isfinite(x).all()) for x in one):
                raise Untunable("the source's outputs are not finite there")
            self.wanted.put(one)

    def _behind(
        self, front: Front, wanted: Callable[[int], list[Tensor]], number: int
    ) -> list[Tensor]:
        with front.standing(number, self._there):
            return wanted(number)

    @torch.no_grad()
    def _at_source(self, before: nn.Module, number: int) -> list[Tensor]:
        return run_to(before, self.batches[number], number, self._waiting(before))

    def outputs(self, number: int) -> list[Tensor]:
        """Run it on a batch; return the outputs that count, with their graph where one is
        recorded."""
        found = self.relays[1].outputs(number) if self.alone else self._through(number)
        return chosen(self._at(found), self.masks[number])

    def squares(self, number: int) -> tuple[Tensor, Tensor]:
        """Return its squared error on a batch, and the squared norm of what was wanted."""
        found = self.outputs(number)
        due = [one.to(self.device) for one in self.wanted[number]]
        return squares(found, chosen(due, self.masks[number]))

    @torch.no_grad()
    def error(self, numbers: Sequence[int]) -> float:
        """Return its relative error over batches."""
        parts = [self.squares(number) for number in numbers]
        gaps, sizes = (torch.stack(ones).double().sum(0) for ones in zip(*parts, strict=True))
        return float(relative(gaps, sizes).sqrt())

    def close(self) -> None:
        """Give up what was caught."""
        own = self.relays if self.own else ()
        for shelf in (self.front, getattr(self, "wanted", None), *own):
            if shelf is not None:
                shelf.close()

    @torch.no_grad()
    def _begin_late(self, parameters: Sequence[nn.Parameter]) -> None:
        """Leave out what is before the segment, where all batches then give the same."""
        whole = front_behind(self.relays[1], lambda number: self._at(self._through(number)))
        self.front = whole if whole is not None and whole.spares(parameters) else None
        front = Front(self.after, self.segment.modules, self.batches)
        wanted = [
            self._at(front.catch(number, partial(self._through, number)))
            for number in range(len(self.batches))
        ]
        whole = self.front
        try:
            if front.spares(parameters):
                self.front = front
                pairs = (
                    (self._at(self._through(number)), one) for number, one in enumerate(wanted)
                )
                if all(alike(found, due) for found, due in pairs):
                    return
        except Exception:
            pass
        self.front = whole
        front.close()

    def _at(self, found: Sequence[Tensor]) -> list[Tensor]:
        assert self.places is not None
        try:
            return [found[at] for at in self.places]
        except IndexError:
            raise Untunable("it puts out another number of tensors each time") from None

    def _through(self, number: int) -> list[Tensor]:
        with nullcontext() if self.front is None else self.front.standing(number, self._there):
            return run_to(self.after, self.batches[number], number, self._waiting(self.after))

    def _waiting(self, model: nn.Module) -> Waiting | None:
        segment = self.segment
        name = segment.modules[0] if segment.block else segment.behind
        if name is None:
            return None
        return Waiting(model.get_submodule(name), inputs=not segment.block)

    def _replays(self, relay: Relay, inside: Sequence[Tensor]) -> bool:
        """Return whether a block gives alone what it gives in its model, also a second time."""
        with torch.no_grad():
            try:
                return all(alike(self._at(relay.outputs(0)), inside) for _ in range(2))
            except Exception:  # whatever goes wrong in a block alone: it runs in its model
                return False

    def _there(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.device, copy=True)


class Waiting:
    """Ends a pass at a module: keeps the tensors that it is given, or those that it puts out.

    Args:
        copied: keep all that it is given, as it is at that time.
    """

    def __init__(self, module: nn.Module, *, inputs: bool, copied: bool = False) -> None:
        self.module, self.inputs, self.copied = module, inputs, copied
        self.given: Any = None
        self.tensors: list[Tensor] | None = None

    def __enter__(self) -> Waiting:
        if self.inputs:
            self.handle: Any = self.module.register_forward_pre_hook(self._given, with_kwargs=True)
        else:
            self.handle = self.module.register_forward_hook(self._made)
        return self

    def __exit__(self, *_: object) -> None:
        self.handle.remove()

    def _given(self, _: nn.Module, args: Any, kwargs: Any) -> None:
        if self.copied:
            self.given = map_tensors(lambda one: one.detach().clone(), (args, kwargs))
        self.tensors = tensors_in((args, kwargs))
        raise _Arrived

    def _made(self, _: nn.Module, __: Any, output: Any) -> None:
        self.tensors = tensors_in(output)
        raise _Arrived


def relay_of(model: nn.Module, batches: Batches) -> Relay:
    """Return what hands a model's blocks their inputs."""

    def catch(block: nn.Module, number: int) -> Any:
        waiting = Waiting(block, inputs=True, copied=True)
        run_to(model, batches[number], number, waiting)
        return waiting.given

    return Relay(model, batches, catch)


def run_to(
    model: nn.Module, batch: Batch, number: int, waiting: Waiting | None = None
) -> list[Tensor]:
    """Run a model on a batch up to what is waited for; return the tensors there.

    Raises:
        Untunable: it does not come there.
    """
    args, kwargs = adapt(model, *without_cache(model, batch))
    scope: Callable[[], AbstractContextManager[Any]] = quiet_forward
    with same_draws(number, model), scope():
        if waiting is None:
            return tensors_in(model(*args, **kwargs))
        try:
            with waiting:
                model(*args, **kwargs)
        except _Arrived:
            assert waiting.tensors is not None
            return waiting.tensors
    raise Untunable("not every batch reaches it")


def without_cache(model: nn.Module, batch: Batch) -> Batch:
    """Return a batch that asks a model not to keep keys and values for a next call, where it can
    be asked so: its blocks would write on them."""
    args, kwargs = batch
    if "use_cache" in inspect.signature(model.forward).parameters and "use_cache" not in kwargs:
        kwargs = {**kwargs, "use_cache": False}
    return args, kwargs


@torch.no_grad()
def error_beside(before: nn.Module, after: nn.Module, batches: Batches) -> float | None:
    """Return the relative error of a model's floating-point outputs to its source's; None where
    there are none of the same shapes, or the source's are not finite."""
    parts = []
    for number, batch in enumerate(batches):
        wanted, found = (
            [x for x in run_to(model, batch, number) if x.is_floating_point()]
            for model in (before, after)
        )
        if not wanted or [x.shape for x in wanted] != [x.shape for x in found]:
            return None
        mask = token_mask(batch)
        parts.append(squares(chosen(found, mask), chosen(wanted, mask)))
        if not bool(torch.isfinite(parts[-1][1]).all()):
            return None
    if len({len(gaps) for gaps, _ in parts}) != 1:
        return None
    gaps, sizes = (torch.stack(ones).double().sum(0) for ones in zip(*parts, strict=True))
    return float(relative(gaps, sizes).sqrt())
