"""Whether a model's weights are there."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from bp_convert.errors import PlanError


def check_ready(model: object, *, values: bool = True) -> None:
    """Refuse what is no model, and a model of which some weights have no shape or no values yet.

    Args:
        values: whether weights have to hold values; to plan by shapes they need not.

    Raises:
        PlanError: no nn.Module; a lazy layer that has not seen an input, or a tensor on the meta
            device, of which the message names the first.
    """
    if not isinstance(model, nn.Module):
        raise _no_model(model)
    if isinstance(model, torch.jit.ScriptModule):
        raise PlanError(
            where=type(model).__name__,
            found="a TorchScript program, whose layers can no longer be exchanged",
            allowed="an eager nn.Module",
            fix="give the model that it was made from, and script the result",
        )
    held = [
        (name, module, one)
        for name, module in model.named_modules()
        for own in (module.named_parameters, module.named_buffers)
        for one in own(recurse=False)
    ]
    lazy = [(name, module) for name, module, (_, tensor) in held if is_lazy(tensor)]
    if lazy:
        name, module = lazy[0]
        count = len({id(one) for _, one in lazy})
        raise PlanError(
            where=f"{name or 'the model itself'} ({type(module).__name__})",
            found="a lazy layer that has not seen an input, so that its weights have no shape yet"
            + (f"; {count - 1} more are like it" if count > 1 else ""),
            allowed="a model that has run once",
            fix="run it once on an example before converting or saving it: model(example)",
        )
    empty = [(name, module, key) for name, module, (key, tensor) in held if tensor.is_meta]
    if empty and values:
        name, module, key = empty[0]
        raise PlanError(
            where=f"{name}.{key}".lstrip(".") + f" ({type(module).__name__})",
            found="a tensor on the meta device: it was never loaded and has no values"
            f" ({len(empty)} of {len(held)} tensors are like it)",
            allowed="weights with values",
            fix="load them first: model.to_empty(device='cpu'), then "
            "model.load_state_dict(weights, assign=True)",
        )


def _no_model(thing: object) -> PlanError:
    fix = "give the model itself"
    if isinstance(thing, str | Path):
        fix = (
            f"bp_convert.open_model({str(thing)!r}).model loads it; on the command line, "
            f"bp-convert {thing} does all of it"
        )
    elif isinstance(getattr(thing, "model", None), nn.Module):
        fix = "give its attribute model"
    elif isinstance(thing, Mapping):
        fix = "make the model that these weights belong to, load them into it, and give that"
    elif isinstance(thing, type):
        fix = f"make one: {thing.__name__}(...)"
    return PlanError(
        where="model",
        found=f"{thing!r}"[:120]
        if isinstance(thing, str | Path | type)
        else f"a {type(thing).__name__}",
        allowed="an nn.Module",
        fix=fix,
    )
