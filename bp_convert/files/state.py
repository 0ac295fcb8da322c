"""Find the weights in a file, match their names to a model's, and load them; or list them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from bp_convert.errors import CheckpointError
from bp_convert.files.entries import further_state
from bp_convert.files.sidecar import read_safetensors
from bp_convert.files.sniff import FileKind, file_kind
from bp_convert.files.unpickle import listed, load_inert
from bp_convert.files.writable import is_plain
from bp_convert.graph.clone import all_weights
from bp_convert.pickles.inert import Inert, module_class, weights_of

# Where training scripts put the weights, the likeliest first; decides between equal matches.
_USUAL_KEYS = (
    *("state_dict", "model_state_dict", "model_state", "model", "net", "network", "module"),
    *("weights", "params", "ema", "model_ema", "state_dict_ema"),
)
# Names that wrappers insert: DataParallel, torch.compile, FSDP, activation checkpointing.
_WRAPPERS = ("module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
_DEPTH = 4  # dictionaries inside dictionaries
_STEPS = 5  # prefixes one after another


def weights_alone(path: Path) -> dict[str, Tensor] | None:
    """Return the tensors of a file that holds weights and no model; None for any other file.

    Of a training checkpoint those are the model's. Nothing that stands in the file runs.

    Raises:
        CheckpointError: the file is damaged, or no model file at all.
    """
    kind = file_kind(path)
    content = contents(path, kind)
    if module_class(content) is not None:
        return None
    if isinstance(content, dict) and any(module_class(one) for one in content.values()):
        return None
    states = {
        place: {name: one for name, one in state.items() if isinstance(one, Tensor)}
        for place, state in find_states(content)
    }
    states = {place: state for place, state in states.items() if state}
    if not states:
        return {} if kind is FileKind.SAFETENSORS else None
    usual = next((states[key] for key in _USUAL_KEYS[:4] if key in states), None)
    return usual or max(states.values(), key=lambda one: sum(map(Tensor.numel, one.values())))


def contents(path: Path, kind: FileKind) -> object:
    """Read what holds weights in a file, without the classes that it names.

    Raises:
        CheckpointError: the file is damaged, or names what no model needs.
    """
    return read_safetensors(path) if kind is FileKind.SAFETENSORS else load_inert(path, kind)


def fit_weights(
    model: nn.Module, checkpoint: object, *, where: str, allow_missing: bool = False
) -> tuple[str, tuple[str, ...]]:
    """Load the weights in ``checkpoint`` that fit ``model`` best into it.

    Returns:
        Words for where they stood ("key 'model_state'"), and notes on names that were changed,
        are missing or were left out.

    Raises:
        CheckpointError: there are no weights, none match, shapes differ, or some are missing.
    """
    wanted = list(model.state_dict())
    further = frozenset(further_state(model))
    place, state, steps = _best(checkpoint, wanted, further, where)
    _check_shapes(model, state, where)
    state, dropped = _known(state, further, where, allow_missing)
    try:
        result = model.load_state_dict(state, strict=False)
    except Exception as problem:
        raise CheckpointError(
            where=where,
            found=f"weights that the model does not take: {problem}",
            allowed=f"the weights of a {type(model).__name__}",
            fix="give the --arch that these weights belong to",
        ) from problem
    missing = untied(model, result.missing_keys, state)
    if missing and not allow_missing:
        raise CheckpointError(
            where=where,
            found=f"{len(missing)} of {len(wanted)} weights are missing: {listed(missing)}",
            allowed=f"all weights of the {type(model).__name__}",
            fix="correct --arch, or leave them at their random start with --allow-missing",
        )
    notes = [*steps, *dropped]
    if missing:
        notes.append(f"missing, left at their random start: {listed(missing)}")
    if result.unexpected_keys:
        notes.append(f"not in the model, left out: {listed(result.unexpected_keys)}")
    notes.extend(_dtype_note(model, state))
    return place, tuple(notes)


def find_states(
    thing: object, place: str = "", depth: int = 0, *, further: frozenset[str] = frozenset()
) -> Iterator[tuple[str, dict[str, object]]]:
    """Yield every set of named tensors in a checkpoint, with the key path that leads to it.

    Args:
        further: last parts of the names of what a model keeps besides, whatever its type.
    """
    if module_class(thing) is not None:
        yield place, dict(weights_of(thing))
        return
    if not isinstance(thing, Mapping) or depth > _DEPTH:
        return
    flat = dict(_flatten(thing, further))
    if any(isinstance(value, Tensor) for value in thing.values()) or _holds_states(thing):
        yield place, flat
    for key, value in thing.items():
        if isinstance(key, str) and not isinstance(value, Tensor):
            yield from find_states(
                value, f"{place}.{key}" if place else key, depth + 1, further=further
            )


def _holds_states(thing: Mapping[object, object]) -> bool:
    """Tell whether a dictionary holds parts of one model: {"encoder": {...}, "decoder": ...}."""
    parts = [value for value in thing.values() if isinstance(value, Mapping)]
    return sum(any(isinstance(one, Tensor) for one in part.values()) for part in parts) > 1


def _flatten(
    thing: Mapping[object, object], further: frozenset[str], prefix: str = ""
) -> Iterator[tuple[str, object]]:
    for key, value in thing.items():
        if not isinstance(key, str):
            continue
        if isinstance(value, Tensor) or key.rpartition(".")[2] in further:
            yield f"{prefix}{key}", value
        elif isinstance(value, Mapping) and prefix.count(".") < _DEPTH:
            yield from _flatten(value, further, f"{prefix}{key}.")


def _known(
    state: dict[str, object], further: frozenset[str], where: str, allow_missing: bool
) -> tuple[dict[str, object], list[str]]:
    """Leave out what is no tensor and not asked for; refuse extra state of an unknown class."""
    kept = {
        name: value for name, value in state.items() if isinstance(value, Tensor) or name in further
    }
    odd = [name for name in kept if name in further and not is_plain(kept[name])]
    if odd and not allow_missing:
        value = kept[odd[0]]
        kind = value.name if isinstance(value, Inert) else "a class that is not plain data"
        raise CheckpointError(
            where=f"{where}, {odd[0]}",
            found=f"extra state that holds {kind}; nothing was run",
            allowed="extra state of tensors, numbers, texts, lists and dictionaries",
            fix="write the file again with such state, or leave it out with --allow-missing",
        )
    left = [f"extra state of a class that is not admitted, left out: {listed(odd)}"] if odd else []
    return {name: value for name, value in kept.items() if name not in odd}, left


def _best(
    checkpoint: object, wanted: Sequence[str], further: frozenset[str], where: str
) -> tuple[str, dict[str, object], tuple[str, ...]]:
    ends = frozenset(name.rpartition(".")[2] for name in further)
    found = list(find_states(checkpoint, further=ends))
    if not found:
        raise CheckpointError(
            where=where,
            found=f"no weights, but {_describe(checkpoint)}",
            allowed="a state dict, or a checkpoint that holds one",
            fix="give a file that holds the model's weights",
        )
    goal = frozenset(wanted)
    matches = []
    for place, state in found:
        names, steps = match_names(list(state), goal)
        count = sum(name in goal for name in names)
        last = place.rpartition(".")[2]
        rank = -_USUAL_KEYS.index(last) if last in _USUAL_KEYS else -len(_USUAL_KEYS)
        score = (count, -len(state), rank)  # most matches, least beside them, likeliest key
        matches.append((score, place, dict(zip(names, state.values(), strict=True)), steps))
    (count, *_), place, state, steps = max(matches, key=lambda one: one[0])
    if not count:
        raise CheckpointError(
            where=where,
            found=f"weights of another model, such as {listed(list(found[0][1])[:3])}",
            allowed=f"weights such as {listed(list(wanted)[:3])}",
            fix="give the --arch that these weights belong to",
        )
    others = [one for one, other in found if one != place and len(other) == len(state)]
    if others:
        steps = (*steps, f"other weights in the file, not used: {listed(sorted(set(others)))}")
    return (f"key '{place}'" if place else "", state, steps)


def match_names(names: Sequence[str], wanted: frozenset[str]) -> tuple[list[str], tuple[str, ...]]:
    """Strip (or add) prefixes while it makes more names match; return the new names, in order.

    Searches sequences of steps breadth first, since of nested prefixes such as
    ``module._orig_mod.`` only the last step makes any name match.
    """
    start = list(names)
    best, best_count = start, sum(one in wanted for one in start)
    best_steps: tuple[str, ...] = ()
    seen = {tuple(start)}
    queue: deque[tuple[list[str], tuple[str, ...]]] = deque([(start, ())])
    while queue and best_count < len(wanted):
        current, steps = queue.popleft()
        if len(steps) == _STEPS:
            continue
        for new, words in _steps(current, wanted):
            key = tuple(new)
            if key in seen or len(set(new)) < len(new):
                continue
            seen.add(key)
            count = sum(one in wanted for one in new)
            if count > best_count:
                best, best_count, best_steps = new, count, (*steps, words)
            queue.append((new, (*steps, words)))
    return best, best_steps


def _steps(names: Sequence[str], wanted: frozenset[str]) -> Iterator[tuple[list[str], str]]:
    parts = [name.split(".") for name in names]
    for wrapper in _WRAPPERS:
        if any(wrapper in one for one in parts):
            new = [".".join(part for part in one if part != wrapper) for one in parts]
            yield new, f"{wrapper}. removed from the names"
    for prefix in _common_heads(names):
        new = [name.removeprefix(f"{prefix}.") for name in names]
        yield new, f"prefix {prefix}. removed from the names"
    for prefix in _common_heads(list(wanted)):
        if not any(name.startswith(f"{prefix}.") for name in names):
            yield [f"{prefix}.{name}" for name in names], f"prefix {prefix}. added to the names"


def _common_heads(names: Sequence[str]) -> list[str]:
    """Return the first components that at least half of the names share."""
    counts: dict[str, int] = {}
    for name in names:
        head, dot, _ = name.partition(".")
        if dot:
            counts[head] = counts.get(head, 0) + 1
    return [head for head, count in counts.items() if 2 * count >= len(names)]


def _check_shapes(model: nn.Module, state: Mapping[str, object], where: str) -> None:
    own = {name: value for name, value in all_weights(model).items() if not is_lazy(value)}
    wrong = [
        f"{name}: {tuple(value.shape)} in the file, {tuple(own[name].shape)} in the model"
        for name, value in state.items()
        if name in own and isinstance(value, Tensor) and value.shape != own[name].shape
    ]
    if wrong:
        raise CheckpointError(
            where=where,
            found=f"{len(wrong)} weights of other shapes: {'; '.join(wrong[:8])}"
            + (f"; and {len(wrong) - 8} more" if len(wrong) > 8 else ""),
            allowed="weights of the model's own shapes",
            fix="correct --arch; its options follow a question mark, such as "
            "--arch torchvision:resnet18?num_classes=10",
        )


def untied(model: nn.Module, missing: Sequence[str], state: Mapping[str, object]) -> list[str]:
    """Drop from ``missing`` the names of tensors that were loaded under another name."""
    own = model.state_dict(keep_vars=True)
    loaded = {id(own[name]) for name in state if name in own}
    return [name for name in missing if id(own.get(name)) not in loaded]


def _dtype_note(model: nn.Module, state: Mapping[str, object]) -> Iterator[str]:
    def floats(values: Sequence[object]) -> set[torch.dtype]:
        tensors = [one for one in values if isinstance(one, Tensor)]
        return {one.dtype for one in tensors if one.is_floating_point()}

    own, given = floats(list(model.parameters())), floats(list(state.values()))
    if len(own) == 1 and given and given != own:
        words = ", ".join(sorted(str(one).removeprefix("torch.") for one in given))
        yield f"weights are {words} in the file, {str(next(iter(own)))[6:]} in the model"


def _describe(thing: object) -> str:
    if isinstance(thing, Mapping):
        return f"a dictionary of {listed([str(key) for key in thing]) or 'nothing'}"
    return f"a {type(thing).__name__}"
