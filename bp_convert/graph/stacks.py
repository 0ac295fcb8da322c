"""Bare parameters that are stacks of matrices: where a class holds them, and copies in which a
module takes their place, or gives it back.

Which parameters those are follows from their shape alone; whether the class goes on as before is
tried by running it (``graph.observe``).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from torch import nn
from torch.nn.utils.parametrize import ParametrizationList

from bp_convert.experts.stack import Stack
from bp_convert.kinds import is_twin, kind_of
from bp_convert.torch_private import parameters_of, submodules_of

_LISTS = (nn.ParameterList, nn.ParameterDict, ParametrizationList)


def stacks_in(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters of a module that may be stacks of matrices, with their names there:
    those of three axes, of a class that is no layer of torch's."""
    if kind_of(module) is not None or is_twin(module) or isinstance(module, _LISTS):
        return
    base = type(module)
    if base.__module__.startswith("bp_convert.") or torch_base(base) is not None:
        return
    for key, one in parameters_of(module).items():
        if type(one) is nn.Parameter and one.dim() == 3 and min(one.shape) > 1:
            yield key, one


def layer_at(model: nn.Module, name: str) -> nn.Module:
    """Return the layer of a name: a module, or what stands for a bare parameter."""
    path, _, key = name.rpartition(".")
    held = parameters_of(model.get_submodule(path)).get(key) if name else None
    return model.get_submodule(name) if held is None else Stack.of(held)


def bare_names(model: nn.Module, names: Collection[str]) -> dict[type[nn.Module], list[str]]:
    """Return which names are those of bare parameters, by the class that holds them."""
    found: dict[type[nn.Module], list[str]] = {}
    for name in filter(None, names):
        path, _, key = name.rpartition(".")
        owner = model.get_submodule(path)
        if parameters_of(owner).get(key) is not None:
            found.setdefault(type(owner), []).append(name)
    return found


def opened(model: nn.Module, names: Collection[str]) -> dict[str, Stack]:
    """Put modules in the place of those of the named parameters that are bare, in place; return
    them. Who multiplies by the parameter then calls the module."""
    made = {}
    for name in names:
        path, _, key = name.rpartition(".")
        owner = model.get_submodule(path)
        held = parameters_of(owner).get(key) if name else None
        if held is not None:
            made[name] = Stack.of(held)
            del parameters_of(owner)[key]
            submodules_of(owner)[key] = made[name]
    return made


def closed(model: nn.Module) -> None:
    """Give every stack's place back to its parameter, in place."""
    for module in list(model.modules()):
        for key, child in list(submodules_of(module).items()):
            if type(child) is Stack:
                del submodules_of(module)[key]
                parameters_of(module)[key] = child.weight


def seated(model: nn.Module) -> None:
    """Move modules that a copy put among the parameters to where modules are, in place."""
    for module in list(model.modules()):
        for key, one in list(parameters_of(module).items()):
            if isinstance(one, nn.Module):
                del parameters_of(module)[key]
                submodules_of(module)[key] = one


def torch_base(kind: type[nn.Module]) -> type[nn.Module] | None:
    """Return the class of torch.nn that a class is, or is built on, containers apart; None where
    there is none."""
    for one in kind.__mro__:
        if one in (nn.Module, nn.Sequential, nn.ModuleList, nn.ModuleDict):
            return None
        if getattr(nn, one.__name__, None) is one:
            found: type[nn.Module] = one
            return found
    return None
