"""Find out, before anything is written, whether a model can be pickled and what is at fault."""

from __future__ import annotations

import io
import pickle

import torch
from torch import nn

from bp_convert.errors import CheckpointError


def check_picklable(model: nn.Module) -> None:
    """Pickle everything in a model but its tensors, and drop it.

    Raises:
        CheckpointError: something in the model cannot be pickled; names the module and attribute.
    """
    problem = _problem(model)
    if problem is None:
        return
    place, what = _culprit(model)
    raise CheckpointError(
        where=f"{place} of {type(model).__name__}",
        found=f"{what} cannot be pickled: {problem}",
        allowed="classes and functions that stand at the top level of a module",
        fix="move it there, or give --arch, so that weights and plan alone are written",
    )


class _NoTensors(pickle.Pickler):
    """Pickles as torch.save does, leaving tensors, and sub-modules if asked, out."""

    def __init__(self, root: object, skip_modules: bool) -> None:
        super().__init__(io.BytesIO(), protocol=2)
        self.root, self.skip_modules = root, skip_modules

    def persistent_id(self, thing: object) -> object:
        if isinstance(thing, torch.Tensor):
            return "tensor"
        if self.skip_modules and isinstance(thing, nn.Module) and thing is not self.root:
            return "module"
        return None


def _problem(thing: object, *, skip_modules: bool = False) -> str | None:
    try:
        _NoTensors(thing, skip_modules).dump(thing)
    except Exception as problem:
        return str(problem)
    return None


def _culprit(model: nn.Module) -> tuple[str, str]:
    for name, module in model.named_modules():
        if _problem(module, skip_modules=True) is None:
            continue
        for key, value in vars(module).items():
            if key != "_modules" and _problem(value, skip_modules=True) is not None:
                return f"{name}.{key}".lstrip("."), f"a {type(value).__name__}"
        return name or "the top module", f"the class {type(module).__qualname__}"
    return "the model", "something in it"
