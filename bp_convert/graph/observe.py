"""What one forward pass shows: which layers are called, on what, and which make the output."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import FlopCounterMode

from bp_convert.errors import TraceError
from bp_convert.graph.clone import all_tensors, clone, clone_to_meta
from bp_convert.layers import BPLSTM

Args = tuple[Any, ...]
Kwargs = dict[str, Any]


@dataclass
class Observation:
    """One forward pass of one example, in eval mode.

    Attributes:
        shapes: input shapes of each watched layer's calls, in the order of first calls.
        macs: multiply-adds of each watched layer (1 MAC = 2 FLOPs).
        total_macs: multiply-adds of the whole pass.
        heads: layers whose result becomes an output with no parameter in between.
    """

    shapes: dict[str, list[tuple[int, ...]]] = field(default_factory=dict)
    macs: dict[str, int] = field(default_factory=dict)
    total_macs: int = 0
    heads: tuple[str, ...] = ()

    def calls(self, names: Sequence[str]) -> list[tuple[int, ...]]:
        """Return the input shapes of all calls of a layer, under any of its names."""
        return [shape for name in names for shape in self.shapes.get(name, [])]

    def macs_of(self, names: Sequence[str]) -> int:
        """Return the multiply-adds of a layer, under any of its names."""
        return sum(self.macs.get(name, 0) for name in names)


def observe(
    model: nn.Module, watched: Mapping[str, nn.Module], args: Args, kwargs: Kwargs
) -> Observation:
    """Run ``model`` once and say what its layers did.

    A copy without data runs on the meta device: torch's counter counts an LSTM there as its
    matrix products, where on a CPU it sees none. A model that looks at its data, which meta
    tensors do not have, runs as a full copy on the CPU instead. The model itself is left as it is.

    Args:
        watched: layers to report on, by name.
        args: positional inputs, on the CPU.
        kwargs: keyword inputs, on the CPU.

    Raises:
        TraceError: the forward failed, with its own message.
    """
    try:
        there = pytree.tree_map_only(Tensor, lambda t: t.to("meta"), (args, kwargs))
        return _Watching(clone_to_meta(model), watched).run(*there)
    except TraceError:
        return _Watching(_on_cpu(model), watched).run(args, kwargs)


def _on_cpu(model: nn.Module) -> nn.Module:
    """Copy a model onto the CPU; tensors without data become zeros."""
    zeros: dict[int, Tensor] = {}
    for tensor in all_tensors(model):
        if tensor.is_meta:
            empty = torch.zeros_like(tensor, device="cpu")
            is_parameter = isinstance(tensor, nn.Parameter)
            zeros[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if is_parameter else empty
    return clone(model, None, zeros).to("cpu")


class _Watching:
    """One observed pass of a copy of a model."""

    def __init__(self, copy: nn.Module, watched: Iterable[str]) -> None:
        self.copy = copy.eval()
        self.seen = Observation()
        self.counter = FlopCounterMode(display=False)
        self.made: dict[Any, str] = {}  # autograd node -> the watched layer that made it
        self.starts: dict[str, int] = {}
        self.unseen: list[tuple[str, nn.Module, Args, Kwargs]] = []
        by_name = dict(self.copy.named_modules(remove_duplicate=False))
        for name in watched:
            self._hook(name, by_name[name])

    def _hook(self, name: str, module: nn.Module) -> None:
        def before(_: nn.Module, inputs: Args, named: Kwargs) -> None:
            leaves = pytree.tree_leaves((inputs, named))
            first = next((leaf for leaf in leaves if isinstance(leaf, Tensor)), None)
            shape = () if first is None else tuple(first.shape)
            self.seen.shapes.setdefault(name, []).append(shape)
            self.starts[name] = self.counter.get_total_flops()
            if isinstance(module, nn.RNNBase | BPLSTM) and first is not None and not first.is_meta:
                self.unseen.append((name, module, inputs, named))

        def after(_: nn.Module, inputs: Args, output: Any) -> None:
            spent = self.counter.get_total_flops() - self.starts[name]
            self.seen.macs[name] = self.seen.macs.get(name, 0) + spent // 2
            for leaf in pytree.tree_leaves(output):
                if isinstance(leaf, Tensor) and leaf.grad_fn is not None:
                    self.made[leaf.grad_fn] = name

        module.register_forward_pre_hook(before, with_kwargs=True, prepend=True)
        module.register_forward_hook(after)

    def run(self, args: Args, kwargs: Kwargs) -> Observation:
        """Run the copy; gradients are on, because their graph tells which layers are heads."""
        for parameter in self.copy.parameters():
            if parameter.is_floating_point():
                parameter.requires_grad_(True)
        with torch.enable_grad(), quiet_forward(), self.counter:
            output = run(self.copy, args, kwargs)
        self.seen.total_macs = self.counter.get_total_flops() // 2
        order = list(self.seen.shapes)
        heads = {_head(leaf, self.made, order) for leaf in tensors_in(output)}
        self.seen.heads = tuple(name for name in order if name in heads)
        for name, module, inputs, named in self.unseen:
            missed = _recurrent_macs(module, inputs, named) - self.seen.macs[name]
            self.seen.macs[name] += missed
            self.seen.total_macs += missed
        return self.seen


def _recurrent_macs(module: nn.Module, args: Args, kwargs: Kwargs) -> int:
    """Count a recurrent layer, which the counter does not see on a CPU, on meta tensors."""
    there = pytree.tree_map_only(Tensor, lambda t: t.to("meta"), (args, kwargs))
    with FlopCounterMode(display=False) as counter:
        try:
            clone_to_meta(module)(*there[0], **there[1])
        except RuntimeError:  # packed sequences need their lengths
            return 0
    return int(counter.get_total_flops()) // 2


def run(model: nn.Module, args: Args, kwargs: Kwargs) -> Any:
    """Call the model; turn any failure into a TraceError that quotes it.

    Raises:
        TraceError: the forward raised.
    """
    try:
        return model(*args, **kwargs)
    except Exception as problem:
        text = str(problem).strip().splitlines()
        given = ", ".join(
            [describe(one) for one in args] + [f"{k}={describe(v)}" for k, v in kwargs.items()]
        )
        raise TraceError(
            where=f"{type(model).__name__}.forward({given})",
            found=f"{type(problem).__name__}: {text[0] if text else 'no message'}",
            allowed="an input that the model accepts",
            fix="describe a real input with --input, such as 3x224x224 or tokens=int64:1x16 "
            "(repeat it for several inputs)",
        ) from problem


def describe(value: Any) -> str:
    """Name a value by dtype and shape."""
    if isinstance(value, Tensor):
        shape = "x".join(str(n) for n in value.shape)
        return f"{str(value.dtype).removeprefix('torch.')}:{shape}"
    return type(value).__name__


def tensors_in(output: Any) -> list[Tensor]:
    """Return the tensors in an output of any structure, dataclasses and mappings included."""
    if isinstance(output, Tensor):
        return [output]
    if isinstance(output, Mapping):
        return [t for one in output.values() for t in tensors_in(one)]
    if isinstance(output, Sequence) and not isinstance(output, str | bytes):
        return [t for one in output for t in tensors_in(one)]
    if hasattr(output, "__dataclass_fields__"):
        return [
            t for name in output.__dataclass_fields__ for t in tensors_in(getattr(output, name))
        ]
    return []


@contextmanager
def quiet_forward() -> Iterator[None]:
    """Switch off attention's fused eval path, which goes around the layers it holds."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


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
