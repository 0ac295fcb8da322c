"""Whether the hooks of a layer only look at what passes, so that they may go with its twin."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from bp_convert.graph.beside import COMPUTING, attributes
from bp_convert.graph.clone import clone
from bp_convert.graph.probing import draw
from bp_convert.graph.running import draws_kept, evaluating
from bp_convert.graph.standing import computed_by
from bp_convert.graph.tree import tensors_in
from bp_convert.kinds import Kind
from bp_convert.torch_private import HOOKS_ON_STATE, hooks_of, new_backward_hooks, version_of


def own_hooks(layer: nn.Module) -> bool:
    """Return whether a layer carries hooks beside those that compute its weight."""
    held = [hook for hooks in hooks_of(layer) for hook in hooks.values()]
    return any(not isinstance(hook, COMPUTING) for hook in held)


def in_the_way(kind: Kind, layer: nn.Module) -> str:
    """Say which hook of a layer does more than look, found by a trial on a copy; empty where all
    only look."""
    if any(vars(layer)[name] for name in HOOKS_ON_STATE) and not computed_by(layer):
        return "it carries hooks on its state"
    if not own_hooks(layer):
        return ""
    if not kind.probed:
        return "it carries hooks of its own"
    if any(one.is_meta for one in layer.parameters()):
        return "it carries hooks, and holds no values to try them on"
    if hooks_of(layer)[2] and not new_backward_hooks(layer):
        return "it carries backward hooks of the old form, which see its operations"
    found: list[str] = []
    allowed = {*kind.fields, *attributes(layer), "training"}
    trial = evaluating(clone(layer, apart=True))
    for hooks in hooks_of(trial):
        for key, hook in hooks.items():
            if not isinstance(hook, COMPUTING):
                hooks[key] = _watched(hook, allowed, found)
    x = draw(kind, layer)[0]
    try:
        with draws_kept(layer), torch.enable_grad():
            given = x.requires_grad_() if x.is_floating_point() else x
            parts = [one.sum() for one in tensors_in(trial(given)) if one.requires_grad]
            if parts:
                torch.stack(parts).sum().backward()  # type: ignore[no-untyped-call]
    except Exception as problem:  # of the user's code
        return f"its hooks stop on a trial: {type(problem).__name__}"
    return found[0] if found else ""


def _watched(hook: Any, allowed: set[str], found: list[str]) -> Callable[..., Any]:
    name = getattr(hook, "__qualname__", type(hook).__qualname__)

    def look(module: nn.Module, *passed: Any) -> Any:
        before = [(one, version_of(one)) for one in tensors_in(passed, objects=True)]
        result = hook(_Seen(module, name, allowed, found), *passed)
        if result is not None:
            found.append(f"its hook {name} changes what passes")
        if any(version_of(one) != version for one, version in before):
            found.append(f"its hook {name} writes on what passes")
        return result

    return look


class _Seen:
    """A layer as its hook is given it; notes what is asked of it."""

    def __init__(self, module: nn.Module, name: str, allowed: set[str], found: list[str]) -> None:
        vars(self)["of"] = module, name, allowed, found

    def __getattr__(self, key: str) -> Any:
        module, name, allowed, found = vars(self)["of"]
        if key not in allowed:
            found.append(f"its hook {name} reads its {key}")
        return getattr(module, key)

    def __setattr__(self, key: str, value: Any) -> None:
        module, name, _, found = vars(self)["of"]
        found.append(f"its hook {name} sets its {key}")
        setattr(module, key, value)

    def __hash__(self) -> int:
        return hash(vars(self)["of"][0])

    def __eq__(self, other: object) -> bool:
        return other is vars(self)["of"][0] or other is self
