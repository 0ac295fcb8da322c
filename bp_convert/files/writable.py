"""Whether a model can be written and read back, decided before any work.

A pickle is tried on the model itself: written without its numbers, and read as the safe loader
will read it, with as little trust as that takes. What does not come back is named.
"""

from __future__ import annotations

import functools
import io
from collections import Counter, OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.jit import ScriptModule
from torch.nn.parameter import is_lazy

from bp_convert.errors import CheckpointError
from bp_convert.files.entries import whole_state
from bp_convert.files.unpickle import listed, revive
from bp_convert.graph.clone import all_weights
from bp_convert.pickles import pickler
from bp_convert.pickles.meaning import PLAIN_FILE, Unreadable, meanings
from bp_convert.torch_private import address_of, names_beyond_tensors

_COMPILED = "_orig_mod."  # what torch.compile puts before names; files hold what was compiled
_DEEPEST = 32  # levels of a value that is plain
_VALUES = (
    *(bool, int, float, complex, str, bytes, type(None)),
    *(torch.dtype, torch.device, torch.Size, torch.layout),
)
ANOTHER_WAY = f"{PLAIN_FILE}; the latter is loaded with bp_convert.load(path, model=YourModel)"


def check_writable(
    model: nn.Module, path: str | Path, *, arch: str | None = None, trust: Sequence[str] = ()
) -> tuple[str, ...]:
    """Refuse a model that could not be read back from the file that is to be written.

    Args:
        model: the model to be written, or, before the work, the source that it will be made from.
        path: the file; its ending says what will stand in it.
        arch: how to make the source model, if the file is to say so.
        trust: packages and Python files that will be trusted when the file is loaded.

    Returns:
        What loading the file will have to trust, of ``trust`` and besides.

    Raises:
        CheckpointError: the model would not come back as it is; names what is at fault, and a way
            out.
    """
    _check_values(model)
    tensors_alone = Path(path).suffix == ".safetensors"
    if arch is None and not tensors_alone:
        return check_whole(model, trust)
    _check_storable(model, tensors_alone=tensors_alone)
    return ()


def _check_storable(model: nn.Module, *, tensors_alone: bool) -> None:
    """Refuse a model with state that a file of weights and plan cannot hold.

    Args:
        tensors_alone: it is a safetensors file; else a pickle of tensors and plain values.

    Raises:
        CheckpointError: names the entry.
    """
    for name, value in whole_state(model).items():
        odd = _not_in_safetensors(value) if tensors_alone else _odd(value)
        if odd is None:
            continue
        if tensors_alone:
            file, fix = (
                "safetensors file",
                "write NAME.pt, with --arch (arch= in Python) or without",
            )
        else:
            file = "file of weights and plan"
            fix = (
                "let get_extra_state() return tensors, numbers, texts, or lists and dictionaries "
                "of them; or write NAME.pt without --arch, which holds the whole model"
            )
        owner = name.rpartition(".")[0]
        try:
            kind = type(model.get_submodule(owner)).__name__
        except AttributeError:
            kind = type(model).__name__
        raise CheckpointError(
            where=f"{name} ({kind})",
            found=f"state that would be lost: {odd}, which a {file} cannot hold",
            allowed="a file that holds all of a model's state",
            fix=fix,
        )


def is_plain(value: object) -> bool:
    """Tell whether a value is made of tensors, numbers and texts, as any file may hold."""
    return _odd(value) is None


def _odd(value: object, depth: int = 0) -> str | None:
    """Return what in a value is not plain."""
    if depth > _DEEPEST:
        return f"a nesting of more than {_DEEPEST} levels"
    below = functools.partial(_odd, depth=depth + 1)
    if isinstance(value, Tensor):
        return None if type(value.detach()) is Tensor else f"a {type(value).__name__}"
    if type(value) in (list, tuple, set):
        assert isinstance(value, list | tuple | set)
        return next(filter(None, map(below, value)), None)
    if type(value) in (dict, OrderedDict, Counter):
        assert isinstance(value, dict)
        return next(filter(None, (*map(below, value), *map(below, value.values()))), None)
    return None if type(value) in _VALUES else f"a {type(value).__name__}"


def _not_in_safetensors(value: object) -> str | None:
    if not isinstance(value, Tensor) or type(value.detach()) is not Tensor:
        return f"a {type(value).__name__}"
    if value.is_quantized or value.layout is not torch.strided or value.is_nested:
        return f"a tensor of {value.dtype}, {value.layout}".replace("torch.", "")
    return None if _has_dtype(value.dtype) else f"a tensor of {value.dtype}".replace("torch.", "")


@functools.cache
def _has_dtype(dtype: torch.dtype) -> bool:
    try:
        content = safetensors.torch.save({"x": torch.empty(0, dtype=dtype)})
        return bool(safetensors.torch.load(content)["x"].dtype == dtype)
    except Exception:
        return False


def check_whole(model: nn.Module, trust: Sequence[str] = ()) -> tuple[str, ...]:
    """Refuse a model that does not come back from a pickle.

    Returns:
        The packages and Python files to be trusted when it is loaded.

    Raises:
        CheckpointError: as ``check_writable``.
    """
    for name, module in model.named_modules():
        if isinstance(module, GraphModule | ScriptModule):
            what = "traced" if isinstance(module, GraphModule) else "scripted"
            raise _lost(
                f"{name or 'the model'} ({type(module).__name__})",
                f"a {what} module, which pickles as program text; that would run when it is read",
                f"{ANOTHER_WAY}; or convert the model that it was made from",
            )
    try:
        revived, needed = _revived(model, trust)
    except Unreadable as problem:
        place, what = _culprit(model, trust)
        raise _lost(
            f"{place} of {type(model).__name__}", f"{what} {problem}", problem.fix
        ) from None
    try:
        back = _forms(revived)
    except Exception as problem:
        found = f"comes back incomplete from a pickle: {_said(problem)}"
        raise _lost(_broken(model, revived), found, ANOTHER_WAY) from None
    own = _forms(model)
    if back != own:  # some classes' own way of pickling loses a part
        lost = [name for name in own if back.get(name) != own[name]] or [*back.keys() - own.keys()]
        raise _lost(
            lost[0].rpartition(".")[0] or "the model",
            f"state that does not come back from a pickle: {listed(lost)}",
            ANOTHER_WAY,
        )
    return needed


def plain_name(name: str) -> str:
    """Return the name of an entry in a file that holds a compiled module uncompiled."""
    return name.replace(_COMPILED, "")


def _check_values(model: nn.Module) -> None:
    for name, one in all_weights(model).items():
        if is_lazy(one):
            what, fix = "a lazy weight without a shape", "run the model once"
        elif one.is_meta:
            what, fix = "a weight on the meta device", "give it its weights first"
        else:
            continue
        raise CheckpointError(
            where=name,
            found=f"{what}, which has no values",
            allowed="weights that have values",
            fix=fix,
        )


class _Structure(pickler.Pickler):
    """Pickles all but the numbers, which stay where they are, and sub-modules if asked."""

    def __init__(self, root: object, skip_modules: bool) -> None:
        self.buffer = io.BytesIO()
        super().__init__(self.buffer, protocol=2)
        self.root, self.skip_modules = root, skip_modules
        self.parts: list[object] = []
        self._dtypes: dict[int, torch.dtype] = {}

    def persistent_id(self, thing: object) -> object:
        if isinstance(thing, torch.storage.TypedStorage):
            place, dtype = address_of(thing), thing.dtype
            if place and self._dtypes.setdefault(place, dtype) != dtype:
                raise Unreadable("shares its memory with a weight of another type")
        elif not torch.is_storage(thing) and not (
            self.skip_modules and isinstance(thing, nn.Module) and thing is not self.root
        ):
            return None
        self.parts.append(thing)
        return ("storage", len(self.parts) - 1)

    def _tensor(self, tensor: Tensor) -> object:
        return NotImplemented  # no storage is written, so none is too large


def _revived(
    thing: object, trust: Sequence[str], *, skip_modules: bool = False
) -> tuple[object, tuple[str, ...]]:
    """Pickle and unpickle in memory; return what comes back, and what must be trusted for it."""
    pickler = _Structure(thing, skip_modules)
    try:
        pickler.dump(thing)
    except Unreadable:
        raise
    except Exception as problem:
        raise Unreadable(f"cannot be pickled: {_said(problem)}") from None
    content = pickler.buffer.getvalue()
    try:
        names = names_beyond_tensors(io.BytesIO(content))
    except Exception as problem:
        raise Unreadable(
            f"pickles in a way that the safe loader does not take: {problem}"
        ) from None
    known, needed = meanings(names, trust)
    try:
        return revive(content, pickler.parts, known, needed), needed
    except Exception as problem:
        raise Unreadable(f"does not come back from a pickle: {_said(problem)}") from None


def _culprit(model: nn.Module, trust: Sequence[str]) -> tuple[str, str]:
    """Return the attribute that does not come back, and what it is."""
    for name, module in model.named_modules():
        if _comes_back(module, trust):
            continue
        for key, value in vars(module).items():
            if key != "_modules" and not _comes_back(value, trust):
                return f"{name}.{key}".lstrip("."), f"a {type(value).__name__}"
        return name or "the top module", f"the class {type(module).__qualname__}"
    return "the model", "something in it"


def _comes_back(thing: object, trust: Sequence[str]) -> bool:
    try:
        _revived(thing, trust, skip_modules=True)
    except Unreadable:
        return False
    return True


def _broken(model: nn.Module, revived: object) -> str:
    """Name the first module that comes back without one of its attributes."""
    for name, module in model.named_modules():
        try:
            twin = revived.get_submodule(name) if isinstance(revived, nn.Module) else revived
            whole = vars(module).keys() <= vars(twin).keys()
        except Exception:
            whole = False
        if not whole:
            return f"{name or 'the model'} ({type(module).__name__})"
    return "the model"


def _forms(model: Any) -> dict[str, object]:
    return {
        plain_name(name): (tuple(one.shape), one.dtype, one.layout)
        if isinstance(one, Tensor)
        else None
        for name, one in whole_state(model).items()
    }


def _said(problem: Exception) -> str:
    return (str(problem).splitlines() or [type(problem).__name__])[0]


def _lost(where: str, found: str, fix: str) -> CheckpointError:
    return CheckpointError(
        where=where,
        found=found,
        allowed="what bp_convert.load can read back in another process",
        fix=fix,
    )
