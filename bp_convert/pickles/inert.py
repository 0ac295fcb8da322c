"""Read the weights in a pickle without any of the classes that it names.

Each name that torch does not know as plain data becomes an ``Inert`` class: it accepts whatever
the pickle does to it, keeps the state it is given, and does nothing. So the weights of a training
checkpoint, or of a model whose class is not at hand, can be had without running anyone's code.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.serialization import add_safe_globals

DEEPEST = 400  # a module is three levels: itself, its attributes, its sub-modules


class Inert(list[Any]):
    """An object of an unknown class: its state, and nothing that acts.

    A list, because torch's unpickler appends to lists only.
    """

    name = ""  # the name that stands in the file; set in subclasses
    state: object = None

    def __new__(cls, *args: object, **kwargs: object) -> Inert:
        return super().__new__(cls)

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__()

    def __setstate__(self, state: object) -> None:
        self.state = state

    __hash__ = object.__hash__  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return self is other


class InertDict:
    """An unknown class that the pickle uses as a dictionary: torch fills OrderedDicts only."""

    name = ""

    def __new__(cls, *args: object, **kwargs: object) -> OrderedDict[Any, Any]:  # type: ignore[misc]
        return OrderedDict()


def inert_class(name: str, *, as_dict: bool = False) -> type:
    """Make the stand-in for one name."""
    return type("Inert", (InertDict if as_dict else Inert,), {"name": name})


class InertReach:
    """Stands for getattr: what is reached from an unknown class is one more of them."""

    def __init__(self, reached: list[tuple[Any, str]] | None = None) -> None:
        self.reached = [] if reached is None else reached

    def __call__(self, owner: object, name: object) -> object:
        if not isinstance(owner, type) or not issubclass(owner, Inert | InertDict):
            return Inert()
        full = f"{owner.name}.{name}"
        found = inert_class(full, as_dict=issubclass(owner, InertDict))
        self.reached.append((found, full))
        add_safe_globals([(found, full)])
        return found


def module_class(thing: object) -> str | None:
    """Return the class of a model, pickled whole or real, or None if this is no model."""
    if isinstance(thing, nn.Module):
        return type(thing).__qualname__
    if isinstance(thing, Inert) and _fields(thing) is not None:
        return thing.name.rpartition(".")[2]
    return None


def weights_of(thing: object) -> dict[str, Tensor]:
    """Return what state_dict() of a whole model gives, whether its classes are real or inert.

    Tied tensors appear under each of their names.
    """
    return dict(_walk(thing, "", frozenset()))


def _walk(thing: object, prefix: str, above: frozenset[int]) -> Iterator[tuple[str, Tensor]]:
    fields = _fields(thing)
    if fields is None or id(thing) in above:
        return
    passing = fields.get("_non_persistent_buffers_set")
    for group in ("_parameters", "_buffers"):
        for key, value in _items(fields.get(group)):
            if isinstance(value, Tensor) and not (
                group == "_buffers" and isinstance(passing, set) and key in passing
            ):
                yield f"{prefix}{key}", value
    for key, child in _items(fields.get("_modules")):
        yield from _walk(child, f"{prefix}{key}.", above | {id(thing)})


def _fields(thing: object) -> Mapping[str, object] | None:
    """Return the attributes of a module, real or inert."""
    fields = thing.state if isinstance(thing, Inert) else getattr(thing, "__dict__", None)
    if isinstance(fields, Mapping) and "_parameters" in fields and "_modules" in fields:
        return fields
    return None


def _items(group: object) -> list[tuple[str, object]]:
    if not isinstance(group, Mapping):
        return []
    return [(key, value) for key, value in group.items() if isinstance(key, str)]


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
