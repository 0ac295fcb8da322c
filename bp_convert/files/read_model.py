"""A model file in, an nn.Module on the CPU out."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor, nn

from bp_convert.errors import CheckpointError, PlanError
from bp_convert.files.arch import ARCH_FORMS, arch_factory, arch_of_folder
from bp_convert.files.converted import is_converted
from bp_convert.files.sniff import FileKind, file_kind, refusal
from bp_convert.files.state import contents, find_states, fit_weights, weights_alone
from bp_convert.files.unpickle import listed, load_admitted
from bp_convert.hub.layout import WEIGHTS, weight_files
from bp_convert.hub.regrouped import as_held
from bp_convert.pickles.inert import module_class
from bp_convert.ready import check_ready

# Keys under which training scripts pickle a whole model.
_MODEL_KEYS = ("model", "net", "network", "module", "ema")


@dataclass(frozen=True)
class Loaded:
    """A loaded model.

    Attributes:
        model: on the CPU, in the mode and with the dtypes that it had.
        source: what the file held, in words.
        arch: the ``--arch`` that was used, if any.
        notes: what was changed or left out on the way.
    """

    model: nn.Module
    source: str
    arch: str | None
    notes: tuple[str, ...]


def load_model(
    path: str | Path,
    *,
    arch: str | None = None,
    trust: Sequence[str] = (),
    allow_missing: bool = False,
) -> Loaded:
    """Load a model file onto the CPU; nothing that stands in the file runs.

    Args:
        arch: how to make the model that the weights belong to (see ``ARCH_FORMS``). Weights are
            then taken from any file that holds them, without the classes that it names.
        trust: packages, or Python files, whose classes a pickled model may have; their code runs.
        allow_missing: leave weights that the file lacks at their random start.

    Raises:
        CheckpointError: the file holds no model, needs ``arch`` or ``trust``, or does not fit.
    """
    path = Path(path)
    arch = arch_of_folder(path) if arch is None and path.is_dir() else arch
    if arch is not None and path.is_dir():
        content: object = _folder_state(path)
        words = "the weights of a folder"
    else:
        kind = file_kind(path)
        if kind is not FileKind.LEGACY and is_converted(path):
            raise refusal(
                path,
                "a model that bp-convert has already converted",
                f"bp_convert.load({str(path)!r}) loads it, and `bp-convert dense {path} -o "
                "DENSE.pt` turns it back into plain layers that can be converted again",
            )
        if arch is None:
            if kind is FileKind.SAFETENSORS:
                raise _needs_arch(path, "weights without a model (safetensors)")
            return _whole(path, _content(path, kind, trust))
        content = contents(path, kind)
        name = module_class(content)
        words = f"the weights of a pickled {name}" if name else ""
        words = "safetensors" if kind is FileKind.SAFETENSORS else words
    model = arch_factory(arch, trust=trust, typed=True)()
    if path.is_dir():
        _typed_as(model, content)
        content = as_held(model, content) if isinstance(content, dict) else content
    place, notes = fit_weights(model, content, where=str(path), allow_missing=allow_missing)
    words = words or ", ".join(filter(None, ("a state dict", place)))
    return Loaded(model, f"{words}, loaded into {arch}", arch, notes)


def _content(path: Path, kind: FileKind, trust: Sequence[str]) -> object:
    """Read a file; one that holds weights alone needs no class that it names, but an --arch."""
    try:
        return load_admitted(path, kind, trust=trust)
    except CheckpointError:
        held = None
        with suppress(CheckpointError):
            held = weights_alone(path)
        if held is None:
            raise
        keys = contents(path, kind)
        lightning = isinstance(keys, dict) and "pytorch-lightning_version" in keys
        what = "a Lightning checkpoint" if lightning else "a checkpoint with settings beside them"
        raise _needs_arch(path, f"weights without a model ({what})") from None


def _whole(path: Path, content: object) -> Loaded:
    notes: list[str] = []
    if isinstance(content, dict):
        keys = [key for key in _MODEL_KEYS if isinstance(content.get(key), nn.Module)]
        if keys:
            rest = [str(key) for key in content if key != keys[0]]
            notes.append(f"taken from key {keys[0]!r}; left out: {listed(rest) or 'nothing'}")
            content = content[keys[0]]
    if not isinstance(content, nn.Module):
        if any(state for _, state in find_states(content)):
            raise _needs_arch(path, "weights without a model (a state dict or checkpoint)")
        found = f"a {type(content).__name__}, not a model"
        raise refusal(path, found, "give a file with a model")
    model: nn.Module = content
    while isinstance(model, nn.DataParallel):
        model = model.module
        notes.append("unwrapped from DataParallel")
    _check_whole(path, model)
    top = type(model).__module__.partition(".")[0]
    library = f"{top} " if top in {"torch", "torchvision"} else ""
    source = f"a pickled {library}{type(model).__name__}"
    return Loaded(model, source, None, tuple(notes))


def _check_whole(path: Path, model: nn.Module) -> None:
    """Refuse a module that the pickle left without its parts."""
    try:
        for _ in (*model.parameters(), *model.buffers()):
            pass
        model.state_dict()
    except Exception as problem:
        raise refusal(
            path,
            f"a {type(model).__name__} that is incomplete: {type(problem).__name__}: {problem}",
            "write it again with torch.save(model), or give its state dict with --arch",
        ) from problem
    try:
        check_ready(model)
    except PlanError as problem:
        raise refusal(path, f"{problem.where}: {problem.found}", problem.fix) from None


def _needs_arch(path: Path, found: str) -> CheckpointError:
    fix = f"say which model they belong to: --arch {ARCH_FORMS}"
    if arch_of_folder(path.parent) is not None:
        fix = f"give the folder {path.parent}, whose config.json says which model they belong to"
    return CheckpointError(
        where=str(path),
        found=found,
        allowed="a pickled model, or weights together with --arch",
        fix=fix,
    )


def _folder_state(folder: Path) -> dict[str, object]:
    """Read the weights in a transformers folder, in one file or several."""
    try:
        files = weight_files(folder)
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        raise refusal(folder, "an index that cannot be read", "download it again") from None
    if files:
        return {name: one for file in files for name, one in _weights_file(file).items()}
    raise refusal(
        folder,
        f"a folder without {' or '.join(WEIGHTS)}",
        "give the file that holds the weights",
    )


def _typed_as(model: nn.Module, content: object) -> None:
    """Give a fresh model the floating type of a folder's weights, where they have one."""
    tensors = content.values() if isinstance(content, dict) else ()
    types = {one.dtype for one in tensors if isinstance(one, Tensor) and one.is_floating_point()}
    if len(types) != 1:
        return
    (found,) = types
    for one in model.state_dict(keep_vars=True).values():  # not what it computes for itself
        if isinstance(one, Tensor) and one.is_floating_point() and one.dtype != found:
            one.data = one.data.to(found)


def _weights_file(path: Path) -> dict[str, object]:
    content = contents(path, file_kind(path))
    return dict(content) if isinstance(content, dict) else {"": content}
