"""LoRA adapters, and merging them into the layers that they adapt.

They are known by their structure: a module that holds ``base_layer`` and ``lora_...``, or a layer
that holds ``lora_...`` itself.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from bp_convert.errors import PlanError
from bp_convert.graph.clone import clone
from bp_convert.graph.overlap import meetings
from bp_convert.graph.probing import draw, parted
from bp_convert.graph.running import draws_kept, evaluating
from bp_convert.graph.standing import standing, taken
from bp_convert.graph.tree import tensors_in
from bp_convert.kinds import kind_of

MARK = "lora_"


def is_wrapper(module: nn.Module) -> bool:
    """Return whether a module wraps a base layer that it adapts."""
    base = dict(module.named_children()).get("base_layer")
    return base is not None and _is_marked(module)


def is_adapted(module: nn.Module) -> bool:
    """Return whether a layer holds an adapter of its own weight."""
    return _is_marked(module) and kind_of(module) is not None


def adapters_of(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules that adapt a layer, by their first names."""
    return {name: one for name, one in model.named_modules() if is_wrapper(one) or is_adapted(one)}


def parts_of_adapters(model: nn.Module) -> dict[int, str]:
    """Return the modules that belong to adapters, base layers apart, by ``id``, with the adapter's
    name."""
    found = {}
    for name, wrapper in adapters_of(model).items():
        base = set(map(id, getattr(wrapper, "base_layer", nn.Identity()).modules()))
        parts = (one for one in wrapper.modules() if one is not wrapper and id(one) not in base)
        found.update({id(one): name for one in parts})
    return found


@torch.no_grad()
def merged(model: nn.Module) -> tuple[nn.Module, int]:
    """Return a copy in which every adapter is merged into its layer, and how many there were.

    A wrapper is merged by its own ``merge`` where it has one. Each layer is then run beside what
    it stands for, in eval mode.

    Raises:
        PlanError: an adapter that cannot be merged; the message names it and why.
    """
    if not adapters_of(model):
        return model, 0
    copy = clone(model, apart=True)
    met = meetings(copy)
    plain: dict[nn.Module, nn.Module] = {}
    for name, adapter in adapters_of(copy).items():
        where = f"{name} ({type(adapter).__name__})"
        tied = [
            other.name
            for one in getattr(adapter, "base_layer", adapter).parameters(recurse=False)
            for _, other in met.get(id(one), ())
        ]
        if tied:
            raise _cannot(where, f"the weight that it adapts is also that of {tied[0]}")
        plain[adapter] = _merged(where, adapter)
    return clone(copy, plain, apart=True), len(plain)


def _is_marked(module: nn.Module) -> bool:
    names = [name for name, _ in module.named_children()]
    names += [name for name, _ in module.named_parameters(recurse=False)]
    return any(name.startswith(MARK) for name in names)


def _merged(where: str, adapter: nn.Module) -> nn.Module:
    """Return the plain layer with its adapter's change in it."""
    own: Any = adapter
    base = own.base_layer if is_wrapper(adapter) else adapter
    kind = kind_of(base)
    if kind is None:
        raise _cannot(where, f"no kind is known of its base layer, a {type(base).__name__}")
    training = adapter.training
    try:
        with draws_kept(adapter):
            evaluating(adapter)
            inputs = draw(kind, base)
            wanted = [_outputs(adapter, x) for x in inputs]
            if is_wrapper(adapter) and callable(getattr(adapter, "merge", None)):
                if not getattr(adapter, "merged", False):
                    own.merge()
                made = base
            elif is_wrapper(adapter):
                made = _read_off(adapter, base)
            else:
                found = standing(kind, adapter)
                made = taken(kind, adapter) if found.layer is adapter else found.layer
            got = [_outputs(evaluating(made), x) for x in inputs]
    except Exception as problem:  # of the user's code
        raise _cannot(where, f"{type(problem).__name__}: {problem}") from problem
    for x, due, mine in zip(inputs, wanted, got, strict=True):
        if said := parted(mine, due, x):
            raise _cannot(where, f"merged, {said}")
    return made.train(training)


def _read_off(adapter: nn.Module, base: Any) -> nn.Module:
    """Return the plain layer that computes what a wrapper without a ``merge`` does."""
    made: Any = clone(base)
    if isinstance(base, nn.Linear):
        units = torch.eye(base.in_features).to(base.weight)
        made.weight.copy_((adapter(units) - adapter(torch.zeros_like(units))).t())
    elif isinstance(base, nn.Embedding):
        made.weight.copy_(adapter(torch.arange(base.num_embeddings, device=base.weight.device)))
    else:
        raise TypeError(f"it has no merge(), and is around a {type(base).__name__}")
    plain: nn.Module = evaluating(made)
    return plain


def _outputs(layer: nn.Module, x: Tensor) -> list[Tensor]:
    return tensors_in(layer(x))


def _cannot(where: str, found: str) -> PlanError:
    return PlanError(
        where=where,
        found=f"an adapter that cannot be merged: {found}"[:300],
        allowed="adapters that add to the weight of a layer of their own",
        fix="merge it with the library that made it, or leave --merge-adapters out: the base layer "
        "is then converted and the adapter kept beside it",
    )
