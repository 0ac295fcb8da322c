"""What one forward pass shows: which layers are called, on what, and which make the output."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils.flop_counter import FlopCounterMode

from bp_convert.errors import TraceError
from bp_convert.graph.clone import all_tensors, clone, clone_to_meta
from bp_convert.graph.running import (
    Args,
    Kwargs,
    in_mode,
    nothing_cached,
    quiet_forward,
    run,
    same_draws,
)
from bp_convert.graph.stacks import bare_names, opened
from bp_convert.graph.tree import map_tensors, tensors_in
from bp_convert.kinds import kind_of, uncounted, unseen_macs
from bp_convert.torch_private import hooks_of


@dataclass
class Observation:
    """One forward pass of one example, in eval mode.

    Attributes:
        shapes: input shapes of each watched layer's calls, in the order of first calls.
        macs: multiply-adds of each watched layer (1 MAC = 2 FLOPs).
        total_macs: multiply-adds of the whole pass.
        heads: layers whose result becomes an output with no parameter in between.
        on_data: the model looks at its data, so that it ran on numbers: another input may take
            another path.
        read: bare stacks of matrices that the pass does more with than multiply by them.
        indirect: layers that are not called, but whose weight goes into the output.
        unopened: bare stacks whose class does not run with a module in their place, and why.
        examples: in the pass, where one alone could not be had; counts are of one.
    """

    shapes: dict[str, list[tuple[int, ...]]] = field(default_factory=dict)
    macs: dict[str, int] = field(default_factory=dict)
    total_macs: int = 0
    heads: tuple[str, ...] = ()
    on_data: bool = False
    read: frozenset[str] = frozenset()
    indirect: frozenset[str] = frozenset()
    unopened: dict[str, str] = field(default_factory=dict)
    examples: int = 1

    def calls(self, names: Sequence[str]) -> list[tuple[int, ...]]:
        """Return the input shapes of all calls of a layer, under any of its names."""
        return [shape for name in names for shape in self.shapes.get(name, [])]

    def macs_of(self, names: Sequence[str]) -> int:
        """Return the multiply-adds of a layer, under any of its names."""
        return sum(self.macs.get(name, 0) for name in names)


def observe(
    model: nn.Module, watched: Iterable[str], args: Args, kwargs: Kwargs, *, examples: int = 1
) -> Observation:
    """Run ``model`` once and say what its layers did.

    A copy without data runs on the meta device: torch's counter counts an LSTM there as its
    matrix products, where on a CPU it sees none. A model that looks at its data, which meta
    tensors do not have, runs as a full copy on the CPU instead. The model itself is left as it is.

    Args:
        watched: names of the layers to report on.
        args: positional inputs, on the CPU.
        kwargs: keyword inputs, on the CPU.
        examples: in these inputs.

    Raises:
        TraceError: the forward failed, with its own message.
    """
    names = list(watched)
    stacks = bare_names(model, names)
    try:
        return _observe(model, names, args, kwargs, examples)
    except TraceError:
        if not stacks:
            raise
    # Classes that hold stacks of matrices may ask for tensors: each is tried.
    known = [name for name in names if not any(name in ones for ones in stacks.values())]
    seen = _observe(model, known, args, kwargs, examples)
    unopened: dict[str, str] = {}
    for ones in stacks.values():
        try:
            seen = _observe(model, [*known, *ones], args, kwargs, examples)
            known += ones
        except TraceError as problem:
            unopened.update(dict.fromkeys(ones, problem.found))
    seen.unopened = unopened
    return seen


def _observe(
    model: nn.Module, names: list[str], args: Args, kwargs: Kwargs, examples: int
) -> Observation:
    try:
        return observe_shapes(model, names, args, kwargs, examples=examples)
    except TraceError:
        if any(one.is_meta for one in all_tensors(model)):
            raise
    seen = _on_data(model, names, args, kwargs)
    seen.on_data = True
    return _of_one(seen, examples)


def observe_shapes(
    model: nn.Module, watched: Sequence[str], args: Args, kwargs: Kwargs, *, examples: int = 1
) -> Observation:
    """Do the same without data only.

    Raises:
        TraceError: the forward failed, perhaps because it looks at its data.
    """
    there = map_tensors(lambda t: t.to("meta"), (args, kwargs))
    with nothing_cached(model), same_draws():
        return _of_one(_Watching(clone_to_meta(model), watched).run(*there), examples)


def _on_data(model: nn.Module, watched: Sequence[str], args: Args, kwargs: Kwargs) -> Observation:
    for grad in (True, False):  # the graph tells heads, but not every model runs with one
        copy = clone(model, apart=True).to("cpu")
        given = map_tensors(lambda t: t.clone(), (args, kwargs))
        try:
            with same_draws():
                return _Watching(copy, watched).run(*given, grad=grad)
        except TraceError:
            if not grad:
                raise
    raise AssertionError


def _of_one(seen: Observation, examples: int) -> Observation:
    seen.examples = examples
    seen.macs = {name: count // examples for name, count in seen.macs.items()}
    seen.total_macs //= examples
    return seen


class _Watching:
    """One observed pass of a copy of a model."""

    def __init__(self, copy: nn.Module, watched: Iterable[str]) -> None:
        self.copy = copy
        self.seen = Observation()
        self.counter = FlopCounterMode(display=False)
        self.made: dict[Any, str] = {}  # autograd node -> the watched layer that made it
        self.starts: dict[str, int] = {}
        self.missed = 0  # multiply-adds that the counter does not see at all
        self.unseen: list[tuple[str, nn.Module, Args, Kwargs]] = []
        watched = list(watched)
        self.stacks = opened(self.copy, watched)
        by_name = dict(self.copy.named_modules(remove_duplicate=False))
        self.watched = {name: by_name[name] for name in watched}
        for name, module in self.watched.items():
            self._hook(name, module)

    def _hook(self, name: str, module: nn.Module) -> None:
        def before(_: nn.Module, inputs: Args, named: Kwargs) -> None:
            leaves = tensors_in((inputs, named), objects=True)
            first = next(iter(leaves), None)
            kind = kind_of(module)
            shape = None if kind is None else kind.call_shape(module, inputs, named)
            if shape is None:
                shape = () if first is None else tuple(first.shape)
            self.seen.shapes.setdefault(name, []).append(shape)
            self.starts[name] = self.counter.get_total_flops()
            if uncounted(module) and first is not None and not first.is_meta:
                self.unseen.append((name, module, inputs, named))

        def after(_: nn.Module, inputs: Args, output: Any) -> None:
            spent = self.counter.get_total_flops() - self.starts[name]
            missed = unseen_macs(module, self.seen.shapes[name][-1])
            self.missed += missed
            self.seen.macs[name] = self.seen.macs.get(name, 0) + spent // 2 + missed
            for leaf in tensors_in(output):
                if leaf.grad_fn is not None:
                    self.made[leaf.grad_fn] = name

        module.register_forward_pre_hook(before, with_kwargs=True, prepend=True)
        module.register_forward_hook(after)

    def _indirect(self, output: Any) -> frozenset[str]:
        """Return the layers that were not called and have parameters in the output's graph."""
        uncalled = {name: one for name, one in self.watched.items() if name not in self.seen.shapes}
        entered = _parameters_of(output) if uncalled else set()
        return frozenset(
            name
            for name, one in uncalled.items()
            if any(id(parameter) in entered for parameter in one.parameters())
        )

    def run(self, args: Args, kwargs: Kwargs, *, grad: bool = True) -> Observation:
        """Run the copy; gradients are on, because their graph tells which layers are heads."""
        for parameter in self.copy.parameters():
            if parameter.is_floating_point():
                parameter.requires_grad_(grad)
        with (
            torch.set_grad_enabled(grad),
            quiet_forward(),
            in_mode(self.copy, training=False),
            self.counter,
        ):
            output = run(self.copy, args, kwargs)
        self.seen.total_macs = self.counter.get_total_flops() // 2 + self.missed
        self.seen.read = frozenset(name for name, one in self.stacks.items() if one.read)
        order = list(self.seen.shapes)
        heads = {_head(leaf, self.made, order) for leaf in tensors_in(output)}
        self.seen.heads = tuple(name for name in order if name in heads)
        self.seen.indirect = self._indirect(output)
        for name, module, inputs, named in self.unseen:
            missed = _recurrent_macs(module, inputs, named) - self.seen.macs[name]
            self.seen.macs[name] += missed
            self.seen.total_macs += missed
        return self.seen


def _recurrent_macs(module: nn.Module, args: Args, kwargs: Kwargs) -> int:
    """Count a recurrent layer, which the counter does not see on a CPU, on meta tensors.

    Its steps are those that were packed: padding costs nothing.
    """
    copy = clone_to_meta(module)
    for hooks in hooks_of(copy):
        hooks.clear()  # of the pass that is being watched
    given = args[0] if args else next(iter(kwargs.values()))
    if isinstance(given, PackedSequence):
        given = given.data[:, None] if not module.batch_first else given.data[None]
    there = given.to("meta")
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        try:
            copy(there)
        except RuntimeError:
            return 0
    return int(counter.get_total_flops()) // 2


def _parameters_of(output: Any) -> set[int]:
    """Return the ``id`` of every parameter in the graph of an output."""
    todo = [leaf.grad_fn for leaf in tensors_in(output)]
    known: set[Any] = set()
    found = set()
    while todo:
        node: Any = todo.pop()
        if node is None or node in known:
            continue
        known.add(node)
        if type(node).__name__ == "AccumulateGrad":
            found.add(id(node.variable))
        todo.extend(parent for parent, _ in node.next_functions)
    return found


def _head(leaf: Tensor, made: Mapping[Any, str], order: Sequence[str]) -> str | None:
    """Walk back from an output to the nearest watched layers; stop where a parameter enters."""
    todo, known, found = [leaf.grad_fn], set(), set()
    while todo:
        node = todo.pop()
        if node is None or node in known:
            continue
        known.add(node)
        if node in made:
            found.add(made[node])
            continue
        parents = [parent for parent, _ in node.next_functions]
        if any(type(parent).__name__ == "AccumulateGrad" for parent in parents):
            continue
        todo.extend(parents)
    return max(found, key=order.index) if found else None
