"""Copies of a model in which chosen modules and tensors are exchanged for others."""

from __future__ import annotations

import copy
import threading
import types
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from bp_convert.errors import PlanError
from bp_convert.experts.stack import Stack
from bp_convert.graph.beside import goes_along
from bp_convert.graph.closures import reconnect
from bp_convert.graph.stacks import closed, seated
from bp_convert.kinds import is_twin
from bp_convert.layers.in_two import in_two
from bp_convert.torch_private import parameters_of

M = TypeVar("M", bound=nn.Module)
# What copies cannot be made of, and what means the same to a copy.
_SHARED = (
    *(type(threading.Lock()), type(threading.RLock()), threading.Condition, threading.Event),
    *(threading.Semaphore, threading.Barrier, threading.local, types.ModuleType),
)


def clone(
    model: M,
    modules: Mapping[nn.Module, nn.Module] | None = None,
    tensors: Mapping[int, Tensor] | None = None,
    *,
    apart: bool = False,
) -> M:
    """Copy ``model``; wherever it holds a key of ``modules`` the copy holds the value instead. What
    stands for a bare parameter is found where the parameter is.

    ``tensors`` does the same for tensors, by their ``id``. What is exchanged is never copied, so
    weights that fall away cost no memory. All names and references of a shared module or a tied
    tensor follow, also those in lists and dictionaries that torch does not know of, and in
    functions that close over them, such as hooks. Hooks, buffers and attributes that a module
    carries beside its weights go along.

    Args:
        apart: also copy lists and dictionaries outside the model that its functions close over,
            so that nothing a forward of the copy does reaches them.

    Raises:
        PlanError: the model cannot be copied; the error names the attribute.
    """
    memo: dict[int, Any] = {
        id(one): one.detach().clone() for one in all_tensors(model) if not one.is_leaf
    }
    memo.update(tensors or {})
    for old, new in (modules or {}).items():
        memo[id(old)] = new
        if type(old) is Stack:
            memo[id(old.weight)] = new
    memo.update(_awkward(model))
    before = dict(memo)
    try:
        made = copy.deepcopy(model, memo)
    except Exception as problem:
        raise PlanError(
            where=_culprit(model, before) or type(model).__name__,
            found=f"the model cannot be copied: {type(problem).__name__}: {problem}",
            allowed="a model that copy.deepcopy copies",
            fix="take this attribute off the model, or give its class a __deepcopy__ method",
        ) from problem
    seated(made)
    for old, new in (modules or {}).items():
        if old is not new:
            goes_along(old, new, memo)
    reconnect(memo, apart=apart)
    _make_leaves(made)
    return made


def clone_to_meta(model: M, modules: Mapping[nn.Module, nn.Module] | None = None) -> M:
    """Copy the structure of ``model`` with every tensor on the meta device, without its data."""
    tensors = {id(tensor): to_meta(tensor) for tensor in all_tensors(model)}
    return clone(model, modules, tensors, apart=True)


def plain_clone(
    model: M,
    *,
    apart: bool = False,
    factored: bool = False,
    given: Mapping[nn.Module, nn.Module] | None = None,
) -> M:
    """Copy ``model`` with every bilinear layer exchanged for the plain one of the same weight, or,
    where ``factored`` is asked for and it is of low rank, for two plain ones in a row.

    Args:
        given: plain layers that are made already, by the bilinear ones.
    """
    ready = given or {}
    twins = [one for one in model.modules() if is_twin(one)]
    factors = [_factors(one) for one in twins]
    plain: dict[nn.Module, nn.Module] = {}
    weights: dict[tuple[int, ...], nn.Parameter] = {}  # of layers that share all factors
    beside: dict[int, Tensor] = {}
    for twin, held in zip(twins, factors, strict=True):
        if held and factors.count(held) > 1:
            one: Any = ready[twin] if twin in ready else twin.to_dense()
            one.weight = weights.setdefault(held, one.weight)
            bias = parameters_of(twin).get("bias")
            if bias is not None:  # which may stand beside the layer, too
                beside[id(bias)] = one.bias
        else:
            one = ready.get(twin) or (in_two(twin) if factored else None) or twin.to_dense()
        plain[twin] = one
    made = clone(model, plain, beside, apart=apart)
    closed(made)
    return made


def _factors(twin: nn.Module) -> tuple[int, ...]:
    """Return the ``id`` of both factors of a layer of one weight; nothing for others."""
    held = parameters_of(twin)
    both = [held.get(name) for name in ("w1", "w2")]
    return () if any(one is None for one in both) else tuple(map(id, both))


def to_meta(tensor: Tensor) -> Tensor:
    """Return a tensor of the same shape, dtype and class that holds no data."""
    empty = torch.empty_like(tensor, device="meta")
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(empty, requires_grad=tensor.requires_grad)
    return empty


def all_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters and buffers, those too that state_dict() leaves out, under every name."""
    return {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }


def all_tensors(model: nn.Module) -> list[Tensor]:
    """Return every tensor that a module of the model holds, in plain attributes and in lists,
    tuples and dictionaries, too."""
    found: dict[int, Tensor] = {}
    for module in model.modules():
        found.update({id(one): one for one in _held(vars(module), set())})
    return list(found.values())


def _held(value: object, known: set[int]) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict | list | tuple) and id(value) not in known:
        known.add(id(value))
        for one in value.values() if isinstance(value, dict) else value:
            yield from _held(one, known)


def _make_leaves(copied: nn.Module) -> None:
    """Cut the graph that torch records where it copies the parameters of scripted modules."""
    for module in copied.modules():
        if isinstance(module, torch.jit.ScriptModule):
            for one in module.parameters():
                if not one.is_leaf:
                    one.detach_().requires_grad_()


def _awkward(model: nn.Module) -> dict[int, Any]:
    """Return what stands for attributes that deepcopy cannot copy: locks and imported modules
    are shared, a generator of random numbers is copied with its state."""
    found: dict[int, Any] = {}
    for module in model.modules():
        for value in vars(module).values():
            if isinstance(value, _SHARED):
                found[id(value)] = value
            elif isinstance(value, torch.Generator):
                found[id(value)] = value.clone_state()
    return found


def _culprit(model: nn.Module, memo: Mapping[int, Any]) -> str | None:
    """Return the dotted name of the first attribute that cannot be copied."""
    known = {id(one): one for one in [*model.modules(), *all_tensors(model)]}
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            try:
                copy.deepcopy(value, {**known, **memo})
            except Exception:
                return f"{name}.{key}" if name else key
    return None
