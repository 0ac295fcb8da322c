"""Finding the layers of a model, each once, under every name that it has."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property

import torch
from torch import nn

from bp_convert.errors import PlanError
from bp_convert.experts.stack import Stack
from bp_convert.graph.lookers import in_the_way
from bp_convert.graph.merging import is_adapted, parts_of_adapters
from bp_convert.graph.overlap import Holding, meetings
from bp_convert.graph.probing import code_of
from bp_convert.graph.stacks import stacks_in
from bp_convert.graph.standing import Standing, disproved, is_plain, outline, standing
from bp_convert.kinds import Kind, is_twin, kind_of, kind_of_either
from bp_convert.kinds.foreign import taken_over


@dataclass(frozen=True)
class Site:
    """A module that some kind speaks for, with the names under which the model holds it.

    Attributes:
        held: the module itself, or what stands for a bare parameter.
    """

    name: str
    aliases: tuple[str, ...]
    held: nn.Module
    kind: Kind

    @cached_property
    def standing(self) -> Standing:
        """What stands for the module where it computes its weight."""
        return standing(self.kind, self.held)

    @property
    def plain(self) -> bool:
        """Whether the module computes with the weight that it holds."""
        return self.standing.layer is self.held

    @property
    def module(self) -> nn.Module:
        """The plain layer that computes what the module computes; mostly that is itself."""
        return self.standing.layer

    @property
    def outline(self) -> nn.Module:
        """A plain layer of the same fields, perhaps without values."""
        return outline(self.kind, self.held)

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, *self.aliases)


def walk(model: nn.Module, *, bare: bool = True) -> tuple[Site, ...]:
    """Return every module of a known kind, in the model's order, shared modules once; what is a
    part of one, or of a bilinear layer, is none of its own.

    Args:
        bare: parameters that are stacks of matrices are among them.
    """
    names: dict[int, list[str]] = {}
    found: dict[int, tuple[nn.Module, Kind]] = {}
    inside = _insides(model)
    for name, module in model.named_modules(remove_duplicate=False):
        for key, parameter in stacks_in(module) if bare else ():
            stack = Stack.of(parameter)
            kind = kind_of(stack)
            if kind is not None:
                found.setdefault(id(parameter), (stack, kind))
            names.setdefault(id(parameter), []).append(f"{name}.{key}".lstrip("."))
        if id(module) not in found:
            kind = kind_of(module)
            if kind is None or id(module) in inside:
                continue
            found[id(module)] = (module, kind)
        names.setdefault(id(module), []).append(name)
    return tuple(
        Site(names[key][0], tuple(names[key][1:]), module, kind)
        for key, (module, kind) in found.items()
    )


def _insides(model: nn.Module) -> set[int]:
    """Return the ``id`` of every module that is a part of a layer."""
    inside: set[int] = set()
    for module in model.modules():
        kind = kind_of_either(module)
        if kind is not None:
            children = dict(module.named_children())
            parts = children if is_twin(module) else kind.parts
            inside.update(id(children[name]) for name in parts if name in children)
    return inside


def select(pattern: str, sites: Sequence[Site]) -> frozenset[str]:
    """Return the names of the sites that ``pattern`` matches.

    A pattern is a dotted name, a glob on dotted names, ``re:`` and a regular expression that
    matches a whole dotted name, or a type name. A name that looks like a glob, such as
    ``blocks[0]``, is taken for the name where the model has it.

    Raises:
        PlanError: the pattern matches nothing, and the message lists near names; or it is a
            regular expression that does not compile.
    """
    hits = (
        _hits(sites, lambda name: name == pattern)
        | {one.name for one in sites if pattern in (type(one.held).__name__, one.kind.name)}
        or _hits(sites, lambda name: fnmatch.fnmatchcase(name, pattern.replace("[", "[[]")))
        or _hits(sites, _reading(pattern))
    )
    if hits:
        return hits
    names = [name for site in sites for name in site.names]
    types = sorted({site.kind.name for site in sites})
    near = get_close_matches(
        pattern.removeprefix("re:").strip("*."), [*names, *types], n=5, cutoff=0.4
    )
    shown = near or names[:5]
    raise PlanError(
        where=f"pattern {pattern!r}",
        found=f"it matches none of the {len(sites)} layers that could be converted",
        allowed=f"a dotted name, a glob, re:REGEX, or a type ({', '.join(types) or 'none here'})",
        fix=f"near names: {', '.join(shown)}" if shown else "the model holds no such layer",
    )


def _hits(sites: Sequence[Site], matches: Callable[[str], object]) -> frozenset[str]:
    return frozenset(site.name for site in sites if any(map(matches, site.names)))


def _reading(pattern: str) -> Callable[[str], object]:
    """Return what tells whether a dotted name matches a glob or a regular expression."""
    if not pattern.startswith("re:"):
        return lambda name: fnmatch.fnmatchcase(name, pattern)
    try:
        return re.compile(pattern[3:]).fullmatch
    except re.error as problem:
        raise PlanError(
            where=f"pattern {pattern!r}",
            found=f"not a regular expression: {problem}",
            allowed="re: followed by a Python regular expression",
            fix="escape special characters, or use a glob such as layer4.*",
        ) from None


def structural_reasons(
    model: nn.Module,
    sites: Sequence[Site],
    *,
    keep_parametrized: bool = False,
    tied: bool = True,
) -> dict[str, str]:
    """Return why sites must stay, as far as it follows from how the model holds them.

    Args:
        keep_parametrized: layers whose weight is computed stay.
        tied: so do those that hold another layer's weight.
    """
    reasons: dict[str, str] = {}
    tried: dict[object, str] = {}  # layers that are alike are tried once
    met = meetings(model) if tied else {}
    parts_of_attention = {
        id(child): name
        for name, module in model.named_modules()
        if isinstance(module, nn.MultiheadAttention)
        for child in module.children()
    }
    adapters = parts_of_adapters(model)
    for site in sites:
        module = site.held
        reason = _own_reason(site.kind, module)
        if id(module) in adapters:
            reason = f"it is a part of the adapter {adapters[id(module)]}"
        if reason is None and id(module) in parts_of_attention:
            reason = "nn.MultiheadAttention reads its weight without calling it"
        if reason is None:
            reason = _tied(site, met)
        if reason is None and keep_parametrized and (computed := site.standing.computed):
            reason = f"its weight is computed ({computed}), and that is to be kept"
        if reason is None and not is_plain(site.kind, module):
            reason = site.standing.trouble or None
        if reason is None and not is_plain(site.kind, module):
            key = code_of(module), bool(site.standing.computed)
            if key not in tried:
                tried[key] = disproved(site.kind, module, site.standing)
            reason = tried[key] or None
        if reason is None and site.plain and (further := _further(site.kind, module)):
            reason = f"it holds further parameters ({', '.join(further)})"
        if reason is not None:
            reasons[site.name] = reason
    return reasons


def _own_reason(kind: Kind, module: nn.Module) -> str | None:
    if foreign := taken_over(module):
        return f"it is {foreign}"
    if is_adapted(module):
        return "it holds an adapter of its own (--merge-adapters merges it first)"
    if "forward" in module.__dict__:
        return "its forward is replaced on the instance"
    extra = []
    for name, child in module.named_children():
        reason = _own_reason(kind_of(child) or kind, child) if name in kind.parts else None
        if reason:
            return f"in its {name}: {reason}"
        if name not in kind.parts and child is not getattr(module, "parametrizations", None):
            extra.append(name)
    if extra:
        return f"it holds further modules ({', '.join(extra)})"
    dtypes = {p.dtype for p in module.parameters()}
    if not dtypes or any(not dtype.is_floating_point for dtype in dtypes):
        return "its weights are not floating-point numbers"
    if any(type(p).__name__ not in ("Parameter", "Tensor", "Buffer") for p in module.parameters()):
        return "its weights are a tensor subclass (quantised or distributed)"
    return in_the_way(kind, module) or None


def _further(kind: Kind, module: nn.Module) -> list[str]:
    """Return the parameters that a plain layer holds beside those of its type."""
    with torch.device("meta"):
        made = kind.dense(**kind.read(module))
    own = dict(made.named_parameters())
    return [name for name, _ in module.named_parameters() if name not in own]


def _tied(site: Site, met: dict[int, list[tuple[str, Holding]]]) -> str | None:
    inside = set(map(id, site.held.modules()))
    for name, parameter in site.held.named_parameters():
        others = [one for one in met.get(id(parameter), ()) if id(one[1].module) not in inside]
        if others:
            how, other = others[0]
            return f"its {name} {how} {other.name}"
    return None
