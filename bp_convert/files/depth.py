"""How deep what a file holds is nested: no model goes far, and reading it must not either."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import nn

from bp_convert.pickles.inert import Inert

DEEPEST = 400  # a module is three levels: itself, its attributes, its sub-modules


def too_deep(content: object) -> bool:
    """Tell whether dictionaries, lists and modules in ``content`` are nested too deep to walk."""
    seen = {id(content)}
    level = [content]
    for _ in range(DEEPEST):
        below = []
        for thing in level:
            for one in _parts(thing):
                if id(one) not in seen:
                    seen.add(id(one))
                    below.append(one)
        if not below:
            return False
        level = below
    return True


def _parts(thing: object) -> Iterable[object]:
    if isinstance(thing, Inert):
        return (thing.state,)
    if isinstance(thing, Mapping):
        return thing.values()
    if isinstance(thing, list | tuple | set | frozenset):
        return thing
    return (vars(thing),) if isinstance(thing, nn.Module) else ()
