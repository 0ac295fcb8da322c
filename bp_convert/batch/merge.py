"""Trees laid over each other: what stands nearer wins, mappings go together key by key."""

from __future__ import annotations

from dataclasses import replace

from bp_convert.values.marks import Node

TRAININGS = ("train", "finetune")
_EITHER = {"steps": "epochs", "epochs": "steps"}  # of which a training has one


def merge(base: Node, over: Node, key: str = "") -> Node:
    """Lay one tree over another. Lists and scalars replace; `null` takes a mapping away.

    Args:
        key: under which both stand.
    """
    if not (isinstance(base.value, dict) and isinstance(over.value, dict)):
        return over
    left = base.value
    if key in TRAININGS:
        away = {_EITHER[name] for name in over.value if name in _EITHER}
        left = {name: one for name, one in left.items() if name not in away}
    values = dict(left)
    for name, one in over.value.items():
        values[name] = merge(values[name], one, name) if name in values else one
    return replace(over, value=values, keys={**base.keys, **over.keys})


def put(node: Node, path: tuple[str, ...], value: Node) -> Node:
    """Return a tree with a value at a path; mappings on the way are made."""
    head, *rest = path
    below = node.get(head)
    if rest:
        empty = Node({}, value.mark)
        inner = below if below is not None and isinstance(below.value, dict) else empty
        placed = put(inner, tuple(rest), value)
    else:
        placed = value if below is None else merge(below, value, head)
    if head in TRAININGS and rest and rest[0] in _EITHER:
        placed = placed.without(_EITHER[rest[0]])
    marks = {**node.keys, head: value.mark if not rest else node.keys.get(head, value.mark)}
    return replace(node, value={**node.value, head: placed}, keys=marks)
