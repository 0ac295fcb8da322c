"""What a file of weights holds, listed without a model to put them into."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from bp_convert.files.sidecar import read_safetensors
from bp_convert.files.sniff import FileKind, file_kind
from bp_convert.files.state import find_states
from bp_convert.files.unpickle import load_inert
from bp_convert.pickles.inert import module_class

USUAL = ("state_dict", "model_state_dict", "model_state", "model")  # beside an optimiser's


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a file.

    Attributes:
        name: its key.
        shape: as saved.
        dtype: torch's name of it.
        size: its numbers.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    size: int


def weights_alone(path: Path) -> tuple[StoredTensor, ...] | None:
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
        return () if kind is FileKind.SAFETENSORS else None
    usual = next((states[key] for key in USUAL if key in states), None)
    state = usual or max(states.values(), key=lambda one: sum(map(Tensor.numel, one.values())))
    return tuple(
        StoredTensor(name, tuple(one.shape), str(one.dtype).removeprefix("torch."), one.numel())
        for name, one in state.items()
    )


def contents(path: Path, kind: FileKind) -> object:
    """Read what holds weights in a file, without the classes that it names.

    Raises:
        CheckpointError: the file is damaged, or names what no model needs.
    """
    return read_safetensors(path) if kind is FileKind.SAFETENSORS else load_inert(path, kind)
