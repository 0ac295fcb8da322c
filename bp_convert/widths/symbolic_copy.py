"""A copy of a model that holds no weights, with widths that are symbols or other numbers."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import sympy
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from bp_convert.fakes.fake import stub
from bp_convert.fakes.fake_run import watch
from bp_convert.fakes.origin import Origin
from bp_convert.graph.clone import all_tensors, clone
from bp_convert.graph.reshape import held, owner_of
from bp_convert.graph.standing import computed_by, standing
from bp_convert.kinds import kind_of
from bp_convert.kinds.shapes import Attr, Dim, Form, Size, Sizes
from bp_convert.torch_private import buffers_of, parameters_of
from bp_convert.widths.symbolic_mode import SymbolicMode
from bp_convert.widths.symbols import Equality, SizeEnv, expr_of
from bp_convert.widths.width_forms import form_of

_HEAD = re.compile(
    r"(^|_)(head_?(dim|size|width|channels)|dim_?(per_)?head|d_(kv|head)|(key|value|proj)_dim)$"
)
# Counts of things that are not channels, even where the number is the same by chance.
_COUNT = re.compile(
    r"(kernel|patch|window|image|img|vocab|heads?$|n_head|layers|depth|stride|shift|max_|position"
    r"|groups|cardinality|rank|seq|len|ratio|batch|padding|dilation|token|resolution|num_class)"
)
_LEAST = 4  # smaller numbers are more likely axes, kernel sizes or channels of an image


@dataclass
class SizedModule:
    """The widths of one module: where they stand in the copy and what they are in the model."""

    name: str
    module: nn.Module  # of the model
    fake: nn.Module  # of the copy
    form: Form | None
    own: Mapping[str, Dim] = field(default_factory=dict)
    inputs: list[Dim] = field(default_factory=list)
    sizes: Sizes = field(default_factory=Sizes)
    late: bool = False  # its input's widths are read off its first input

    def state(self) -> Iterator[tuple[str, Tensor, tuple[Dim, ...]]]:
        """Yield the key, the model's tensor and the symbolic shape of each tensor."""
        for key, shape in self.sizes.tensors.items():
            tensor = held(*owner_of(self.module, key))
            if tensor is not None:
                yield key, tensor, shape

    def attributes(self) -> Iterator[tuple[str, Size, Attr]]:
        """Yield the key, the model's value and the symbolic value of each attribute."""
        for key, value in self.sizes.attrs.items():
            owner, name = owner_of(self.module, key)
            yield key, _plain(vars(owner)[name]), value

    def write(self) -> None:
        """Set the attributes in the copy, past ``__setattr__``."""
        for key, value in self.sizes.attrs.items():
            owner, name = owner_of(self.fake, key)
            vars(owner)[name] = value


class SymbolicCopy:
    """A model whose sizes are symbols of ``env``; the model itself is only read.

    Attributes:
        source: the model.
        module: the copy to run.
        held: the modules that hold widths, by their first name.
        fixed: modules whose tensors keep their shape, with the reason.
        called: names of the modules that have been called.
        given: symbols of widths that a module takes from the one before.
    """

    def __init__(self, model: nn.Module, env: SizeEnv, mode: SymbolicMode) -> None:
        self.source = model
        self.env = env
        self.mode = mode
        self.held: dict[str, SizedModule] = {}
        self.fixed: dict[str, str] = {}
        self.called: set[str] = set()
        self.given: set[sympy.Symbol] = set()
        self._shapes: dict[int, tuple[str, tuple[Dim, ...]]] = {}  # tensor -> its first name
        self._shared: set[str] = set()  # modules with a tensor that others hold as well
        plans = self._describe(model)
        tensors = {
            id(t): mode.like(t, self._shapes[id(t)][1] if id(t) in self._shapes else None)
            for t in all_tensors(model)
        }
        self.module = clone(model, None, tensors, apart=True)
        for sized in plans:
            sized.fake = self.module.get_submodule(sized.name)
            self.held[sized.name] = sized
            sized.write()
            stub(sized.fake)
        watch(self.module, env.running, self.enter)

    def _describe(self, model: nn.Module) -> list[SizedModule]:
        widths = _widths(model)
        plans: list[SizedModule] = []
        covered: set[int] = set()
        for name, module in model.named_modules():
            if id(module) in covered:
                continue
            reason = _untouchable(module)
            if reason is not None:
                covered.update(id(one) for one in module.modules())
                self.fixed[name] = reason
                continue
            form = form_of(module)
            sized = SizedModule(name, module, module, form)
            if form is not None:
                if isinstance(module, nn.MultiheadAttention):
                    covered.update(id(one) for one in module.modules())
                sized.own = {k: self.env.symbol(f"{name}.{k}", v) for k, v in form.own.items()}
                sized.inputs = [
                    self.env.symbol(f"{name}.in" + (f"[{i}]" if i else ""), width)
                    for i, (_, width) in enumerate(form.inputs)
                ]
                self.given.update(s for one in sized.inputs for s in expr_of(one).free_symbols)
                sized.sizes = form.sizes(sized.own, sized.inputs)
                forward = type(module).forward
                sized.late = bool(form.inputs) and forward is form.base.forward
            else:
                sized.sizes = self._generic(name, module, widths)
            plans.append(sized)
            for key, tensor, shape in sized.state():
                self._claim(name, key, tensor, shape)
        for sized in plans:
            sized.late = sized.late and sized.name not in self._shared
        return plans

    def _claim(self, name: str, key: str, tensor: Tensor, shape: tuple[Dim, ...]) -> None:
        full = f"{name}.{key}" if name else key
        if id(tensor) not in self._shapes:
            self._shapes[id(tensor)] = (full, shape)
            return
        first, other = self._shapes[id(tensor)]
        self._shared.update((name, first.rpartition(".")[0]))
        origin = Origin(name, "", 0, note=f"{full} and {first} are one tensor (tied)")
        for a, b in zip(shape, other, strict=True):
            self.env.equalities.append(Equality(expr_of(a), expr_of(b), origin))

    def _generic(self, name: str, module: nn.Module, widths: frozenset[int]) -> Sizes:
        """Give every axis of every tensor, and every attribute that may be a width, a symbol."""
        prefix = f"{name}." if name else ""
        symbol = self.env.symbol
        tensors = {
            key: tuple(
                symbol(f"{prefix}{key}[{axis}]", size) for axis, size in enumerate(tensor.shape)
            )
            for key, tensor in [*parameters_of(module).items(), *buffers_of(module).items()]
            if tensor is not None and tensor.is_floating_point()
        }
        attrs: dict[str, Attr] = {}
        if not type(module).__module__.startswith("torch.nn."):
            for key, value in vars(module).items():
                if _may_be_width(key, value, widths):
                    attrs[key] = (
                        symbol(f"{prefix}{key}", value)
                        if isinstance(value, int)
                        else tuple(symbol(f"{prefix}{key}[{i}]", v) for i, v in enumerate(value))
                    )
        return Sizes(tensors, attrs)

    def enter(self, name: str, given: Tensor | None) -> None:
        """Note that a module is called, and read the widths of its input off its first input."""
        self.called.add(name)
        sized = self.held.get(name)
        if sized is None or not sized.late or given is None:
            return
        sized.late = False
        assert sized.form is not None
        inputs: list[Dim] = []
        for axis, width in sized.form.inputs:
            if not -given.dim() <= axis < given.dim():
                return
            size = given.shape[axis]
            if self.env.value(size) != width:
                return
            inputs.append(size)
        origin = Origin(name, "", 0)
        for old, new in zip(sized.inputs, inputs, strict=True):
            self.env.equalities.append(Equality(expr_of(old), expr_of(new), origin))
        before = dict(sized.sizes.tensors)
        sized.inputs = inputs
        sized.sizes = sized.form.sizes(sized.own, inputs)
        for key, tensor, shape in sized.state():
            if any(a is not b for a, b in zip(shape, before[key], strict=True)):
                made = self.mode.like(tensor, shape)
                if key in buffers_of(sized.fake):
                    buffers_of(sized.fake)[key] = made
                else:
                    parameters_of(sized.fake)[key] = cast(nn.Parameter, made)
        sized.write()


def _plain(value: Any) -> Size:
    return tuple(value) if isinstance(value, list | tuple) else int(value)


def _untouchable(module: nn.Module) -> str | None:
    if isinstance(module, torch.jit.ScriptModule):
        return "it is scripted"
    if parametrize.is_parametrized(module):
        return "its weight is parametrised"
    if computed_by(module):
        return "its weight is recomputed by a hook"
    kind = kind_of(module)
    if kind is not None and standing(kind, module).computed:
        return "its weight is computed by its forward"
    return None


def _widths(model: nn.Module) -> frozenset[int]:
    found: set[int] = set()
    for module in model.modules():
        form = form_of(module)
        if form is not None:
            sizes = form.told()
            found.update(d for key in sizes.attrs for d in _ints(sizes.attrs[key]))
    return frozenset(d for d in found if d >= _LEAST)


def _ints(value: Attr) -> tuple[int, ...]:
    return tuple(int(v) for v in (value if isinstance(value, tuple) else (value,)))


def _may_be_width(key: str, value: Any, widths: frozenset[int]) -> bool:
    if isinstance(value, list | tuple):
        return (
            len(value) > 1
            and all(type(v) is int and v in widths for v in value)
            and not _COUNT.search(key)
        )
    if type(value) is not int or value < 2:
        return False
    if _HEAD.search(key):
        return any(width % value == 0 for width in widths)
    return value in widths and not _COUNT.search(key)
