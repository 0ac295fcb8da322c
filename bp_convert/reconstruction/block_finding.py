"""The blocks of a model, found by its structure or named; and what else of it holds weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from difflib import get_close_matches

from torch import nn

from bp_convert.errors import PlanError
from bp_convert.kinds import is_twin, kind_of

MANY = 2  # modules of one class in a container that make it a row of blocks
MOST = 0.5  # share of a block's weights in a row of its own, from which on that row's are blocks


def blocks_of(model: nn.Module, asked: Sequence[str] = ()) -> tuple[str, ...]:
    """Return the names of a model's blocks: those asked for, or the children of its rows.

    A row is a ModuleList or Sequential that holds several modules of one class, each with layers
    of its own. The outermost rows count; a block that is mostly a row itself, such as a stage,
    gives way to what stands in it.

    Raises:
        PlanError: the model has no module of a name.
    """
    if not asked:
        return tuple(_inside("", model))
    known = dict(model.named_modules(remove_duplicate=False))
    for name in asked:
        if name not in known or not name:
            near = get_close_matches(name, [one for one in known if one], n=3, cutoff=0.4)
            raise PlanError(
                where=f"reconstruct: blocks, {name!r}",
                found="no module of the model",
                allowed="dotted names of modules that are tuned one after the other",
                fix=f"near names: {', '.join(near)}" if near else "see bp-convert inspect",
            )
    return tuple(asked)


def _inside(path: str, module: nn.Module) -> list[str]:
    found: list[str] = []
    row = _is_row(module)
    for key, child in module.named_children():
        name = f"{path}.{key}".lstrip(".")
        if not row or not _is_block(child):
            found += [] if _is_layer(child) else _inside(name, child)
        else:
            found += _finer(name, child) or [name]
    return found


def _finer(name: str, block: nn.Module) -> list[str]:
    """Return the blocks inside a block that is a row, or mostly one."""
    if isinstance(block, nn.Sequential):
        return _inside(name, block)
    total = sum(one.numel() for one in block.parameters())
    rows = [one for one in block.children() if _is_row(one)]
    if sum(p.numel() for one in rows for p in one.parameters()) > MOST * total:
        return _inside(name, block)
    return []


def _is_row(module: nn.Module) -> bool:
    if not isinstance(module, nn.ModuleList | nn.Sequential):
        return False
    classes = Counter(type(one) for one in module.children() if not _is_layer(one))
    return max(classes.values(), default=0) >= MANY


def _is_block(module: nn.Module) -> bool:
    return not _is_layer(module) and not isinstance(module, nn.ModuleList | nn.ModuleDict)


def _is_layer(module: nn.Module) -> bool:
    """Tell a layer, of which nothing smaller is tuned for itself."""
    return is_twin(module) or kind_of(module) is not None or not any(module.children())


def layers_beside(model: nn.Module, blocks: Sequence[str]) -> tuple[str, ...]:
    """Return the names of modules outside of blocks that hold weights themselves, outermost
    first."""
    taken = {id(one) for name in blocks for one in model.get_submodule(name).modules()}
    found: list[str] = []
    for name, module in model.named_modules():
        if name and id(module) not in taken and _holds(module):
            found.append(name)
            taken |= {id(one) for one in module.modules()}
    return tuple(found)


def _holds(module: nn.Module) -> bool:
    if _is_layer(module):
        return any(True for _ in module.parameters())
    return bool(module._parameters)
