"""Weights that no kind speaks for, listed so that nothing of a model goes unmentioned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

from torch import nn
from torch.nn.utils.parametrize import ParametrizationList

from bp_convert.graph.reshape import held, owner_of
from bp_convert.graph.stacks import torch_base
from bp_convert.graph.walk import Site
from bp_convert.kinds import KINDS
from bp_convert.kinds.foreign import taken_over
from bp_convert.values.plan import OtherWeights, Resize

NAMED = 3  # bare parameters that a reason names
Numbers = tuple[int, int]  # before and after


def others_of(
    model: nn.Module, sites: Sequence[Site], resizes: Sequence[Resize] = ()
) -> tuple[OtherWeights, ...]:
    """Return every module that holds parameters of its own and is no site, nor part of one.

    Args:
        sites: the layers of a known kind.
        resizes: parameters whose shape changes.
    """
    after = _after(model, resizes)
    counted = {id(p): site.name for site in sites for p in site.held.parameters()}
    inside = {id(module) for site in sites for module in site.held.modules()}
    names: dict[int, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        names.setdefault(id(module), []).append(name)
    found = []
    for name, module in model.named_modules():
        own = dict(module.named_parameters(recurse=False))
        if id(module) in inside or not own:
            continue
        fresh = {id(p): p for p in own.values() if id(p) not in counted}
        if all(counted.get(id(p)) == f"{name}.{key}".lstrip(".") for key, p in own.items()):
            continue  # stacks of matrices, each a layer
        first = next((counted[id(p)] for p in own.values() if id(p) in counted), "")
        counted.update(dict.fromkeys(fresh, name))
        found.append(
            OtherWeights(
                name=name,
                aliases=tuple(names[id(module)][1:]),
                kind=type(module).__name__,
                reason=_why(module, {key: p for key, p in own.items() if id(p) in fresh})
                if fresh
                else f"its parameters are those of {first or 'the model itself'}",
                params=_sizes(list(fresh.values()), after),
            )
        )
    return tuple(found)


def shared_by(
    model: nn.Module, sites: Sequence[Site], resizes: Sequence[Resize] = ()
) -> dict[str, Numbers]:
    """Return for each site how many of its parameters a site before it holds as well."""
    after = _after(model, resizes)
    seen: set[int] = set()
    found = {}
    for site in sites:
        own = list(site.held.parameters())
        found[site.name] = _sizes([p for p in own if id(p) in seen], after)
        seen.update(map(id, own))
    return found


def _after(model: nn.Module, resizes: Sequence[Resize]) -> dict[int, int]:
    """Return how many numbers the parameters that change have afterwards, by their ``id``."""
    return {id(held(*owner_of(model, one.name))): prod(one.after) for one in resizes}


def _sizes(parameters: Sequence[nn.Parameter], after: Mapping[int, int]) -> Numbers:
    return (
        sum(p.numel() for p in parameters),
        sum(after.get(id(p), p.numel()) for p in parameters),
    )


def _why(module: nn.Module, own: Mapping[str, nn.Parameter]) -> str:
    """Return why no kind speaks for a module."""
    kind = type(module)
    if foreign := taken_over(module):
        return foreign
    if kind.__module__.startswith(("bp_convert.layers", "bp_convert.experts")):
        return "bilinear already"
    if isinstance(module, ParametrizationList):
        return "a parametrised weight, made anew at each call"
    if isinstance(module, nn.ParameterList | nn.ParameterDict):
        return f"bare parameters of an nn.{kind.__name__}"
    base = torch_base(kind)
    if base is not None:
        named = (
            f"nn.{base.__name__}" if kind is base else f"{kind.__name__} (an nn.{base.__name__})"
        )
        if any(issubclass(base, one.dense) for one in KINDS):
            return f"{named} has a forward of its own"
        if all(p.dim() < 2 for p in own.values()):
            return f"no kind for {named}: only vectors, nothing to factor"
        return f"no kind for {named} yet"
    words = ", ".join([*own][:NAMED]) + (
        f" and {len(own) - NAMED} more" if len(own) > NAMED else ""
    )
    deep = any(sum(size > 1 for size in p.shape) == 3 for p in own.values())
    stacked = " (a stack of matrices)" if deep else ""
    plural = "" if len(own) == 1 else "s"
    return f"bare parameter{plural} {words}{stacked} of class {kind.__name__}"
