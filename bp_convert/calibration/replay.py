"""Passes of a model that need not start from the beginning again."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from itertools import pairwise
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from bp_convert.calibration.work import memory_of, room_on
from bp_convert.errors import DataError
from bp_convert.graph.example import device_of
from bp_convert.graph.tree import tensors_in
from bp_convert.torch_private import hooks_of, version_of

T = TypeVar("T")
FIRST = 3  # passes that are compared with whole ones
NEAR = 1e-5  # relative difference up to which a pass is the same as one from the beginning


@dataclass
class _Done:
    """A module's call that had ended, and what it gave."""

    module: nn.Module
    output: Any
    versions: list[tuple[Tensor, int]]  # of the output's tensors
    weights: list[tuple[Tensor, int]] | None = None  # of all that the module holds

    def weigh(self) -> None:
        """Take down what it was computed with."""
        if self.weights is None:
            self.weights = _versions(self.module.parameters())

    @property
    def holds(self) -> bool:
        """Whether nothing was written on what it gave."""
        return all(was >= 0 and _version(one) == was for one, was in self.versions)

    @property
    def stands(self) -> bool:
        """Whether its weights are the same."""
        return all(_version(one) == was for one, was in self.weights or ())


@dataclass
class _Frame:
    """A call that has not ended: the calls in it that have, and what another pass had of them."""

    module: nn.Module
    done: list[_Done] = field(default_factory=list)
    inside: _Frame | None = None
    given: _Frame | None = None

    def add(self, done: _Done) -> None:
        """Add a call that has ended. In a chain nothing asks for what went into it any more."""
        self.done.append(done)
        if len(self.done) > 1 and self.chains and not any(hooks_of(done.module)):
            before = self.done[-2]
            self.done[-2] = _Done(before.module, None, [], before.weights)

    @property
    def chains(self) -> bool:
        """Whether each call in it is given what the one before gave, and nothing else is."""
        return type(self.module).forward is nn.Sequential.forward

    @property
    def whole(self) -> bool:
        """Whether no call in a chain has to be computed again, whose input is gone."""
        if not self.chains or not self.done:
            return True
        unseen = not any(
            before.output is None and any(hooks_of(after.module))
            for before, after in pairwise(self.done)
        )
        return unseen and self.done[-1].holds and all(one.stands for one in self.done)


class Replay:
    """Lets passes of a model on the same batches start where weights have changed.

    While ``upto`` names layers, each pass keeps what the modules gave that had ended when the first
    of those layers was called: one output for a block that had ended, not those within it. In the
    next pass on that batch they are not run again, but give what they gave, as long as their
    weights are the same. What was written on since is computed again.

    That is right for modules that do nothing but return something; ``same`` tells whether a
    model's are so.

    Args:
        model: only calls of its modules are looked at; buffers may change.
        limit: bytes that are kept; by default a share of what is free.
    """

    def __init__(self, model: nn.Module, limit: int | None = None) -> None:
        self.model = model
        self.limit = room_on(device_of(model)) if limit is None else limit
        self.on = True
        self.number = 0
        self.tested = self.tests = 0
        self.clear()

    def clear(self) -> None:
        """Forget all passes."""
        self.kept: dict[int, _Frame] = {}
        self.sizes: dict[int, int] = {}
        self.called: dict[int, set[int]] = {}

    def next(self, number: int) -> None:
        """Tell that the batch of that number comes next."""
        self.number = number

    def run(self, number: int, one: Callable[[], T]) -> T:
        """Run the model on the batch of that number; where it fails on what is kept, from the
        beginning, then and from now on."""
        self.number = number
        try:
            return one()
        except DataError:
            if not self.on:
                raise
            self._stop()
            return one()

    def _stop(self) -> None:
        self.on = False
        self.clear()

    @property
    def starts_late(self) -> bool:
        """Whether this batch's next pass does."""
        return self.on and bool(self.called.get(self.number))

    @property
    def untested(self) -> bool:
        """Whether this batch's next pass should be compared with one from the beginning, where not
        every one is: it is one of the first, or leaves out at least twice as much as any that was.
        """
        left_out = len(self.called.get(self.number, ()))
        return self.starts_late and (self.tests < FIRST or left_out >= 2 * self.tested)

    def same(self, one: Any, other: Any, near: float = NEAR) -> None:
        """Compare what a pass gave with what one from the beginning did; where they differ by more
        than ``near``, all passes start from the beginning from now on."""
        self.tested, self.tests = len(self.called.get(self.number, ())), self.tests + 1
        ones, others = (tensors_in(found, objects=True) for found in (one, other))
        if len(ones) != len(others) or not all(
            _near(*pair, near) for pair in zip(ones, others, strict=True)
        ):
            self._stop()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Let passes start from the beginning, and keep nothing of them."""
        before, self.on = self.on, False
        try:
            yield
        finally:
            self.on = before

    @contextmanager
    def upto(
        self,
        layers: Iterable[nn.Module],
        reached: Callable[[], None] | None = None,
        *,
        keeps: bool = True,
    ) -> Iterator[None]:
        """Let passes start late, and keep what is done before these layers are called.

        Args:
            layers: none leaves what is kept as it is.
            reached: called when the first of them is, once all is kept.
            keeps: False leaves what is kept as it is.
        """
        stops = set(layers)
        for number, called in list(self.called.items()):
            if any(id(one) in called for one in stops):  # they would not be called
                self._drop(number)
        run = _Pass(self, stops if keeps else set(), reached)
        handles = [
            one.register_forward_pre_hook(run.stop, with_kwargs=True, prepend=True) for one in stops
        ]
        with _patched(self.model, run.call):
            try:
                yield
            finally:
                for handle in handles:
                    handle.remove()

    def keep(self, frame: _Frame, called: set[int]) -> None:
        """Keep what was done in a pass, where there is room."""
        self._drop(self.number)
        size = _bytes(frame)
        if sum(self.sizes.values()) + size <= self.limit:
            self.kept[self.number], self.sizes[self.number] = frame, size
            self.called[self.number] = called

    def _drop(self, number: int) -> None:
        for held in (self.kept, self.sizes, self.called):
            held.pop(number, None)


class _Pass:
    """What happens while the model runs."""

    def __init__(
        self, replay: Replay, stops: set[nn.Module], reached: Callable[[], None] | None
    ) -> None:
        self.replay, self.stops, self.reached = replay, stops, reached
        self.stack: list[_Frame] = []
        self.live = self.records = False
        self.called: set[int] = set()

    def call(
        self, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Run a module, or give what it gave."""
        if module is self.replay.model and not self.stack:
            self._begin()
        elif not (self.live or self.records):
            return forward(*args, **kwargs)
        given = None
        if self.stack:
            parent = self.stack[-1]
            found = self._known(parent, module)
            if isinstance(found, _Done):
                parent.add(found)
                return _apart(found.output)
            given = found
        frame = _Frame(module, given=given)
        if self.stack:
            self.stack[-1].inside = frame
            self.called.add(id(module))
        elif self.live:
            frame.given = self.replay.kept[self.replay.number]
            self.live = frame.given.whole
        self.stack.append(frame)
        try:
            output = forward(*args, **kwargs)
        finally:
            self.stack.pop()
            if self.stack:
                self.stack[-1].inside = None
        if self.stack and (self.live or self.records):
            done = _Done(module, _apart(output), _versions(tensors_in(output, objects=True)))
            self.stack[-1].add(done)
        return output

    def _begin(self) -> None:
        replay = self.replay
        self.live = replay.on and replay.number in replay.kept
        self.records = replay.on and bool(self.stops)
        self.called = set(replay.called[replay.number]) if self.live else set()

    def _known(self, parent: _Frame, module: nn.Module) -> _Done | _Frame | None:
        """Return what another pass had of a call: its output, or what was done in it."""
        if not self.live or parent.given is None:
            return None
        done, at = parent.given.done, len(parent.done)
        if at < len(done):
            found = done[at]
            if found.module is module and found.stands:
                return found if found.holds else None
            self.live = False  # other weights, or another way through the model
            return None
        inside, parent.given = parent.given.inside, None  # nothing is known of what comes behind
        if inside is not None and inside.module is module and inside.whole:
            return inside
        self.live = False
        return None

    def stop(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Keep what is done: a layer is called that may have changed by the next pass."""
        if not self.records or not self.stack:
            return
        self.live = self.records = False
        root: _Frame | None = None
        for frame in reversed(self.stack):
            for one in frame.done:
                one.weigh()
            root = _Frame(frame.module, list(frame.done), root)
        assert root is not None
        self.replay.keep(root, self.called)
        if self.reached is not None:
            self.reached()


@contextmanager
def _patched(model: nn.Module, call: Callable[..., Any]) -> Iterator[None]:
    """Let every module's forward go through ``call``."""
    changed: list[tuple[nn.Module, Any]] = []
    for module in model.modules():
        if isinstance(module, torch.jit.ScriptModule):  # what it calls is not Python's
            continue
        changed.append((module, vars(module).get("forward")))
        vars(module)["forward"] = _through(call, module, module.forward)
    try:
        yield
    finally:
        for module, own in changed:
            if own is None:
                del vars(module)["forward"]
            else:
                vars(module)["forward"] = own


def _through(
    call: Callable[..., Any], module: nn.Module, forward: Callable[..., Any]
) -> Callable[..., Any]:
    @wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        return call(module, forward, *args, **kwargs)

    return run


def _apart(value: Any) -> Any:
    """Return lists and dicts that nobody else takes something from."""
    if type(value) in (list, tuple):
        return type(value)(_apart(one) for one in value)
    if type(value) in (dict, OrderedDict):
        return type(value)((key, _apart(one)) for key, one in value.items())
    return value


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else version_of(tensor)


def _versions(tensors: Iterable[Tensor]) -> list[tuple[Tensor, int]]:
    return [(one, _version(one)) for one in tensors]


def _bytes(frame: _Frame | None) -> int:
    """Return the memory that what was given holds; views of one count once."""
    held: dict[int, int] = {}
    while frame is not None:
        held |= dict(memory_of(one) for done in frame.done for one, _ in done.versions)
        frame = frame.inside
    return sum(held.values())


def _near(one: Tensor, other: Tensor, near: float) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if not one.is_floating_point():
        return torch.equal(one, other)
    gap = torch.linalg.vector_norm((one - other).double())
    return bool(gap <= near * torch.linalg.vector_norm(other.double()))
