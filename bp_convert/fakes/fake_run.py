"""Running the model at its new sizes, to see that it runs and what its outputs look like."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from bp_convert.errors import PlanError
from bp_convert.fakes.fake import FakeMode, call, stub
from bp_convert.fakes.origin import origin_of
from bp_convert.graph.clone import all_tensors, clone
from bp_convert.graph.reshape import held, owner_of
from bp_convert.graph.running import Args, Kwargs, nothing_cached
from bp_convert.graph.tree import named_tensors
from bp_convert.torch_private import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    GuardOnDataDependentSymNode,
    UnsupportedFakeTensorException,
)
from bp_convert.values.plan import AttrChange, Resize

Shapes = dict[str, tuple[int, ...]]
_DATA = (
    GuardOnDataDependentSymNode,
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    NotImplementedError,
)


class ForwardError(Exception):
    """A forward that did not run: the module in which it stopped, the line, and its message.

    Attributes:
        looks_at_data: it may run where tensors have data.
    """

    def __init__(
        self, module: str, message: str, line: str = "", *, looks_at_data: bool = False
    ) -> None:
        super().__init__(module, message, line)
        self.module = module
        self.message = message
        self.line = line
        self.looks_at_data = looks_at_data

    def __str__(self) -> str:
        place = self.line or (f"the layer {self.module}" if self.module else "the model's forward")
        return f"it stops at {place}: {self.message}"


class FakeRun:
    """A model at given sizes, to run without data.

    Args:
        model: the source; it is only read.
        resizes: new shapes of tensors.
        attrs: new attributes of modules.

    Raises:
        PlanError: the model cannot be copied.
    """

    def __init__(
        self,
        model: nn.Module,
        resizes: Sequence[Resize] = (),
        attrs: Sequence[AttrChange] = (),
    ) -> None:
        self.mode = FakeMode()
        self._running: list[str] = []
        shapes = {id(held(*owner_of(model, one.name))): one.after for one in resizes}
        tensors: dict[int, Tensor] = {
            id(t): self.mode.like(t, shapes.get(id(t))) for t in all_tensors(model)
        }
        self.source = model
        self.module = clone(model, None, tensors, apart=True)
        for one in attrs:
            vars(self.module.get_submodule(one.module))[one.attr] = one.after
        for module in self.module.modules():
            stub(module)
        watch(self.module, self._running)

    def run(self, args: Args, kwargs: Kwargs, *, training: bool) -> Shapes:
        """Return the shapes of the outputs.

        Raises:
            ForwardError: the forward raised.
        """
        self._running.clear()
        try:
            with nothing_cached(self.source):
                output = call(self.module, self.mode, args, kwargs, training=training)
        except Exception as problem:
            raise failure(problem, self._running) from problem
        return {where: tuple(t.shape) for where, t in named_tensors(output)}


def failure(problem: Exception, running: Sequence[str]) -> ForwardError:
    """Say in which module and line a forward stopped, and why."""
    module = running[-1] if running else ""
    frames = traceback.extract_tb(problem.__traceback__)
    inner = [(one.filename, one.lineno or 0) for one in reversed(frames)]
    line = str(origin_of(inner, module))
    return ForwardError(module, words(problem), line, looks_at_data=isinstance(problem, _DATA))


def words(problem: Exception) -> str:
    """Return the first line of an exception's message, with its type."""
    if isinstance(problem, PlanError):
        return problem.found
    if isinstance(problem, _DATA):
        return "what it does next depends on numbers that it computes from weights or inputs"
    lines = str(problem).strip().splitlines()
    return f"{type(problem).__name__}: {lines[0][:160] if lines else 'no message'}"


def watch(
    model: nn.Module,
    running: list[str],
    enter: Callable[[str, Tensor | None], None] = lambda *_: None,
) -> None:
    """Keep the names of the modules that are being called, innermost last.

    Args:
        enter: called with each of them, and with the first tensor that it is given.
    """
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):  # takes no hooks of Python's
            continue

        def before(_: nn.Module, args: Any, kwargs: Any, name: str = name) -> None:
            running.append(name)
            enter(name, first_tensor(args, kwargs))

        def after(*_: Any) -> None:
            if running:
                running.pop()

        module.register_forward_pre_hook(before, with_kwargs=True, prepend=True)
        module.register_forward_hook(after)


def first_tensor(args: Any, kwargs: Any) -> Tensor | None:
    """Return the first argument of a call that is a tensor, or a packed sequence's rows."""
    for one in [*args, *kwargs.values()]:
        if isinstance(one, Tensor | PackedSequence):
            return one.data if isinstance(one, PackedSequence) else one
    return None
