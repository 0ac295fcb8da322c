"""What one forward pass shows: which layers are called, on what, and which make the output."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import FlopCounterMode

from bp_convert.errors import TraceError
from bp_convert.graph.clone import clone_to_meta

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


def observe(
    model: nn.Module, watched: Mapping[str, nn.Module], args: Args, kwargs: Kwargs
) -> Observation:
    """Run ``model`` once on the meta device and say what its layers did.

    No weight is read and the model is left as it is: a copy without data runs. torch's counter
    counts an LSTM on meta as its matrix products, where on a CPU it sees none.

    Args:
        watched: layers to report on, by name.
        args: positional inputs; only shapes and dtypes matter.
        kwargs: keyword inputs.

    Raises:
        TraceError: the forward failed, with its own message.
    """
    ghost = clone_to_meta(model).eval()
    by_name = dict(ghost.named_modules(remove_duplicate=False))
    for parameter in ghost.parameters():
        if parameter.is_floating_point():
            parameter.requires_grad_(True)
    args, kwargs = pytree.tree_map_only(Tensor, lambda t: t.to("meta"), (args, kwargs))
    seen = Observation()
    made: dict[Any, str] = {}  # autograd node -> the watched layer that made it
    counter = FlopCounterMode(display=False)
    starts: dict[str, int] = {}

    def before(name: str, module: nn.Module, inputs: Args, named: Kwargs) -> None:
        first = next(
            (t for t in pytree.tree_leaves((inputs, named)) if isinstance(t, Tensor)), None
        )
        seen.shapes.setdefault(name, []).append(() if first is None else tuple(first.shape))
        starts[name] = counter.get_total_flops()

    def after(name: str, output: Any) -> None:
        spent = counter.get_total_flops() - starts[name]
        seen.macs[name] = seen.macs.get(name, 0) + spent // 2
        for leaf in pytree.tree_leaves(output):
            if isinstance(leaf, Tensor) and leaf.grad_fn is not None:
                made[leaf.grad_fn] = name

    for name in watched:
        module = by_name[name]
        module.register_forward_pre_hook(
            lambda m, a, k, name=name: before(name, m, a, k), with_kwargs=True, prepend=True
        )
        module.register_forward_hook(lambda m, a, o, name=name: after(name, o))
    with quiet_forward(), counter:
        output = run(ghost, args, kwargs)
    seen.total_macs = counter.get_total_flops() // 2
    order = list(seen.shapes)
    heads = {name for leaf in tensors_in(output) if (name := _head(leaf, made, order)) is not None}
    seen.heads = tuple(name for name in order if name in heads)
    return seen


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
